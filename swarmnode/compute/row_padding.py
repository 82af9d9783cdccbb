"""Pad few rows of a step to the row count that a CPU multiplies fastest, as measured at load.

What a dense product costs by rows is a staircase: libraries multiply two or three rows one by one, reading the weight
for each, and share a kernel from four on, so that three rows may cost twice what four do. Zeros beside the rows are
then cheaper than their absence, and change nothing: a row's product does not depend on the other rows.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from swarmnode.compute.projections import DenseProjection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from swarmnode.compute.projections import Projection

ROWS = (2, 3, 4, 5, 6, 7, 8)
"""One row is never padded: nothing beats reading the weight once, and a session alone keeps its very tokens."""
PAYS = 0.9
"""Of the cost without: less would be the noise of a busy machine."""
_ROUNDS = 3
_MEASURE_S = 0.1
"""Per shape; after it no further round begins: a load takes half a second longer for all of this."""
_LEAST_ELEMENTS = 1 << 18
"""Smaller weights are not worth measuring."""
_ENOUGH_BYTES = 32 << 20
"""Weights multiplied in turn: beyond what a core caches for itself, as they are in a step."""


def pad_few_rows(projections: Iterable[Projection]) -> None:
    """Measure a slice's dense products on a CPU and pad those that gain, shape by shape."""
    alike: dict[tuple[torch.dtype, int, int], list[DenseProjection]] = {}
    for projection in projections:
        if isinstance(projection, DenseProjection) and projection.weight.device.type == "cpu":
            out, inputs = projection.weight.shape
            alike.setdefault((projection.weight.dtype, out, inputs), []).append(projection)
    for (dtype, out, inputs), group in alike.items():
        if out * inputs >= _LEAST_ELEMENTS:
            probe = torch.zeros((max(ROWS), inputs), dtype=dtype)
            turns = group[: max(1, _ENOUGH_BYTES // group[0].weight.nbytes)]
            padding = padding_of(measured(lambda rows, p=probe, t=turns: _multiply(t, p[:rows])))  # type: ignore[misc]
            for each in group:
                each.pad_rows(padding)


def padding_of(costs: Mapping[int, float]) -> dict[int, int]:
    """From the cost of each row count: those that are dearer than some larger count, and the cheapest of these."""
    found = {}
    for rows, cost in costs.items():
        best = min((more for more in costs if more >= rows), key=lambda more: costs[more])
        if costs[best] < cost * PAYS:
            found[rows] = best
    return found


def measured(multiply: Callable[[int], object]) -> dict[int, float]:
    """Seconds by row count: the least of a few rounds in turn, so that a busy moment spoils no single count."""
    begun_s = time.perf_counter()
    multiply(1)
    costs = {rows: _timed(multiply, rows) for rows in ROWS}
    for _ in range(_ROUNDS - 1):
        if time.perf_counter() - begun_s > _MEASURE_S:
            break
        costs = {rows: min(cost, _timed(multiply, rows)) for rows, cost in costs.items()}
    return costs


def _multiply(turns: Sequence[DenseProjection], rows: torch.Tensor) -> None:
    for projection in turns:
        projection(rows)


def _timed(multiply: Callable[[int], object], rows: int) -> float:
    begun_s = time.perf_counter()
    multiply(rows)
    return time.perf_counter() - begun_s
