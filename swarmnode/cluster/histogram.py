"""A histogram with fixed buckets, as Prometheus understands it."""

from __future__ import annotations

from bisect import bisect_left


class Histogram:
    """`bounds` are upper ones, rising; beyond the last all is counted together."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.total = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, int]]:
        """(upper bound, how many were at most that), rising; the last bound is +Inf."""
        found, below = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self._counts, strict=True):
            below += count
            found.append((bound, below))
        return found
