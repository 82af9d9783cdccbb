"""How fast a ring would be by what was measured, and which peers in which order would make it the fastest.

What is minimised is `RingPace.cost_ms`: a lone user's token takes the round, and a second user makes it wait for the
dearest stage at most once. So the round counts, and the bottleneck a second time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from swarmnode.cluster.measured import Measured
    from swarmnode.ids import NodeId

BEAM = 256
"""Beginnings of rings that are kept while they grow: all of them up to eight candidates for three stages."""
MOST_CANDIDATES = 16
"""For each stage, beside as many as the ring has stages: the fastest. With BEAM it bounds what a load takes of the
coordinator's loop."""
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


@dataclass(frozen=True, slots=True)
class _Begun:
    """The first stages of a ring."""

    nodes: tuple[NodeId, ...]
    sum_ms: float
    peak_ms: float

    @property
    def cost_ms(self) -> float:
        return self.sum_ms + self.peak_ms


def fastest(
    candidates: Sequence[Sequence[NodeId]],
    work_gib: Sequence[float],
    row_bytes: int,
    measured: Measured,
    fits: Callable[[int, NodeId], bool],
) -> list[tuple[NodeId, ...]]:
    """Up to BEST_KEPT rings, the best first. `candidates`: who may hold each stage, the better one first where the
    measures leave it open; `fits`: whether a stage has the memory it needs on a node. Exact while no more than BEAM
    beginnings compete, else a beam search."""
    able = [
        sorted((node for node in nodes if fits(stage, node)), key=measured.pace_ms)[: MOST_CANDIDATES + len(work_gib)]
        for stage, nodes in enumerate(candidates)
    ]
    hop_ms = _hops({node for nodes in able for node in nodes}, row_bytes, measured)
    begun = [_Begun((), 0.0, 0.0)]
    for nodes, work in zip(able, work_gib, strict=True):
        longer = [
            _longer(ring, node, measured.pace_ms(node) * work, hop_ms)
            for ring in begun
            for node in nodes
            if node not in ring.nodes
        ]
        begun = sorted(longer, key=lambda ring: ring.cost_ms)[:BEAM]
    whole = {ring.nodes: predict(ring.nodes, work_gib, row_bytes, measured).cost_ms for ring in begun}
    return sorted(whole, key=lambda nodes: whole[nodes])[:BEST_KEPT]


def _longer(ring: _Begun, node: NodeId, step_ms: float, hop_ms: Mapping[tuple[NodeId, NodeId], float]) -> _Begun:
    hop = hop_ms[ring.nodes[-1], node] if ring.nodes else 0.0
    return _Begun((*ring.nodes, node), ring.sum_ms + hop + step_ms, max(ring.peak_ms, step_ms))


def _hops(nodes: set[NodeId], row_bytes: int, measured: Measured) -> dict[tuple[NodeId, NodeId], float]:
    return {(a, b): measured.hop_ms(a, b, row_bytes) for a in nodes for b in nodes if a != b}
