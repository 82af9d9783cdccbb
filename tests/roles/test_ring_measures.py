"""What reaches the coordinator's book of machines, and what a load makes of it: real rings, and peers' reports."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
import trio.testing
from beats import beat_of
from contexts import node_context

from swarmnode.api.backend import LoadOptions
from swarmnode.catalog.registry import Registry
from swarmnode.cluster.machine_book import Weights
from swarmnode.cluster.measured import LinkSeen
from swarmnode.compute.scripted_servable import write_scripted_servable
from swarmnode.config import read_settings
from swarmnode.errors import KernelsFailed, ProtocolError
from swarmnode.ids import BootId, ModelId, NodeId, RequestId
from swarmnode.roles.coordinator import Coordinator
from swarmnode.roles.gateway import Gateway
from swarmnode.roles.members import Member
from swarmnode.roles.reports import Beat, read_report
from swarmnode.wire.bodies import pack_body
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import Identity
from swarmnode.wire.memory import MemoryNetwork

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from swarmnode.roles.loaded_ring import LoadedRing

CAPABILITIES = ("serve-n-stage", "serve-one-stage", "serve-concurrent", "serve-kv-budget")
MODEL = ModelId("m")
WEIGHTS = Weights("m", "float32", "none")
QUICK, SLOW, SPARE = (NodeId(name * 32) for name in "abc")
HOUSE = NodeId("0" * 32)


class House:
    """A coordinator with three peers, whose reports the test makes up."""

    def __init__(self, folder: Path) -> None:
        root = write_scripted_servable(folder / "models", "m", {"default": [7]}, layers=4, stages=2).parent
        self.events: list[tuple[str, Mapping[str, object]]] = []
        context = node_context(
            Identity(HOUSE, BootId("b"), "house"), MemoryNetwork(), read_settings(folder / "data", environ={})
        )
        context = replace(context, emit=self.note)
        nobody = SimpleNamespace(nodes=[], founders=[], removed=lambda _: False)
        self.coordinator = Coordinator(context, Registry(root), cast("Any", nobody))
        self.gateway = Gateway(self.coordinator)
        for name, node in (("quick", QUICK), ("slow", SLOW), ("spare", SPARE)):
            identity = Identity(node, BootId(f"boot-{name}"), name, capabilities=CAPABILITIES)
            member = Member(identity, trio.CancelScope())
            member.beat = Beat(memory_bytes=4 << 30, device="cpu", threads=1, stages=[])
            self.coordinator.members[node] = member

    def note(self, event: str, values: Mapping[str, object]) -> None:
        self.events.append((event, values))

    def hear(self, node: NodeId, kind: str, ring: LoadedRing, stage: int, body: dict[str, Any]) -> None:
        self.coordinator._take(node, Frame(kind, {"ring": ring.ring, "stage": stage}, pack_body(body)))

    def beat(self, node: NodeId, **more: Any) -> None:
        identity = self.coordinator.members[node].identity
        self.coordinator._take_beat(identity, beat_of(identity, memory_bytes=4 << 30, **more))

    def ready(self, ring: LoadedRing, *step_ms: float | None) -> None:
        """Every stage says that it has loaded, and what its steps took."""
        for stage, (node, ms) in enumerate(zip(ring.life.nodes, step_ms, strict=True)):
            costs = None if ms is None else {"group_ms": {"1": ms, "8": 8 * ms}, "piece_ms": {}}
            body = {"address": "127.0.0.1:1", "kv_tokens": 4096, "pid": 1, "costs": costs}
            self.hear(node, "stage_ready", ring, stage, body)

    async def unload(self, ring: LoadedRing) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(ring.unload, force=True))
            await trio.testing.wait_all_tasks_blocked()
            for stage, node in enumerate(ring.life.nodes):
                self.hear(node, "unloaded", ring, stage, {})

    def paces(self) -> Mapping[NodeId, float]:
        return self.coordinator.machines.seen(WEIGHTS, trio.current_time()).paces

    async def plan(self) -> dict[str, Any]:
        return dict(await self.gateway.plan(MODEL, LoadOptions()))


@pytest.fixture
async def house(tmp_path: Path, nursery: trio.Nursery) -> House:
    made = House(tmp_path)
    await nursery.start(made.coordinator.run)
    return made


async def test_a_load_after_a_peer_was_measured_slow_avoids_it_and_says_so(house: House) -> None:
    first = house.coordinator.rings.start(MODEL, LoadOptions(peers=("quick", "slow")))
    house.ready(first, 2.0, 40.0)
    assert house.paces() == {QUICK: 2.0, SLOW: 40.0}
    await house.unload(first)

    plan = await house.plan()
    assert [stage["peer"] for stage in plan["stages"]] == ["quick", "spare"]
    assert plan["left_out"] == [
        {
            "node": SLOW,
            "peer": "slow",
            "reason": "slower",
            "why": "measured slower: a step takes 40.0 ms, and an assumed 21.0 on spare, which holds stage 1",
        }
    ]
    assert plan["predicted"] == {"round_ms": 23.0, "bottleneck_ms": 21.0, "stage_ms": [2.0, 21.0], "hop_ms": [0.0, 0.0]}
    second = house.coordinator.rings.start(MODEL, LoadOptions())
    assert second.life.nodes == (QUICK, SPARE)
    assert house.gateway.status(MODEL)["left_out"] == plan["left_out"]
    name, values = house.events[-1]
    assert (name, values["left_out"]) == ("ring_loading", {"slow": plan["left_out"][0]["why"]})


async def test_q2_a_load_whose_kernels_fail_says_so_and_the_next_one_serves_in_another_way(house: House) -> None:
    """A real ring: both stages find as they load that what their peers declare does not run there."""
    abilities = (*CAPABILITIES, "serve-int4-fast", "serve-quantized")
    for member in house.coordinator.members.values():
        member.identity = replace(member.identity, capabilities=abilities)
    asked = LoadOptions(peers=("quick", "slow"), quantization="int4-fast")
    first = house.coordinator.rings.start(MODEL, asked)
    assert (first.quantization, first.notice) == ("int4-fast", "")
    await trio.testing.wait_all_tasks_blocked()  # the loads are sent
    for stage, node in enumerate(first.life.nodes):
        header = {"ring": first.ring, "stage": stage, "code": "kernels_failed", "message": "no such kernel here"}
        house.coordinator._take(node, Frame("stage_failed", header))
    await trio.testing.wait_all_tasks_blocked()
    assert isinstance(first.error, KernelsFailed)
    says = "no such kernel here; load m again: other peers then serve it, or these with nf4 or in full precision"
    assert first.error.message == says
    await house.unload(first)
    second = house.coordinator.rings.start(MODEL, asked)
    assert second.quantization == "nf4"
    assert second.notice == "peers quick, slow cannot hold int4-fast weights: no such kernel here; served with nf4"


async def test_a_plan_without_measures_predicts_nothing(house: House) -> None:
    plan = await house.plan()
    assert plan["predicted"] is None
    assert [left["reason"] for left in plan["left_out"]] == ["not_needed"]


async def test_a_model_stays_with_the_peers_that_keep_its_files(house: House) -> None:
    """Of the ring before, each its own stage; other peers would have to fetch them."""
    first = house.coordinator.rings.start(MODEL, LoadOptions(peers=("spare", "slow")))
    house.ready(first, 2.0, 2.0)
    await house.unload(first)
    assert [stage["peer"] for stage in (await house.plan())["stages"]] == ["quick", "slow"], (
        "their files are gone again"
    )
    for node in (SLOW, SPARE):
        house.beat(node, models=["m"])
    plan = await house.plan()
    assert [stage["peer"] for stage in plan["stages"]] == ["spare", "slow"]


async def test_lanes_and_beats_tell_how_far_nodes_are(house: House) -> None:
    ring = house.coordinator.rings.start(MODEL, LoadOptions(peers=("quick", "slow")))
    lanes = [
        {"lane": "act", "route": "direct", "round_trip_ms": 30.0},
        {"lane": "pre", "route": "direct", "round_trip_ms": 45.0, "mbit_per_s": 12.0},
    ]
    house.hear(QUICK, "linked", ring, 0, {"links": lanes})
    house.beat(SLOW, round_trip_ms=80.0, stages=[])
    house.beat(SPARE)
    assert house.coordinator.machines.seen(WEIGHTS, trio.current_time()).links == {
        (QUICK, SLOW): LinkSeen(30.0, 12.0),
        (SLOW, HOUSE): LinkSeen(80.0),
    }


@pytest.mark.parametrize("lie", [float("nan"), float("inf"), -1.0, 1e9, "fast"])
def test_round_trips_that_are_none_are_refused(lie: object) -> None:
    body = {"memory_bytes": 1, "device": "cpu", "threads": 1, "stages": [], "round_trip_ms": lie}
    with pytest.raises(ProtocolError, match="round_trip_ms"):
        read_report(Beat, Frame("beat", {}, pack_body(body)))


async def test_replies_that_had_the_ring_for_themselves_show_a_peer_that_has_become_slow(house: House) -> None:
    """It was quick when it loaded; somebody plays on it since."""
    ring = house.coordinator.rings.start(MODEL, LoadOptions(peers=("quick", "slow")))
    house.ready(ring, 2.0, 2.0)
    timing = {"stage0_ms": 2.0, "stage1_ms": 9.0, "link_ms": 1.0}
    ring.measures.replied(15, timing, trio.current_time())
    assert house.paces() == {QUICK: 2.0, SLOW: 2.0}, "too short a reply"
    ring.measures.replied(16, {"stage1_ms": "fast", "stage0_ms": float("nan")}, trio.current_time())
    assert house.paces() == {QUICK: 2.0, SLOW: 2.0}
    ring.measures.replied(16, timing, trio.current_time())
    assert house.paces() == {QUICK: 2.0, SLOW: 9.0}
    house.beat(QUICK)
    assert house.events[-1] == ("straggler", {"name": "slow", "times": 4.5})
    assert {peer["name"]: peer["straggles"] for peer in house.gateway.nodes()["peers"]} == {
        "quick": False, "slow": True, "spare": False,
    }  # fmt: skip
    ring.measures.replied(99, {**timing, "stage1_ms": 2.2}, trio.current_time())
    house.beat(QUICK)
    assert house.events[-1] == ("straggler_recovered", {"name": "slow", "times": 1.1})


async def test_what_a_stage_measured_when_it_loaded_is_no_news_when_its_peer_comes_back(house: House) -> None:
    """Its connection broke for a moment, and it says again what it said; replies have shown since how slow it is."""
    ring = house.coordinator.rings.start(MODEL, LoadOptions(peers=("quick", "slow")))
    house.ready(ring, 2.0, 2.0)
    ring.measures.replied(16, {"stage0_ms": 2.0, "stage1_ms": 9.0}, trio.current_time())
    house.beat(QUICK)
    assert house.events[-1] == ("straggler", {"name": "slow", "times": 4.5})
    house.ready(ring, 2.0, 2.0)
    house.beat(QUICK)
    assert house.events[-1][0] == "straggler"
    assert house.paces() == {QUICK: 2.0, SLOW: 9.0}


async def test_a_ring_that_was_taken_over_tells_nothing_new_of_its_load(house: House) -> None:
    """Its stages measured themselves for an earlier coordinator, perhaps hours ago."""
    planned, _ = house.coordinator.rings.plan(MODEL, LoadOptions(peers=("quick", "slow")))
    ring = house.coordinator.rings.make(planned, adopted=True)
    house.coordinator.rings.running[ring.ring] = ring
    house.ready(ring, 2.0, 40.0)
    assert ring.ready.keys() == {0, 1}
    assert house.paces() == {}
    ring.measures.replied(16, {"stage0_ms": 2.0, "stage1_ms": 9.0}, trio.current_time())
    assert house.paces() == {QUICK: 2.0, SLOW: 9.0}


async def test_requests_that_share_the_ring_know_it(house: House) -> None:
    ring = house.coordinator.rings.start(MODEL, LoadOptions(peers=("quick", "slow")))
    first = ring.open(RequestId("1"), {})
    assert first.alone
    ring.close(first)
    second, third = ring.open(RequestId("2"), {}), ring.open(RequestId("3"), {})
    ring.close(second)
    assert (second.alone, third.alone) == (False, False)


async def test_who_is_removed_is_forgotten(house: House) -> None:
    ring = house.coordinator.rings.start(MODEL, LoadOptions(peers=("quick", "slow")))
    house.ready(ring, 2.0, 40.0)
    house.coordinator.rings.restoring.up(ring)

    async def remove(_name: str) -> Any:
        return SimpleNamespace(node=SLOW, name="slow")

    cast("Any", house.coordinator.enrolment).remove = remove
    for name in ("revoked", "where"):
        setattr(house.coordinator.enrolment, name, lambda: Frame("places", {}, pack_body({})))
    await house.coordinator.remove("slow")
    assert house.paces() == {QUICK: 2.0}
    assert [(r["peers"], r["num_stages"]) for r in house.coordinator.rings.restoring.records(())] == [([], 2)]
