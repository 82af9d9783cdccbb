"""Where a model's files are: what a plan knows of who keeps them, and which peers its load is told of as sources."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from swarmnode.roles.load_spec import MAX_SOURCES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from swarmnode.cluster.placement import PeerResources
    from swarmnode.ids import NodeId
    from swarmnode.roles.loaded_ring import LoadedRing
    from swarmnode.roles.members import Member
    from swarmnode.roles.planning import PlannedRing


def with_kept(
    offers: Iterable[PeerResources],
    members: Mapping[NodeId, Member],
    model: str,
    layers: int,
    last: LoadedRing | None,
) -> list[PeerResources]:
    """The offers, with what each peer keeps of the model: its stage of the `last` ring, and for all that is known here
    any layer where it was not part of that one."""

    def kept(node: NodeId) -> tuple[int, int]:
        if not members[node].keeps(model):
            return 0, 0
        stage = None if last is None else last.stage_of(node)
        if last is None or stage is None:
            return 0, layers
        held = last.plan.stages[stage]
        return held.first_layer, held.end_layer

    return [replace(offer, kept_layers=kept(offer.node)) for offer in offers]


def with_sources(planned: PlannedRing, members: Iterable[Member]) -> PlannedRing:
    """The plan, its specs naming where else files may be had. Stages that load at once share what both of them need."""
    spec = planned.specs[0]
    keeping: list[tuple[NodeId, str]] = []
    loading: list[tuple[NodeId, str]] = []
    for member in members:
        if not member.identity.listen:
            continue
        source = (member.node, member.identity.listen[0])
        if member.keeps(spec.model):
            keeping.append(source)
        elif member.node in spec.nodes:
            loading.append(source)
    known = [*keeping, *loading]
    return replace(planned, specs=tuple(replace(s, sources=_others(known, s.nodes[s.stage])) for s in planned.specs))


def _others(known: list[tuple[NodeId, str]], own: NodeId) -> tuple[tuple[NodeId, str], ...]:
    return tuple(source for source in known if source[0] != own)[:MAX_SOURCES]
