"""Where a model's stages go: the stages' prices against the peers' memory, refused with the numbers.

Memory decides first: the largest peers hold the stages. Who keeps the model's files, and what was measured, may better
that, by other peers, another order or another cut, but never for shorter conversations or fewer of them. The KV cache
is planned for the sessions that the ring is meant to hold together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from swarmnode.cluster.faster_plan import Choice, faster
from swarmnode.cluster.left_out import left_out
from swarmnode.cluster.measured import NOTHING_MEASURED
from swarmnode.cluster.partition import balanced_boundaries
from swarmnode.cluster.pricing import HEADROOM, PIECE_TOKENS, StageBytes, mib, price_stage
from swarmnode.cluster.quantization import (
    NEEDED_CAPABILITY,
    NONE,
    SERVE_INT4_FAST,
    SERVE_INT8,
    SERVE_ON_CARD,
    SERVE_QUANTIZED,
    stored_as,
)
from swarmnode.errors import LoadRefused, PeerNotFound
from swarmnode.ids import NodeId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarmnode.cluster.left_out import LeftOut
    from swarmnode.cluster.measured import Measured
    from swarmnode.cluster.pricing import ModelShape
    from swarmnode.cluster.ring_pace import RingPace

_WHY_LACKING = {
    SERVE_QUANTIZED: "bitsandbytes is not installed",
    SERVE_INT8: "its device is a card",
    SERVE_INT4_FAST: "its card is older than compute capability 8.0, torchao is not installed",
}
"""By the capability that a peer does not declare."""
MOST_IN_FLIGHT = 1 << 16
"""Whatever SWARM_SERVE_IN_FLIGHT says; a bound for the arithmetic."""
NO_KV_TOKENS = 1 << 24
"""The budget of a stage whose sessions take no memory: a bound for the arithmetic that follows."""

SERVE_N_STAGE = "serve-n-stage"
SERVE_ONE_STAGE = "serve-one-stage"
SERVE_CONCURRENT = "serve-concurrent"
SERVE_KV_BUDGET = "serve-kv-budget"
RING_CAPABILITIES = frozenset({SERVE_N_STAGE, SERVE_ONE_STAGE, SERVE_CONCURRENT, SERVE_KV_BUDGET})
"""What this version's peers can do; a ring is refused over a peer that lacks what it needs, and the peer is named."""
CPU_CAPABILITIES = frozenset({SERVE_INT8, SERVE_INT4_FAST})
"""What a peer needs torch's CPU kernels for; one that computes on a card does not declare them for these."""
ALL_CAPABILITIES = RING_CAPABILITIES | CPU_CAPABILITIES | {SERVE_QUANTIZED}


class PeersLacking(LoadRefused):
    """The peers that are there are too few, too small or too old: another one's coming may change that. Any other
    refusal is about the model, or what is asked of it."""


class LacksKernels(PeersLacking):
    """Too few of the peers that would serve hold what the weights' quantization needs."""


