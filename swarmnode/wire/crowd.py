"""How many connections may be under way, and how many may come, before their other end has proved who it is.

Bounded in all and per source.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from contextlib import contextmanager
from typing import TYPE_CHECKING

from swarmnode.errors import Overloaded
from swarmnode.wire.flood import Budget

if TYPE_CHECKING:
    from collections.abc import Iterator

BURST, PER_S = 100, 5.0
"""Connections of one source that proved nothing. Each may cost a handshake, some 3 ms of a core: as many as come would
take the whole of it. Joining takes one."""
MAX_SOURCES = 4096


class Crowd:
    """Places for connections, of which one source cannot take all. A source is an address, or the node it proved."""

    def __init__(self, places: float, per_source: int) -> None:
        self._places = places
        self._per_source = per_source
        self._held: Counter[str] = Counter()

    def has_room(self, source: str) -> bool:
        return self._held.total() < self._places and self._held[source] < self._per_source

    @contextmanager
    def place(self, source: str) -> Iterator[None]:
        """Hold a place for the block; raises Overloaded where there is none."""
        if not self.has_room(source):
            raise Overloaded(f"too many connections from {source} at once")
        self._held[source] += 1
        try:
            yield
        finally:
            self._held[source] -= 1
            if not self._held[source]:
                del self._held[source]


class Strikes:
    """Every connection counts against its source until its other end has proved who it is; then it costs nothing."""

    def __init__(self) -> None:
        self._budgets: OrderedDict[str, Budget] = OrderedDict()

    def count(self, source: str, now: float) -> None:
        """Before anything is spent on a connection; raises Overloaded where its source had too many for nothing."""
        budget = self._budgets.setdefault(source, Budget(BURST, PER_S))
        self._budgets.move_to_end(source)
        if len(self._budgets) > MAX_SOURCES:
            self._budgets.popitem(last=False)
        if not budget.spend(now):
            budget.left = 0.0  # refused ones are free: they cost next to nothing, and must not keep a home out for long
            raise Overloaded(f"too many connections from {source} came to nothing")

    def forgive(self, source: str) -> None:
        """The last one counted proved who it is."""
        budget = self._budgets.get(source)
        if budget is not None:
            budget.left = min(budget.burst, budget.left + 1)
