"""Which peers a load is told of as sources of its files: those that keep parts of the model, and the ring's own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from swarmnode.roles.load_spec import MAX_SOURCES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from swarmnode.ids import NodeId
    from swarmnode.roles.members import Member
    from swarmnode.roles.planning import PlannedRing


def with_sources(planned: PlannedRing, members: Iterable[Member]) -> PlannedRing:
    """The plan, its specs naming where else files may be had. Stages that load at once share what both of them need."""
    spec = planned.specs[0]
    keeping: list[tuple[NodeId, str]] = []
    loading: list[tuple[NodeId, str]] = []
    for member in members:
        if not member.identity.listen:
            continue
        source = (member.node, member.identity.listen[0])
        if member.beat is not None and spec.model in member.beat.models:
            keeping.append(source)
        elif member.node in spec.nodes:
            loading.append(source)
    known = [*keeping, *loading]
    return replace(planned, specs=tuple(replace(s, sources=_others(known, s.nodes[s.stage])) for s in planned.specs))


def _others(known: list[tuple[NodeId, str]], own: NodeId) -> tuple[tuple[NodeId, str], ...]:
    return tuple(source for source in known if source[0] != own)[:MAX_SOURCES]