@dataclass(frozen=True, slots=True)
class PeerResources:
    """A connected peer as placement sees it. `memory_bytes` is what it offers to this load."""

    node: NodeId
    name: str
    memory_bytes: int
    busy_with: str | None = None
    """The model it already holds, where it may hold no further one."""
    capabilities: frozenset[str] = ALL_CAPABILITIES
    kept_layers: tuple[int, int] = (0, 0)
    """The first of the model's layers whose files it keeps, and the one after the last."""
    kernels_failed: str = ""
    """Why those for the load's quantization do not run there, though it declares them."""

    def to_fetch(self, first_layer: int, end_layer: int) -> int:
        """How many of these layers it does not keep."""
        first, end = self.kept_layers
        return end_layer - first_layer - max(0, min(end, end_layer) - max(first, first_layer))


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the load asked for; None and () leave the choice to the plan."""

    num_stages: int | None
    peers: tuple[str, ...]
    dtype: str
    """Serving dtype, already resolved: "float32" or "bfloat16"."""
    in_flight: int | None = None
    """SWARM_SERVE_IN_FLIGHT; None: 4 × stages."""
    typical_tokens: int = 1024
    min_context_tokens: int = 4096
    quantization: str = NONE
    piece_tokens: int = PIECE_TOKENS
    """Prompt positions that one forward reads."""
    prefer: tuple[str, ...] = ()
    """Ids of nodes, in stage order: each gets its stage where it can, and others take the rest."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """One stage on one peer, with its price."""

    peer: PeerResources
    first_layer: int
    end_layer: int
    price: StageBytes

    @property
    def weight_bytes(self) -> int:
        return self.price.weights

    @property
    def to_fetch(self) -> int:
        """Layers whose files its peer does not keep."""
        return self.peer.to_fetch(self.first_layer, self.end_layer)

    @property
    def kv_token_bytes(self) -> int:
        return self.price.kv_token


@dataclass(frozen=True, slots=True)
class Plan:
    """A placement that fits. `kv_tokens` is what every stage can hold, all sessions together."""

    stages: tuple[StagePlan, ...]
    context_tokens: int
    kv_tokens: int
    max_in_flight: int
    pace: RingPace | None = None
    """As predicted; None where no step was measured."""
    left_out: tuple[LeftOut, ...] = ()


def plan_load(
    shape: ModelShape,
    request: PlanRequest,
    peers: Sequence[PeerResources],
    measured: Measured = NOTHING_MEASURED,
) -> Plan:
    """Cut the model, choose peers and size the KV budget; raises LoadRefused or PeerNotFound with the numbers."""
    try:
        by_memory = _plan(shape, request, peers)
    except LoadRefused:
        if not request.prefer:
            raise
        return plan_load(shape, replace(request, prefer=()), peers, measured)

    def lay_out(chosen: Sequence[PeerResources], boundaries: tuple[int, ...]) -> Plan:
        return _laid_out(shape, request, chosen, boundaries, peers)

    choice = Choice(shape, request, measured, by_memory, _candidates(request, peers, by_memory), lay_out)
    plan = faster(choice)
    lacking = partial(_unable, request, len(plan.stages))
    return replace(plan, left_out=left_out(choice, plan, peers, lacking))


def _plan(shape: ModelShape, request: PlanRequest, peers: Sequence[PeerResources]) -> Plan:
    layers = len(shape.layer_params)
    stages = len(request.peers) or shape.recorded_stages if request.num_stages is None else request.num_stages
    if not 1 <= stages <= layers:
        raise LoadRefused(f"{stages} stages asked for, but the model has {layers} layers: choose 1 to {layers}")
    if shape.recorded_boundaries is None and stages != shape.recorded_stages:
        raise LoadRefused(
            f"this model records no split, so it serves only over the {shape.recorded_stages} stages it was "
            f"exported with, not {stages}"
        )
    chosen = _choose_peers(request, stages, peers)
    _check_kernels(chosen, request.quantization)
    _check_capabilities(chosen)
    return _laid_out(shape, request, chosen, _boundaries(shape, stages), peers)


def _laid_out(
    shape: ModelShape,
    request: PlanRequest,
    chosen: Sequence[PeerResources],
    boundaries: tuple[int, ...],
    peers: Sequence[PeerResources],
) -> Plan:
    """These peers in this order with this cut; of the others a refusal says why they do not help."""
    in_flight = min(request.in_flight or 4 * len(chosen), MOST_IN_FLIGHT)
    cuts = (0, *boundaries, len(shape.layer_params))
    stages = tuple(
        StagePlan(
            peer,
            first,
            end,
            price_stage(shape, first, end, request.dtype, _stored(request, peer), in_flight, request.piece_tokens),
        )
        for peer, first, end in zip(chosen, cuts, cuts[1:], strict=False)
    )
    return _budget(shape, request, stages, in_flight, peers)


def _candidates(request: PlanRequest, peers: Sequence[PeerResources], by_memory: Plan) -> list[list[PeerResources]]:
    """Who may hold each stage, the best by memory first: who was named for it or is preferred, else whoever can."""
    stages = [stage.peer for stage in by_memory.stages]
    if request.peers:
        return [[peer] for peer in stages]
    idle = _idle(request, peers)
    kept = _kept(request, len(stages), idle)
    others = [peer for peer in idle if peer not in kept and not _lacks(peer, request.quantization, len(stages))]
    return [others if peer is None else [peer] for peer in kept]


def _stored(request: PlanRequest, peer: PeerResources) -> str:
    return stored_as(request.quantization, on_card=SERVE_ON_CARD in peer.capabilities)


def _choose_peers(request: PlanRequest, stages: int, peers: Sequence[PeerResources]) -> list[PeerResources]:
    """The named ones, else the largest idle ones, those with the kernels first."""
    if request.peers:
        return _named_peers(request.peers, stages, peers)
    idle = _idle(request, peers)
    if len(idle) < stages:
        busy = [f"{p.name} (serves {p.busy_with})" for p in peers if p.busy_with is not None]
        raise PeersLacking(
            f"{stages} stages need {stages} free peers, {len(idle)} are connected: "
            f"{', '.join(p.name for p in idle) or 'none'}"
            + (f"; busy: {', '.join(busy)}" if busy else "")
            + ". Start more peers (the coordinator may be one: `up --role coordinator --role peer`), unload a model"
            + (f", or ask for fewer stages: `--stages {len(idle)}`" if idle else "")
        )
    kept = _kept(request, stages, idle)
    others = iter([peer for peer in idle if peer not in kept])
    return [peer if peer is not None else next(others) for peer in kept]


def _idle(request: PlanRequest, peers: Sequence[PeerResources]) -> list[PeerResources]:
    """Who may hold a stage, the best by memory first."""
    idle = [peer for peer in peers if peer.busy_with is None]
    return sorted(idle, key=lambda peer: (not _has_kernels(peer, request.quantization), -peer.memory_bytes, peer.name))


def _kept(request: PlanRequest, stages: int, idle: Sequence[PeerResources]) -> list[PeerResources | None]:
    """Who is preferred for each stage, and can hold it."""
    able = {peer.node: peer for peer in idle if _has_kernels(peer, request.quantization)}
    return [able.get(NodeId(node)) for node in request.prefer] if len(request.prefer) == stages else [None] * stages


def _named_peers(names: tuple[str, ...], stages: int, peers: Sequence[PeerResources]) -> list[PeerResources]:
    if len(names) != stages:
        raise LoadRefused(f"{len(names)} peers named for {stages} stages: name one peer per stage, in order")
    if len(set(names)) != len(names):
        raise LoadRefused("a peer is named twice; a peer holds one stage of a model")
    chosen = []
    for name in names:
        found = [p for p in peers if name in (p.name, p.node)]
        if not found:
            known = ", ".join(sorted(p.name for p in peers)) or "none"
            raise PeerNotFound(f"no peer is called {name!r}; connected peers: {known}", param="peer")
        if found[0].busy_with is not None:
            raise PeersLacking(f"peer {name} already serves {found[0].busy_with}; unload it first")
        if found[0] in chosen:
            raise LoadRefused(f"{name} is a peer that is named already; a peer holds one stage of a model")
        chosen.append(found[0])
    return chosen


def _has_kernels(peer: PeerResources, quantization: str) -> bool:
    needed = NEEDED_CAPABILITY.get(quantization)
    return needed is None or (needed in peer.capabilities and not peer.kernels_failed)


def _check_kernels(chosen: Sequence[PeerResources], quantization: str) -> None:
    lacking = [peer for peer in chosen if not _has_kernels(peer, quantization)]
    if lacking:
        names = ", ".join(peer.name for peer in lacking)
        whose = f"peer {names} cannot" if len(lacking) == 1 else f"peers {names} cannot"
        undeclared = f"{NEEDED_CAPABILITY[quantization]} is not declared there ("
        undeclared += f"{_WHY_LACKING[NEEDED_CAPABILITY[quantization]]}, or an older swarmnode)"
        whys = dict.fromkeys(peer.kernels_failed or undeclared for peer in lacking)
        raise LacksKernels(f"{whose} hold {quantization} weights: {'; '.join(whys)}", param="quantization")


def _check_capabilities(chosen: Sequence[PeerResources]) -> None:
    """Every stage's peer must speak this ring's dialect."""
    for peer in chosen:
        missing = _missing(peer, len(chosen))
        if missing:
            raise PeersLacking(
                f"peer {peer.name} cannot serve this ring: it lacks {missing}; "
                "update swarmnode there, or name other peers"
            )


def _missing(peer: PeerResources, stages: int) -> str:
    """What of a ring's dialect it does not speak."""
    needed = {SERVE_ONE_STAGE if stages == 1 else SERVE_N_STAGE, SERVE_CONCURRENT, SERVE_KV_BUDGET}
    return ", ".join(sorted(needed - peer.capabilities))


