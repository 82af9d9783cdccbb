"""Another ring than the one that memory alone would choose, where the model's files are elsewhere or what was measured
shows a faster one that is worth it.

It holds as long conversations, and as many of them: memory comes first.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from swarmnode.cluster.partition import balanced_boundaries
from swarmnode.cluster.pricing import DTYPE_BYTES, price_stage
from swarmnode.cluster.ring_pace import RingPace, fastest, predict
from swarmnode.errors import LoadRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from swarmnode.cluster.measured import Measured
    from swarmnode.cluster.placement import PeerResources, Plan, PlanRequest, StagePlan
    from swarmnode.cluster.pricing import ModelShape
    from swarmnode.ids import NodeId

    LayOut = Callable[[Sequence[PeerResources], tuple[int, ...]], Plan]
    """Peers in order and a cut as a plan with its KV budget; raises LoadRefused where it does not fit."""

WORTH_SHARE, WORTH_MS = 0.15, 3.0
"""A ring for which files have to be fetched must be faster by so much than one that stays where they are; measures
scatter, and a fetch takes minutes."""

AS_FAST = 1.03
"""Of rings that differ by no more, the one that fetches the fewest layers, and then the one by memory."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is to be placed, what was measured, and what memory alone would choose."""

    shape: ModelShape
    request: PlanRequest
    measured: Measured
    by_memory: Plan
    candidates: Sequence[Sequence[PeerResources]]
    """Who may hold each stage."""
    lay_out: LayOut

    def pace(self, nodes: Sequence[NodeId], plan: Plan) -> RingPace:
        """What is predicted for `nodes` in the place of the plan's own."""
        work = [stage.price.step_gib(is_last=stage is plan.stages[-1]) for stage in plan.stages]
        return predict(nodes, work, self.row_bytes, self.measured)

    @property
    def kept(self) -> bool:
        """Whether some peer keeps files of the model."""
        return any(peer.kept_layers != (0, 0) for candidates in self.candidates for peer in candidates)

    @property
    def row_bytes(self) -> int:
        """Hidden states of one position."""
        return self.shape.hidden_size * DTYPE_BYTES[self.request.dtype]

    @property
    def tokens(self) -> int:
        """KV that a stage needs room for: the plan's longest conversation, and all those that it would have in
        flight."""
        plan = self.by_memory
        return max(plan.context_tokens, plan.max_in_flight * min(self.request.typical_tokens, plan.kv_tokens))


def faster(choice: Choice) -> Plan:
    """The plan that is predicted to be the fastest, with its pace; but a fetch of files must be worth it."""
    plans = [choice.by_memory]
    if not choice.measured.nothing or choice.kept:
        plans += _others(choice)
    tried = [_Tried(choice.pace(_nodes(plan), plan), _to_fetch(plan), plan) for plan in plans]
    stay = _staying(tried)
    best = _best(tried, choice.by_memory)
    if stay.pace.cost_ms - best.pace.cost_ms < max(WORTH_MS, WORTH_SHARE * stay.pace.cost_ms):
        best = stay
    return replace(best.plan, pace=best.pace if choice.measured.paces else None)


class _Tried(NamedTuple):
    pace: RingPace
    to_fetch: int
    plan: Plan


def _staying(tried: Sequence[_Tried]) -> _Tried:
    """The fastest of those for which no files have to move. `tried` begins with the plan by memory, which it is where
    no other has more of its files."""
    by_memory = tried[0].plan
    least = min(ring.to_fetch for ring in tried)
    stay = tried[0]
    if stay.to_fetch > least:
        stay = _best([ring for ring in tried if ring.to_fetch == least], by_memory)
    return _best([ring for ring in tried if not _fetches_beside(ring.plan, stay.plan)], by_memory)


def _best(tried: Sequence[_Tried], by_memory: Plan) -> _Tried:
    """Of the fastest, which differ by no more than AS_FAST, the one that fetches and moves the least."""
    least_ms = min(ring.pace.cost_ms for ring in tried)
    near = [ring for ring in tried if ring.pace.cost_ms <= least_ms * AS_FAST]
    return min(near, key=lambda ring: (ring.to_fetch, _moved(ring.plan, by_memory)))


def _to_fetch(plan: Plan) -> int:
    """Layers, of all stages."""
    return sum(stage.to_fetch for stage in plan.stages)


def _fetches_beside(plan: Plan, other: Plan) -> bool:
    """Whether a stage has files to fetch that it would not have in the other plan."""
    return any(_where(a) != _where(b) and a.to_fetch for a, b in zip(plan.stages, other.stages, strict=True))


def _where(stage: StagePlan) -> tuple[NodeId, int, int]:
    return stage.peer.node, stage.first_layer, stage.end_layer


def _moved(plan: Plan, from_plan: Plan) -> int:
    """Stages that are somewhere else."""
    return sum(a != b for a, b in zip(_nodes(plan), _nodes(from_plan), strict=True))


def _nodes(plan: Plan) -> list[NodeId]:
    return [stage.peer.node for stage in plan.stages]


def _others(choice: Choice) -> Iterator[Plan]:
    """That hold as long conversations as the one by memory, and as many."""
    plan = choice.by_memory
    for chosen in _orders(choice):
        for boundaries in _cuts(choice, chosen):
            with suppress(LoadRefused):
                other = choice.lay_out(chosen, boundaries)
                if other.context_tokens >= plan.context_tokens and other.max_in_flight >= plan.max_in_flight:
                    yield other


def _orders(choice: Choice) -> list[list[PeerResources]]:
    """Peers by stage: as memory has them, the most promising others, and those that have the least to fetch."""
    stages, tokens = choice.by_memory.stages, choice.tokens
    peers = {peer.node: peer for candidates in choice.candidates for peer in candidates}

    def to_fetch(stage: int, node: NodeId) -> int:
        return peers[node].to_fetch(stages[stage].first_layer, stages[stage].end_layer)

    search = partial(
        fastest,
        [[peer.node for peer in candidates] for candidates in choice.candidates],
        [stage.price.step_gib(is_last=stage is stages[-1]) for stage in stages],
        choice.row_bytes,
        choice.measured,
        lambda stage, node: stages[stage].price.need(tokens) <= peers[node].memory_bytes,
    )
    rings = [tuple(_nodes(choice.by_memory)), *search(), *(search(to_fetch) if choice.kept else ())]
    return [[peers[node] for node in ring] for ring in dict.fromkeys(rings)]


def _cuts(choice: Choice, chosen: Sequence[PeerResources]) -> Iterator[tuple[int, ...]]:
    """The usual one; and where it is not the recorded one, the one after which all stages take as long."""
    shape, request, stages = choice.shape, choice.request, len(chosen)
    yield tuple(stage.first_layer for stage in choice.by_memory.stages[1:])
    free = shape.recorded_boundaries is not None and stages != shape.recorded_stages
    if free and stages > 1 and not shape.weightless and choice.measured.paces:
        layers = range(len(shape.layer_params))
        prices = [price_stage(shape, i, i + 1, request.dtype, request.quantization, 1) for i in layers]
        reads = [price.step_gib(is_last=False) for price in prices]
        head = prices[-1].step_gib(is_last=True) - reads[-1]
        paces = [choice.measured.pace_ms(peer.node) for peer in chosen]
        yield balanced_boundaries(reads, 0.0, head, stages, paces)
