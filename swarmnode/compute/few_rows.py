"""Multiply few rows of a step the way that a CPU does fastest, as measured at load: by compiled kernels, where they are
there, up to the row count from which torch's are faster; else by what torch offers.

What a dense product costs by rows is a staircase: libraries multiply two or three rows one by one, reading the weight
for each, and share a kernel from four on, so that three rows may cost twice what four do. Zeros beside the rows are
then cheaper than their absence, and change nothing: a row's product does not depend on the other rows. Turned round,
with the weight as the left factor, the same product meets other kernels, which read a large weight once for two to four
rows, and faster than the one-row kernel does; what they give is equal to rounding.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

import torch

from swarmnode.compute.compiled_dense import CompiledDense
from swarmnode.compute.projections import MEASURED_ELEMENTS, DenseProjection, Way, timed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from swarmnode.compute.projections import Projection

_Each = TypeVar("_Each")

WAYS = (
    *(Way(rows, turned=False) for rows in range(1, 9)),
    *(Way(rows, turned=True) for rows in (2, 3, 4, 8)),
)
"""One row alone may go beside a row of zeros too: turned, a large weight is read faster than by a row's own kernel."""
_COMPARED = (1, 2, 4, 8, 16, 32)
"""Row counts for which the compiled kernels are held against torch's."""
PAYS = 0.9
"""Of the cost of the plain way: less would be the noise of a busy machine."""
_ROUNDS = 3
_MEASURE_S = 0.1
"""For all ways of a shape, or a row count; after it no further round begins: a load takes about a second longer for all
of this."""
_ENOUGH_BYTES = 32 << 20
"""Weights multiplied in turn: beyond what a core caches for itself, as they are in a step."""


def hasten_few_rows(projections: Iterable[Projection]) -> None:
    """Measure a slice's dense products on a CPU and give few rows their fastest way, shape by shape."""
    alike: dict[tuple[torch.dtype, int, int], list[DenseProjection]] = {}
    for projection in projections:
        if isinstance(projection, DenseProjection) and projection.weight.device.type == "cpu":
            out, inputs = projection.weight.shape
            alike.setdefault((projection.weight.dtype, out, inputs), []).append(projection)
    for (_, out, inputs), group in alike.items():
        if out * inputs >= MEASURED_ELEMENTS:
            _hasten_alike(group)


def _hasten_alike(group: Sequence[DenseProjection]) -> None:
    """Those of one shape and dtype."""
    enough = max(1, _ENOUGH_BYTES // group[0].weight.nbytes)
    turns = group[:enough]
    compiled = [each for each in group if isinstance(each, CompiledDense)]
    if compiled:
        many_rows = crossover(compiled[:enough])
        for projection in compiled:
            projection.many_rows = many_rows
        if many_rows > 1:
            return
    probe = torch.zeros((max(way.rows for way in WAYS), group[0].inputs), dtype=group[0].weight.dtype)
    ways = best_ways(measured(lambda way: _multiply(turns, probe, way), WAYS))
    for each in group:
        each.take_ways(ways)


def crossover(turns: Sequence[CompiledDense]) -> int:
    """The row count from which torch's products are faster than the compiled ones: behind the largest where they are
    not, for torch's costs are steps."""
    probe = torch.zeros((max(_COMPARED), turns[0].inputs), dtype=turns[0].dtype)
    for rows in reversed(_COMPARED):
        costs = measured(lambda own, part=probe[:rows]: _take_turns(turns, part, own), (True, False))  # type: ignore[misc]
        if costs[True] * PAYS <= costs[False]:
            return 2 * rows
    return 1


def best_ways(costs: Mapping[Way, float]) -> dict[int, Way]:
    """From the cost of each way: the row counts for which one with as many rows or more is cheaper than the plain one,
    and the cheapest of these."""
    found = {}
    for plain, cost in costs.items():
        if not plain.turned:
            best = min((way for way in costs if way.rows >= plain.rows), key=lambda way: costs[way])
            if costs[best] < cost * PAYS:
                found[plain.rows] = best
    return found


def measured(multiply: Callable[[_Each], object], ways: Sequence[_Each]) -> dict[_Each, float]:
    """Seconds by way: the least of a few rounds in turn, so that a busy moment spoils no single one."""
    begun_s = time.perf_counter()
    for way in ways:
        multiply(way)
    costs = {way: timed(multiply, way) for way in ways}
    for _ in range(_ROUNDS - 1):
        if time.perf_counter() - begun_s > _MEASURE_S:
            break
        costs = {way: min(cost, timed(multiply, way)) for way, cost in costs.items()}
    return costs


def _take_turns(turns: Sequence[CompiledDense], rows: torch.Tensor, own: bool) -> None:
    for projection in turns:
        projection.few(rows) if own else projection.many(rows)


def _multiply(turns: Sequence[DenseProjection], probe: torch.Tensor, way: Way) -> None:
    for projection in turns:
        projection.multiply(probe[: way.rows], way)