def _lacks(peer: PeerResources, quantization: str, stages: int) -> str:
    """What it would need to declare; nothing where it can hold a stage."""
    if not _has_kernels(peer, quantization):
        needed = NEEDED_CAPABILITY[quantization]
        return f"{needed} for {quantization} weights ({peer.kernels_failed or _WHY_LACKING[needed]})"
    return _missing(peer, stages)


def _boundaries(shape: ModelShape, stages: int) -> tuple[int, ...]:
    """The recorded cut where the stage count is the recorded one, else the cut that balances parameters; where no split
    is recorded that of the shards, of which every stage reads one."""
    if stages == shape.recorded_stages and shape.recorded_boundaries is not None:
        return shape.recorded_boundaries
    if shape.recorded_boundaries is None:
        if shape.shard_boundaries is None:
            raise LoadRefused(
                "this model records no split, and its shards, which show where it was cut, are not whole on this "
                "machine: load it where they are, or export it again with its boundaries"
            )
        return shape.shard_boundaries
    return balanced_boundaries(shape.layer_params, shape.embed_params, shape.head_params, stages)


def _budget(
    shape: ModelShape,
    request: PlanRequest,
    stages: tuple[StagePlan, ...],
    wanted_in_flight: int,
    peers: Sequence[PeerResources],
) -> Plan:
    """Size the KV budget: wanted in flight × a typical chat, lowered to what the smallest stage has room for."""
    least = min(request.min_context_tokens, shape.context_tokens)
    wanted = max(least, wanted_in_flight * request.typical_tokens)
    room = min((_kv_room(stage) for stage in stages), default=wanted)
    if room < least:
        raise PeersLacking(_too_small(request, stages, least) + _no_help(request, stages, least, peers))
    kv_tokens = min(room, max(wanted, min(room, wanted_in_flight * shape.context_tokens)))
    in_flight = max(1, min(wanted_in_flight, kv_tokens // min(request.typical_tokens, kv_tokens)))
    return Plan(stages, min(shape.context_tokens, kv_tokens), kv_tokens, in_flight)


def _kv_room(stage: StagePlan) -> int:
    """Tokens of KV that fit beside everything else."""
    spare = stage.peer.memory_bytes / HEADROOM - stage.price.fixed
    if not stage.kv_token_bytes:
        return NO_KV_TOKENS if spare >= 0 else -1
    return int(spare // stage.kv_token_bytes)


def _too_small(request: PlanRequest, stages: tuple[StagePlan, ...], least: int) -> str:
    lines = []
    for index, stage in enumerate(stages):
        price = stage.price
        if _kv_room(stage) < least:
            states = f"{mib(price.states)} of recurrent states, " if price.states else ""
            lines.append(
                f"stage {index} (layers {stage.first_layer}-{stage.end_layer - 1}) needs {mib(price.need(least))} on "
                f"{stage.peer.name}: {mib(price.weights)} of {_weights(request)} weights, "
                f"{mib(least * price.kv_token)} of KV for {least:,} tokens, {states}"
                f"{mib(price.worker + price.workspace)} for the worker, 20 % headroom; it offers "
                f"{mib(stage.peer.memory_bytes)}"
            )
    return "too little memory: " + "; ".join(lines) + ". Use more stages, a smaller dtype, or raise --memory"


def _no_help(request: PlanRequest, stages: Sequence[StagePlan], least: int, peers: Sequence[PeerResources]) -> str:
    """Of the others, those that offer enough for the stage that lacks it the most, and why they hold none."""
    most = max(stage.price.need(least) for stage in stages)
    chosen = [stage.peer for stage in stages]
    others = [peer for peer in peers if peer not in chosen and peer.memory_bytes >= most]
    whys = [f"{peer.name} ({why})" for peer in others if (why := _unable(request, len(stages), peer))]
    return f". Left out: {', '.join(whys)}" if whys else ""


def _unable(request: PlanRequest, stages: int, peer: PeerResources) -> str:
    """Why it can hold no stage of this ring, whatever it offers; nothing where it can."""
    if peer.busy_with is not None:
        return f"busy: it serves {peer.busy_with}"
    if request.peers:
        return "the load names others"
    lacking = _lacks(peer, request.quantization, stages)
    return f"it lacks {lacking}" if lacking else ""


def _weights(request: PlanRequest) -> str:
    return request.dtype if request.quantization == NONE else request.quantization
