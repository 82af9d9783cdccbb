"""A nursery for links: an error that is alone comes out as itself, not wrapped in a group of one."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def open_flat_nursery() -> AsyncIterator[trio.Nursery]:
    """The tasks inside report failures through channels, so the block's own error is usually the only one; whoever
    wraps `async with dial(…)` in `except LinkBroken` would otherwise never see it."""
    error: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except BaseExceptionGroup as group:
        error = alone(group)
    if error is not None:
        raise error


def alone(group: BaseException) -> BaseException:
    """What a group of one (of one …) holds; otherwise the group itself."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
