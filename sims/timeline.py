"""Virtual time: actions in the order of their moments, what befalls frames on their way, and what is raised where a
promise is broken."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random


class Violation(AssertionError):
    """A promise was broken."""


class Stuck(Violation):
    """Nothing was broken, but nothing went on either."""


@dataclass(frozen=True, slots=True)
class Weather:
    """Seconds of a frame's way, and how often it is lost, comes twice, or is held up somewhere."""

    least_s: float = 0.01
    most_s: float = 0.2
    loss: float = 0.03
    double: float = 0.02
    late: float = 0.02
    late_s: float = 8.0

    def ways_s(self, random: Random) -> Iterator[float | None]:
        """Of one frame's copies; None: lost."""
        for _ in range(2 if random.random() < self.double else 1):
            if random.random() < self.loss:
                yield None
            else:
                late = random.random() < self.late
                yield random.uniform(self.least_s, self.late_s if late else self.most_s)


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
