"""Virtual time: actions in the order of their moments, and what is raised where a promise is broken in it."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Violation(AssertionError):
    """A promise was broken."""


class Stuck(Violation):
    """Nothing was broken, but nothing went on either."""


class Timeline:
    """Of two actions at one moment the one that was asked for first comes first."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (seconds, next(self._order), action))

    def run_until(self, end_s: float) -> None:
        while self._queue and self._queue[0][0] <= end_s:
            self.now_s, _, action = heapq.heappop(self._queue)
            action()
        self.now_s = end_s
