"""A nursery for links: what they fail with comes out as one error that `except LinkBroken` sees, not as a group."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from swarmnode.errors import SwarmError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


@asynccontextmanager
async def open_flat_nursery() -> AsyncIterator[trio.Nursery]:
    """Whoever wraps `async with dial(…)` in `except LinkBroken` sees it, whether one task failed or several."""
    error: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except BaseExceptionGroup as group:
        error = alone(group)
    if error is not None:
        raise error


def alone(error: BaseException) -> BaseException:
    """The one error a group stands for; the group itself where a bug is among several.

    A machine that dies breaks all links with it in the same instant, so every task that used one fails: the first such
    failure speaks for the others. A cancelled block was left from outside, and what broke meanwhile concerns nobody.
    """
    found = list(_leaves(error))
    cancelled = [one for one in found if isinstance(one, trio.Cancelled)]
    if len(found) == 1 or all(isinstance(one, (SwarmError, trio.Cancelled)) for one in found):
        return cancelled[0] if cancelled else found[0]
    return error


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from _leaves(one)
    else:
        yield error
