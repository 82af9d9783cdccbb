"""How fast a ring would be by what was measured, and which peers in which order would make it the fastest.

What is minimised is `RingPace.cost_ms`: a lone user's token takes the round, and a second user makes it wait for the
dearest stage at most once. So the round counts, and the bottleneck a second time.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from swarmnode.cluster.measured import Measured
    from swarmnode.ids import NodeId

MOST_TRIED = 8192
"""Beginnings of rings that one search makes longer by a stage, all stages together: what it takes of the coordinator's
loop, for any number of peers; at the least each candidate of each stage is tried once."""
BEAM = 256
"""Beginnings that are kept while they grow, fewer where MOST_TRIED asks for it: all of them up to eight candidates for
three stages."""
MOST_CANDIDATES = 16
"""For each stage, beside as many as the ring has stages: the fastest."""
BEST_KEPT = 4


@dataclass(frozen=True, slots=True)
class RingPace:
    """Predicted milliseconds: `stage_ms` of each stage's step, `hop_ms` of the way from each stage to the next."""

    stage_ms: tuple[float, ...]
    hop_ms: tuple[float, ...]

    @property
    def round_ms(self) -> float:
        """A lone user's token."""
        return sum(self.stage_ms) + sum(self.hop_ms)

    @property
    def bottleneck_ms(self) -> float:
        return max(self.stage_ms)

    @property
    def cost_ms(self) -> float:
        return self.round_ms + self.bottleneck_ms


def predict(nodes: Sequence[NodeId], work_gib: Sequence[float], row_bytes: int, measured: Measured) -> RingPace:
    """For these nodes in this order. `work_gib`: weights that each stage's step reads; `row_bytes`: hidden states of
    one position, which every hop carries but the last one's, whose token is next to nothing."""
    stage_ms = tuple(measured.pace_ms(node) * work for node, work in zip(nodes, work_gib, strict=True))
    if len(nodes) == 1:
        return RingPace(stage_ms, ())
    ways = zip(nodes, [*nodes[1:], nodes[0]], strict=True)
    hops = (
        measured.hop_ms(sender, receiver, 0 if stage == len(nodes) - 1 else row_bytes)
        for stage, (sender, receiver) in enumerate(ways)
    )
    return RingPace(stage_ms, tuple(hops))


class _Begun(NamedTuple):
    """The first stages of a ring."""

    to_fetch: int
    """Layers of which their nodes do not keep the files."""
    cost_ms: float
    sum_ms: float
    peak_ms: float
    nodes: tuple[NodeId, ...]


def fastest(
    candidates: Sequence[Sequence[NodeId]],
    work_gib: Sequence[float],
    row_bytes: int,
    measured: Measured,
    fits: Callable[[int, NodeId], bool],
    to_fetch: Callable[[int, NodeId], int] = lambda _stage, _node: 0,
) -> list[tuple[NodeId, ...]]:
    """Up to BEST_KEPT rings, the best first: those that leave the least `to_fetch` (layers, of a stage on a node), of
    them the fastest.

    `candidates`: who may hold each stage, the better one first where the measures leave it open; `fits`: whether a
    stage has the memory it needs on a node. Exact while all beginnings are kept, else a beam search.
    """
    stages = len(work_gib)
    able = [
        _most_promising([node for node in nodes if fits(stage, node)], stage, to_fetch, measured, stages)
        for stage, nodes in enumerate(candidates)
    ]
    hop_ms = cache(lambda sender, receiver: measured.hop_ms(sender, receiver, row_bytes))
    begun = [_Begun(0, 0.0, 0.0, 0.0, ())]
    for nodes, work in zip(able, work_gib, strict=True):
        width = max(1, min(BEAM, MOST_TRIED // (stages * max(1, len(nodes)))))
        held = [(node, fetch, measured.pace_ms(node) * work) for node, fetch in nodes]
        begun = heapq.nsmallest(BEAM, _longer(begun[:width], held, hop_ms), key=_rank)
    whole = {ring: predict(ring.nodes, work_gib, row_bytes, measured).cost_ms for ring in begun}
    return [ring.nodes for ring in sorted(whole, key=lambda ring: (ring.to_fetch, whole[ring]))[:BEST_KEPT]]


def _most_promising(
    nodes: Sequence[NodeId],
    stage: int,
    to_fetch: Callable[[int, NodeId], int],
    measured: Measured,
    stages: int,
) -> list[tuple[NodeId, int]]:
    """With the layers that each would have to fetch."""
    found = [(node, to_fetch(stage, node)) for node in nodes]
    found.sort(key=lambda entry: (entry[1], measured.pace_ms(entry[0])))
    return found[: MOST_CANDIDATES + stages]


def _longer(
    begun: Sequence[_Begun], held: Sequence[tuple[NodeId, int, float]], hop_ms: Callable[[NodeId, NodeId], float]
) -> Iterator[_Begun]:
    """By one more stage, for which `held` names nodes, layers to fetch and milliseconds."""
    for ring in begun:
        for node, fetch, step_ms in held:
            if node not in ring.nodes:
                hop = hop_ms(ring.nodes[-1], node) if ring.nodes else 0.0
                total, peak = ring.sum_ms + hop + step_ms, max(ring.peak_ms, step_ms)
                yield _Begun(ring.to_fetch + fetch, total + peak, total, peak, (*ring.nodes, node))


def _rank(ring: _Begun) -> tuple[int, float]:
    return ring.to_fetch, ring.cost_ms
