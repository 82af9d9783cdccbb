"""Several ways to one node, tried in a staggered race: the best that is up soon is taken, the others are let go.

After RFC 8305 (Happy Eyeballs): a way starts when those before it had their head start, or at once where they failed.
Ways of one route start together, so that the first of them to be up is the fastest, whatever order they were named in.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import trio

from swarmnode.errors import LinkBroken, SwarmError
from swarmnode.wire.nursery import open_flat_nursery
from swarmnode.wire.routes import ROUTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

T = TypeVar("T")

HEAD_START_S = 0.25
"""Before the next way is tried as well: a round trip to most places, and one more."""
PREFER_S = 0.5
"""What a worse way waits, once it is up, for a better one that is still being tried."""


@dataclass(frozen=True, slots=True)
class Way(Generic[T]):
    """One attempt: `open` brings a channel up (HELLO and WELCOME included), or a link, and holds it for the block."""

    route: str
    open: Callable[[], AbstractAsyncContextManager[T]]
    name: str = ""
    """For people: the address, or through whom."""

    @property
    def rank(self) -> int:
        return ROUTES.index(self.route)


@dataclass(frozen=True, slots=True)
class Dialed(Generic[T]):
    """What is up, and the way that won; `took_s` is from its own start to WELCOME."""

    way: Way[T]
    up: T
    took_s: float


@asynccontextmanager
async def dial_best(ways: Sequence[Way[T]]) -> AsyncIterator[Dialed[T]]:
    """Race `ways`, best first. Of those that are up the better route wins, of one route the shorter round trip.

    Raises LinkBroken that tells of every way, or the error that whoever answered refused with.
    """
    race = _Race(ways)
    async with open_flat_nursery() as nursery:
        nursery.start_soon(race.run, nursery)
        winner = await race.decided()
        yield winner
        nursery.cancel_scope.cancel()


class _Race(Generic[T]):
    def __init__(self, ways: Sequence[Way[T]]) -> None:
        self._ways = ways
        self._up: list[Dialed[T]] = []
        self._failed: dict[int, SwarmError] = {}
        self._changed = trio.Event()
        self._over = trio.Event()
        self._scopes = [trio.CancelScope() for _ in ways]

    async def run(self, nursery: trio.Nursery) -> None:
        """Start one way after the other, until one has won."""
        for number, way in enumerate(self._ways):
            nursery.start_soon(self._try, number, way)
            if way.route == self._route_after(number):
                continue
            with trio.move_on_after(HEAD_START_S):
                while len(self._failed) <= number and not self._over.is_set():
                    await self._changed.wait()
            if self._over.is_set():
                return

    def _route_after(self, number: int) -> str | None:
        return self._ways[number + 1].route if number + 1 < len(self._ways) else None

    async def decided(self) -> Dialed[T]:
        """Wait for the winner; the other ways are closed."""
        while not self._up:
            if len(self._failed) == len(self._ways):
                raise self._failure()
            await self._changed.wait()
        with trio.move_on_after(PREFER_S):
            while self._better_may_come():
                await self._changed.wait()
        winner = min(self._up, key=lambda dialed: (dialed.way.rank, dialed.took_s))
        self._over.set()
        self._notify()
        for scope, way in zip(self._scopes, self._ways, strict=True):
            if way is not winner.way:
                scope.cancel()
        return winner

    def _failure(self) -> SwarmError:
        """A refusal says more than that nobody answered elsewhere."""
        refusals = [error for error in self._failed.values() if not isinstance(error, LinkBroken)]
        if refusals:
            return refusals[0]
        ways = ((self._ways[number], error) for number, error in self._failed.items())
        reasons = "; ".join(f"{way.route} {way.name}: {error.message}" for way, error in ways)
        return LinkBroken(f"no way leads there: {reasons}")

    def _better_may_come(self) -> bool:
        best = min(dialed.way.rank for dialed in self._up)
        settled = set(self._failed) | {self._ways.index(dialed.way) for dialed in self._up}
        return any(way.rank < best for number, way in enumerate(self._ways) if number not in settled)

    async def _try(self, number: int, way: Way[T]) -> None:
        began_s = trio.current_time()
        with self._scopes[number]:
            try:
                async with way.open() as up:
                    self._up.append(Dialed(way, up, trio.current_time() - began_s))
                    self._notify()
                    await trio.sleep_forever()
            except SwarmError as error:
                if any(dialed.way is way for dialed in self._up):
                    raise  # it was up, and broke
                self._failed[number] = error
                self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
