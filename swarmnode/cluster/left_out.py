"""Why a peer got no stage, with the numbers that decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmnode.cluster.faster_plan import WORTH_MS, WORTH_SHARE
from swarmnode.cluster.pricing import mib

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from swarmnode.cluster.faster_plan import Choice
    from swarmnode.cluster.placement import PeerResources, Plan
    from swarmnode.cluster.ring_pace import RingPace
    from swarmnode.ids import NodeId

UNABLE, MEMORY, SLOWER, FAR, SPARE = "unable", "memory", "slower", "far", "not_needed"
"""It can hold no stage of this ring; it offers too little; a ring with it would be slower, for its steps or for the way
to it; others do as well."""
ORDER = (SLOWER, FAR, MEMORY, UNABLE, SPARE)
"""What says the most first."""
MARGIN = 1.05
"""Less is no reason."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """`reason` is one of those above, `why` is for people."""

    node: NodeId
    name: str
    reason: str
    why: str


def left_out(
    choice: Choice, plan: Plan, peers: Sequence[PeerResources], unable: Callable[[PeerResources], str]
) -> tuple[LeftOut, ...]:
    """One reason for each of `peers` that holds nothing of `plan`, in ORDER. `unable` says why a peer can hold no
    stage, whatever it offers; nothing where it can."""
    held = {stage.peer.node for stage in plan.stages}
    found = []
    for peer in peers:
        if peer.node not in held:
            why = unable(peer)
            reason, why = (UNABLE, why) if why else _compared(choice, plan, peer)
            found.append(LeftOut(peer.node, peer.name, reason, why))
    return tuple(sorted(found, key=lambda left: (ORDER.index(left.reason), left.name)))


def _compared(choice: Choice, plan: Plan, peer: PeerResources) -> tuple[str, str]:
    """With what the ring would be, had it the stage that suits it best."""
    needs = [stage.price.need(choice.tokens) for stage in plan.stages]
    if peer.memory_bytes < min(needs):
        return MEMORY, f"too little memory: it offers {mib(peer.memory_bytes)}, a stage needs {mib(min(needs))}"
    nodes = [stage.peer.node for stage in plan.stages]
    now = choice.pace(nodes, plan)
    places = [stage for stage, need in enumerate(needs) if need <= peer.memory_bytes]
    with_it = {stage: choice.pace([*nodes[:stage], peer.node, *nodes[stage + 1 :]], plan) for stage in places}
    place = min(places, key=lambda stage: with_it[stage].cost_ms)
    then = with_it[place]
    if then.cost_ms > now.cost_ms * MARGIN:
        longer_ms = then.stage_ms[place] - now.stage_ms[place]
        if longer_ms >= sum(then.hop_ms) - sum(now.hop_ms) and peer.node in choice.measured.paces:
            return SLOWER, _slower(choice, plan.stages[place].peer, peer, place)
        if longer_ms < sum(then.hop_ms) - sum(now.hop_ms):
            return FAR, _far(now, then, place)
    return SPARE, _spare(choice, plan, peer, place, then.round_ms)


def _slower(choice: Choice, holder: PeerResources, peer: PeerResources, stage: int) -> str:
    measured = choice.measured
    unit = "" if choice.shape.weightless else " for each GiB of weights"
    assumed = "" if holder.node in measured.paces else "an assumed "
    return (
        f"measured slower: a step takes {measured.pace_ms(peer.node):,.1f} ms{unit}, and "
        f"{assumed}{measured.pace_ms(holder.node):,.1f} on {holder.name}, which holds stage {stage}"
    )


def _far(now: RingPace, then: RingPace, place: int) -> str:
    before = place - 1  # of stage 0 the last one
    there_ms, here_ms = (pace.hop_ms[before] + pace.hop_ms[place] for pace in (then, now))
    return f"far: the way to it and on takes {there_ms:,.1f} ms, {here_ms:,.1f} to the peer that holds stage {place}"


def _spare(choice: Choice, plan: Plan, peer: PeerResources, place: int, round_ms: float) -> str:
    asked = f"not needed: the ring has {len(plan.stages)} stage{'s' if len(plan.stages) > 1 else ''}"
    if choice.measured.paces and plan.pace is not None and round_ms > plan.pace.round_ms * MARGIN:
        return f"{asked}, and nothing measured makes it faster than those that hold them"
    least = min(stage.peer.memory_bytes for stage in plan.stages)
    if least >= peer.memory_bytes:
        return f"{asked}, and who holds them offers {mib(least)} or more; it offers {mib(peer.memory_bytes)}"
    holder = plan.stages[place]
    if holder.peer.node in choice.request.prefer:
        return f"{asked}, and {holder.peer.name} held stage {place} before"
    if holder.to_fetch < peer.to_fetch(holder.first_layer, holder.end_layer):
        return f"{asked}, and {holder.peer.name} keeps more of the files of stage {place}"
    return f"{asked}, and no ring that was tried with it is {WORTH_SHARE:.0%} and {WORTH_MS:g} ms faster"
