"""A faster ring than the one that memory alone would choose, where what was measured shows one that is worth it.

It holds as long conversations, and as many of them: memory comes first.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from swarmnode.cluster.partition import balanced_boundaries
from swarmnode.cluster.pricing import DTYPE_BYTES, price_stage
from swarmnode.cluster.ring_pace import RingPace, fastest, predict
from swarmnode.errors import LoadRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from swarmnode.cluster.measured import Measured
    from swarmnode.cluster.placement import PeerResources, Plan, PlanRequest
    from swarmnode.cluster.pricing import ModelShape
    from swarmnode.ids import NodeId

    LayOut = Callable[[Sequence[PeerResources], tuple[int, ...]], Plan]
    """Peers in order and a cut as a plan with its KV budget; raises LoadRefused where it does not fit."""

WORTH_SHARE, WORTH_MS = 0.15, 3.0
"""A ring that is to take the place of the one by memory must be faster by so much: measures scatter, and who never held
a part of the model has to fetch it."""

AS_FAST = 1.03
"""Of rings that differ by no more, the one that moves the fewest stages: their files are there."""


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
    """The plan that is predicted to be the fastest, with its pace; the one by memory unless another is worth it."""
    plans = [choice.by_memory]
    if not choice.measured.nothing:
        plans += _others(choice)
    paces = [choice.pace(_nodes(plan), plan) for plan in plans]
    least_ms = min(pace.cost_ms for pace in paces)
    near = [index for index, pace in enumerate(paces) if pace.cost_ms <= least_ms * AS_FAST]
    best = min(near, key=lambda index: _moved(plans[index], choice.by_memory))
    if paces[0].cost_ms - paces[best].cost_ms < max(WORTH_MS, WORTH_SHARE * paces[0].cost_ms):
        best = 0
    return replace(plans[best], pace=paces[best] if choice.measured.paces else None)


def _moved(plan: Plan, from_plan: Plan) -> int:
    """Stages that are somewhere else."""
    return sum(a != b for a, b in zip(_nodes(plan), _nodes(from_plan), strict=True))


def _nodes(plan: Plan) -> list[NodeId]:
    return [stage.peer.node for stage in plan.stages]


def _others(choice: Choice) -> Iterator[Plan]:
    plan = choice.by_memory
    for chosen in _orders(choice):
        for boundaries in _cuts(choice, chosen):
            with suppress(LoadRefused):
                other = choice.lay_out(chosen, boundaries)
                if other.context_tokens >= plan.context_tokens and other.max_in_flight >= plan.max_in_flight:
                    yield other


def _orders(choice: Choice) -> Iterator[list[PeerResources]]:
    """Peers by stage: as memory has them, and the most promising others."""
    stages, tokens = choice.by_memory.stages, choice.tokens
    yield [stage.peer for stage in stages]
    peers = {peer.node: peer for candidates in choice.candidates for peer in candidates}
    rings = fastest(
        [[peer.node for peer in candidates] for candidates in choice.candidates],
        [stage.price.step_gib(is_last=stage is stages[-1]) for stage in stages],
        choice.row_bytes,
        choice.measured,
        lambda stage, node: stages[stage].price.need(tokens) <= peers[node].memory_bytes,
    )
    for nodes in rings:
        yield [peers[node] for node in nodes]


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
