"""Cut a row of layers into contiguous stages so that the dearest stage is as cheap as possible."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def balanced_boundaries(
    layer_costs: Sequence[float],
    first_extra: float,
    last_extra: float,
    stages: int,
    paces: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """Return the first layers of stages 1, 2, … of the cut whose largest stage cost is smallest.

    Every stage gets at least one layer. `first_extra` (the embedding) is added to the first stage, `last_extra` (the
    head) to the last. Costs are in one unit of the caller's choice (bytes, ms), none below zero; `paces` says what a
    unit costs on each stage (None: the same on all). Among the cuts with the same largest stage, the one with the
    smallest sum of squares is taken, so that what the dearest stage leaves open is still even; what is left of ties
    goes to the earliest cut. Raises ValueError when the layers are too few.
    """
    if not 1 <= stages <= len(layer_costs):
        raise ValueError(f"{len(layer_costs)} layers cannot make {stages} stages of at least one layer")
    if min(*layer_costs, first_extra, last_extra) < 0:
        raise ValueError("costs must not be below zero")
    row = _Row(layer_costs, first_extra, last_extra, (1,) * stages if paces is None else paces)
    return _evenest_cut(row, stages, _smallest_peak(row, stages))


class _Row:
    """Costs of any run of layers on any stage in constant time."""

    def __init__(
        self, layer_costs: Sequence[float], first_extra: float, last_extra: float, paces: Sequence[float]
    ) -> None:
        self.layers = len(layer_costs)
        self._sums = tuple(accumulate(layer_costs, initial=0))
        self._first_extra = first_extra
        self._last_extra = last_extra
        self._paces = paces

    def cost(self, stage: int, begin: int, end: int) -> float:
        cost = self._sums[end] - self._sums[begin]
        cost += self._first_extra if begin == 0 else 0
        cost += self._last_extra if end == self.layers else 0
        return cost * self._paces[stage]


def _smallest_peak(row: _Row, stages: int) -> float:
    """The largest stage cost of the best cut.

    best[e] is the smallest peak of layers 0 … e-1 over the stages so far.
    """
    ends = range(1, row.layers - stages + 2)
    best = {end: row.cost(0, 0, end) for end in ends}
    for stage in range(1, stages):
        ends = range(stage + 1, row.layers - stages + stage + 2)
        best = {end: _meet(row, best, stage, end) for end in ends}
    return best[row.layers]


def _meet(row: _Row, best: dict[int, float], stage: int, end: int) -> float:
    """The smallest max(best[b], cost of b … end-1 on this stage) over stage <= b < end.

    The cost grows as b falls, so nothing is better from where it alone is no less than what was found. (best[b] need
    not grow with b: with few layers a slow stage may have to take a dear one.)
    """
    found = math.inf
    for begin in range(end - 1, stage - 1, -1):
        cost = row.cost(stage, begin, end)
        if cost >= found:
            break
        found = min(found, max(best[begin], cost))
    return found


def _evenest_cut(row: _Row, stages: int, peak: float) -> tuple[int, ...]:
    """The cut with no stage above `peak` and the smallest sum of squared stage costs."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(stages):
        following: dict[int, tuple[float, tuple[int, ...]]] = {}
        for begin, (squares, cuts) in best.items():
            last = row.layers if stage == stages - 1 else row.layers - stages + stage + 1
            for end in range(last if stage == stages - 1 else begin + 1, last + 1):
                cost = row.cost(stage, begin, end)
                if cost > peak:
                    break
                total = squares + cost * cost
                if total < following.get(end, (math.inf, ()))[0]:
                    following[end] = (total, (*cuts, end))
        best = following
    return best[row.layers][1][:-1]
