"""A load names the peers that may have its files: who keeps some, then who loads the same ring; never the loader."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import trio
from load_specs import one_stage_load

from swarmnode.cluster.placement import PeerResources
from swarmnode.ids import BootId, NodeId
from swarmnode.roles.file_sources import with_kept, with_sources
from swarmnode.roles.load_spec import MAX_SOURCES, LoadSpec
from swarmnode.roles.members import Member
from swarmnode.roles.planning import PlannedRing
from swarmnode.roles.reports import Beat
from swarmnode.wire.link import Identity


def member(name: str, *models: str, listen: bool = True) -> Member:
    at = (f"10.0.0.1:{len(name)}",) if listen else ()
    made = Member(Identity(NodeId(name), BootId(name), name, listen=at), trio.CancelScope())
    made.beat = Beat(memory_bytes=1, device="cpu", threads=1, stages=[], models=list(models))
    return made


def planned(*nodes: str) -> PlannedRing:
    load = one_stage_load((), "a")
    specs = tuple(
        LoadSpec.read(
            {**load.header(), "stage": stage}, {**load.body(), "nodes": list(nodes), "num_stages": len(nodes)}
        )
        for stage in range(len(nodes))
    )
    return PlannedRing(cast("Any", SimpleNamespace()), specs, "float32")


def test_a_plan_knows_which_layers_peers_keep() -> None:
    """What they held in the last ring; without one, or beside it, nobody here remembers which."""
    members = {NodeId(made.node): made for made in (member("a", "scripted"), member("b", "scripted"), member("c"))}
    stages = [SimpleNamespace(first_layer=4, end_layer=6), SimpleNamespace(first_layer=0, end_layer=4)]
    last = SimpleNamespace(stage_of={"a": 0, "c": 1}.get, plan=SimpleNamespace(stages=stages))
    offers = [PeerResources(node, node, 1) for node in members]

    def kept(of: Any) -> list[tuple[int, int]]:
        return [offer.kept_layers for offer in with_kept(offers, members, "scripted", 6, of)]

    assert kept(last) == [(4, 6), (0, 6), (0, 0)]
    assert kept(None) == [(0, 6), (0, 6), (0, 0)]


def sources(ring: PlannedRing) -> list[list[str]]:
    return [[node for node, _ in spec.sources] for spec in ring.specs]


def test_who_keeps_the_model_comes_first_then_the_rings_own() -> None:
    members = [member("loads"), member("keeps", "scripted"), member("other", "another"), member("self", "scripted")]
    ring = with_sources(planned("self", "loads"), members)
    assert sources(ring) == [["keeps", "loads"], ["keeps", "self"]]
    assert ring.specs[0].sources[0] == ("keeps", "10.0.0.1:5")


def test_who_cannot_be_dialled_or_has_not_beaten_is_no_source() -> None:
    silent = member("silent", "scripted")
    silent.beat = None
    assert sources(with_sources(planned("self"), [member("deaf", "scripted", listen=False), silent])) == [[]]


def test_a_large_swarm_names_a_few() -> None:
    many = [member(f"peer{i}", "scripted") for i in range(40)]
    assert len(with_sources(planned("self"), many).specs[0].sources) == MAX_SOURCES
