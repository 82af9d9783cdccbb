"""What a coordinator makes of the document that the one before it left: a crash between two changes is finished."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import trio
from contexts import node_context
from kept_alone import state_at

from swarmnode.catalog.registry import Registry
from swarmnode.cluster.desired_rings import RETURN_S
from swarmnode.cluster.node_book import NodeRecord
from swarmnode.compute.scripted_servable import write_scripted_servable
from swarmnode.config import read_settings
from swarmnode.ids import BootId, ModelId, NodeId
from swarmnode.roles.coordinator import Coordinator
from swarmnode.roles.enrolment import Enrolment, certify_self
from swarmnode.roles.identity import NodeIdentity, SwarmAuthority
from swarmnode.roles.members import Member
from swarmnode.roles.reports import Beat
from swarmnode.wire.link import Identity
from swarmnode.wire.memory import MemoryNetwork
from swarmnode.wire.tls import SwarmTls

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from swarmnode.roles.swarm_state import SwarmState

pytestmark = pytest.mark.usefixtures("writes_in_place")
MODEL = ModelId("m")
ATTIC, CELLAR, DEN = (NodeId(letter * 32) for letter in "abc")
NAMES = {ATTIC: "attic", CELLAR: "cellar", DEN: "den"}
CAPABILITIES = ("serve-n-stage", "serve-one-stage", "serve-concurrent", "serve-kv-budget")


def named(*peers: str) -> dict[str, Any]:
    """The record of a model that is to be loaded again over these peers."""
    return {
        "model": MODEL,
        "nodes": [ATTIC, CELLAR],
        "num_stages": None,
        "peers": list(peers),
        "dtype": "auto",
        "quantization": None,
    }


class Successor:
    """A coordinator over a document, with peers that have beaten; what it begins to load is never answered."""

    def __init__(self, folder: Path, state: SwarmState) -> None:
        kept = NodeIdentity.open(folder / "house")
        authority = SwarmAuthority.open(kept, time.time())
        certify_self(authority, kept, ("coordinator", "peer"), time.time())
        me = Identity(kept.node, BootId("b"), "house", ("coordinator",))
        self.events: list[tuple[str, Mapping[str, object]]] = []
        context = replace(
            node_context(me, MemoryNetwork(), read_settings(folder, environ={})),
            emit=lambda event, values: self.events.append((event, values)),
        )
        keeper = NodeRecord(kept.node, "house", math.inf)
        enrolment = Enrolment(authority, state, SwarmTls(kept.files, enrolment=True), ("127.0.0.1:1",), keeper=keeper)
        root = write_scripted_servable(folder / "models", MODEL, {"default": [1]}, layers=4, stages=2).parent
        self.coordinator = Coordinator(context, Registry(root), enrolment, state)

    def greet(self, *peers: NodeId) -> None:
        for node in peers:
            identity = Identity(node, BootId(f"boot of {NAMES[node]}"), NAMES[node], capabilities=CAPABILITIES)
            member = self.coordinator.members[node] = Member(identity, trio.CancelScope())
            member.beat = Beat(memory_bytes=4 << 30, device="cpu", threads=1, stages=[])

    def told(self, event: str) -> list[Mapping[str, object]]:
        return [values for name, values in self.events if name == event]

    def holders(self) -> list[str]:
        ring = self.coordinator.rings.of_model(MODEL)
        return [] if ring is None else [NAMES[node] for node in ring.life.nodes]


async def write_down(state: SwarmState, *peers: str, removed: str | None) -> None:
    """The document as a coordinator left it that died before what followed from a removal was written, too."""
    for node, name in NAMES.items():
        await state.change(lambda _, nodes, n=node, called=name: nodes.issued(n, called, math.inf))
    await state.keep_rings([], [named(*peers)])
    if removed is not None:
        await state.change(lambda _, nodes: nodes.remove(removed, time.time()))


@pytest.mark.parametrize("by", ["its name", "its id"])
async def test_a_named_peer_that_was_removed_is_not_waited_for_by_who_takes_over(
    tmp_path: Path, nursery: trio.Nursery, writes_in_place: None, autojump_clock: object, by: str
) -> None:
    state = state_at(tmp_path / "swarm.json")
    await write_down(state, "attic" if by == "its name" else ATTIC, "cellar", removed="attic")
    successor = Successor(tmp_path, state)
    await nursery.start(successor.coordinator.run)
    assert [values["model"] for values in successor.told("ring_peers_dropped")] == [MODEL]
    successor.greet(CELLAR, DEN)
    await trio.sleep(RETURN_S + 1)
    assert sorted(successor.holders()) == ["cellar", "den"], "any peers will do, as many as were named"


async def test_a_named_peer_that_is_only_away_is_waited_for(
    tmp_path: Path, nursery: trio.Nursery, writes_in_place: None, autojump_clock: object
) -> None:
    state = state_at(tmp_path / "swarm.json")
    await write_down(state, "attic", "cellar", removed=None)
    successor = Successor(tmp_path, state)
    await nursery.start(successor.coordinator.run)
    successor.greet(CELLAR, DEN)
    await trio.sleep(RETURN_S + 1)
    assert (successor.holders(), successor.told("ring_peers_dropped")) == ([], [])
    assert ["attic" in str(values["waits_for"]) for values in successor.told("ring_waits")] == [True]


async def test_a_name_that_another_node_took_since_is_that_node(
    tmp_path: Path, nursery: trio.Nursery, writes_in_place: None, autojump_clock: object
) -> None:
    """The removal was written long before the load that names its successor under the same name."""
    state = state_at(tmp_path / "swarm.json")
    await write_down(state, "attic", "cellar", removed="attic")
    await state.change(lambda _, nodes: nodes.remove("den", time.time()))
    new = NodeId("d" * 32)
    await state.change(lambda _, nodes: nodes.issued(new, "attic", math.inf))
    successor = Successor(tmp_path, state)
    await nursery.start(successor.coordinator.run)
    assert successor.told("ring_peers_dropped") == []
    (record,) = successor.coordinator.rings.restoring.records(())
    assert record["peers"] == ["attic", "cellar"]
