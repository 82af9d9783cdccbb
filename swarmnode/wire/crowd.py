"""How many connections may be under way before their other end has proved who it is. Bounded in all and per source."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from swarmnode.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Iterator


class Crowd:
    """Whoever holds a place has shown nothing yet; one source cannot take them all."""

    def __init__(self, places: int, per_source: int) -> None:
        self._places = places
        self._per_source = per_source
        self._held: Counter[str] = Counter()

    @contextmanager
    def place(self, source: str) -> Iterator[None]:
        """Hold a place for the block; raises Overloaded where there is none."""
        if self._held.total() >= self._places or self._held[source] >= self._per_source:
            raise Overloaded(f"too many connections from {source} are shaking hands at once")
        self._held[source] += 1
        try:
            yield
        finally:
            self._held[source] -= 1
            if not self._held[source]:
                del self._held[source]
