"""Idle rings and room for new ones, with real rings on virtual time over peers that do as they are told."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from swarmnode.api.backend import LoadOptions
from swarmnode.catalog.registry import Registry
from swarmnode.cluster.ring_life_messages import ProbeReturned, StageDown, StageLinked, StageReady, StageUnloaded
from swarmnode.compute.scripted_servable import write_scripted_servable
from swarmnode.config import read_settings
from swarmnode.errors import Conflict, LoadRefused
from swarmnode.ids import NodeId, RequestId, RingId
from swarmnode.roles.loaded_ring import LoadedRing
from swarmnode.roles.members import Member
from swarmnode.roles.planning import plan_ring
from swarmnode.roles.reports import Beat
from swarmnode.roles.ring_lifecycle import RingLifecycle
from swarmnode.wire.link import Identity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from swarmnode.cluster.placement import PeerResources
    from swarmnode.config import Settings
    from swarmnode.roles.planning import PlannedRing
    from swarmnode.wire.frames import Frame

GIB = 1 << 30
UNLOAD_TAKES_S = 3.0


@dataclass
class World:
    """A coordinator's rings over `peers` that load at once and take three seconds to give memory back."""

    registry: Registry
    settings: Settings
    nursery: trio.Nursery
    members: list[Member]
    rings: dict[RingId, LoadedRing] = field(default_factory=dict)
    told: list[tuple[float, str, NodeId]] = field(default_factory=list)
    events: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lifecycle = RingLifecycle(self.rings.values, self.settings, self.emit)
        self.nursery.start_soon(self.lifecycle.run)

    def emit(self, event: str, values: Mapping[str, object]) -> None:
        self.events.append((event, str(values["model"])))

    def load(self, model: str, **options: Any) -> LoadedRing:
        manifest, number = self.registry.get(model), RingId(f"{model}-{len(self.events)}")

        def plan(offers: Sequence[PeerResources]) -> PlannedRing:
            return plan_ring(manifest, LoadOptions(**options), offers, self.settings, number, 1)

        planned, leaving = self.lifecycle.find_room(self.members, plan)
        self.lifecycle.evict(leaving, model)
        ring = LoadedRing(planned, self.post, lambda over: self.rings.pop(over.ring) and None)
        self.rings[ring.ring] = ring
        self.nursery.start_soon(self.lifecycle.serve, ring, leaving)
        return ring

    async def ready(self, model: str, **options: Any) -> LoadedRing:
        ring = self.load(model, **options)
        await ring.settled.wait()
        assert ring.state == "ready"
        await trio.testing.wait_all_tasks_blocked()
        return ring

    def post(self, node: NodeId, frame: Frame) -> None:
        self.told.append((trio.current_time(), frame.kind, node))
        ring = self.rings[RingId(frame.header["ring"])] if "ring" in frame.header else None
        stage = ring.stage_of(node) if ring is not None else None
        if ring is None or stage is None:
            return
        match frame.kind:
            case "load":
                ring.feed(StageReady(stage, "127.0.0.1:1", 4096))
            case "link":
                ring.feed(StageLinked(stage, ring.life.links))
            case "probe_ring":
                ring.feed(ProbeReturned())
            case "unload":
                self.nursery.start_soon(self._unloads, ring, stage)

    async def _unloads(self, ring: LoadedRing, stage: int) -> None:
        await trio.sleep(UNLOAD_TAKES_S)
        ring.feed(StageUnloaded(stage))

    def at(self, kind: str) -> list[float]:
        """When frames of that kind were posted."""
        return [at for at, what, _ in self.told if what == kind]


def member(name: str, memory_bytes: int = 4 * GIB) -> Member:
    who = Member(Identity(NodeId(f"id-of-{name}"), RingId("b"), name, capabilities=CAPABILITIES), trio.CancelScope())  # type: ignore[arg-type]
    who.beat = Beat(memory_bytes=memory_bytes, device="cpu", threads=1, stages=[])
    return who


CAPABILITIES = ("serve-n-stage", "serve-one-stage", "serve-concurrent", "serve-kv-budget")


@pytest.fixture
def world(tmp_path: Path, nursery: trio.Nursery, request: pytest.FixtureRequest) -> World:
    script = {"default": [1]}
    for model in ("old", "new"):
        write_scripted_servable(tmp_path / "models", model, script, layers=4, stages=2)
    settings = replace(read_settings(tmp_path, {}), **getattr(request, "param", {}))
    return World(Registry(tmp_path / "models"), settings, nursery, [member("a"), member("b")])


async def test_l3_a_ring_that_stands_idle_is_unloaded_after_fifteen_minutes(
    world: World, autojump_clock: object
) -> None:
    ring = await world.ready("old")
    began = trio.current_time()
    await ring.over.wait()
    assert trio.current_time() - began == 900 + UNLOAD_TAKES_S
    assert ring.error is None
    assert world.events == [("ring_ready", "old"), ("ring_idle", "old")]


async def test_l3_a_reply_however_long_keeps_its_ring(world: World, autojump_clock: object) -> None:
    ring = await world.ready("old")
    with world.lifecycle.in_use(ring):
        await trio.sleep(5000)
        assert ring.serving
    await trio.sleep(899)
    assert ring.serving
    await trio.sleep(2)
    assert ring.state == "unloading"


async def test_l3_a_ring_that_is_being_linked_anew_is_looked_at_again_later(
    world: World, autojump_clock: object
) -> None:
    ring = await world.ready("old")
    await trio.sleep(899.5)
    ring.feed(StageDown(0, "stage_lost", "its link broke", symptom=True))
    assert ring.state == "relinking"
    await trio.sleep(5)
    assert ring.state == "ready"
    await trio.sleep(890)
    assert ring.serving
    await trio.sleep(10)
    assert ring.state == "unloading"


@pytest.mark.parametrize("world", [{"model_idle_unload_s": 0}], indirect=True)
async def test_l3_zero_keeps_it_for_ever(world: World, autojump_clock: object) -> None:
    ring = await world.ready("old")
    await trio.sleep(80_000)
    assert ring.serving


async def test_l2_the_idle_ring_gives_its_memory_back_before_the_new_one_loads(
    world: World, autojump_clock: object
) -> None:
    old = await world.ready("old")
    await trio.sleep(60)
    new = world.load("new")
    assert (old.draining, new.state) == (True, "loading"), "from this moment on the old one takes no requests"
    await new.settled.wait()
    assert old.over.is_set()
    assert world.at("load")[-1] == world.at("unload")[-1] + UNLOAD_TAKES_S
    assert new.state == "ready"
    await trio.testing.wait_all_tasks_blocked()
    assert ("ring_evicted", "old") in world.events


async def test_l2_a_ring_with_running_replies_is_never_evicted(world: World, autojump_clock: object) -> None:
    old = await world.ready("old")
    stream = old.open(RequestId("r"), {})
    with pytest.raises(Conflict, match=r"old \(1 running there\)"):
        world.load("new")
    assert old.serving
    old.close(stream)
    assert (await world.ready("new")).serving


async def test_l2_a_load_that_is_refused_evicts_nothing(world: World, autojump_clock: object) -> None:
    old = await world.ready("old")
    with pytest.raises(LoadRefused):
        world.load("new", num_stages=3)
    assert old.serving


async def test_l2_a_load_while_another_one_is_under_way_there_is_a_conflict(
    world: World, autojump_clock: object
) -> None:
    world.load("old")
    with pytest.raises(Conflict, match="it is loading"):
        world.load("new")


async def test_l2_a_ring_that_is_leaving_makes_room_and_is_waited_for(world: World, autojump_clock: object) -> None:
    old = await world.ready("old")
    world.nursery.start_soon(lambda: old.unload(force=True))
    await trio.sleep(1)
    new = world.load("new")
    await new.settled.wait()
    assert world.at("load")[-1] == world.at("unload")[0] + UNLOAD_TAKES_S
    assert len(world.at("unload")) == 2, "one for each stage, none of them twice"


async def test_l1_a_drain_takes_a_minute_at_most_unless_it_is_forced(world: World, autojump_clock: object) -> None:
    """What runs longer is cut off."""
    old = await world.ready("old")
    old.open(RequestId("r"), {})
    began = trio.current_time()
    await old.unload(force=False)
    assert trio.current_time() - began == 60 + UNLOAD_TAKES_S


@pytest.mark.parametrize("world", [{"max_loaded_models": 2}], indirect=True)
async def test_l2_two_models_on_a_peer_where_two_are_allowed_in_the_memory_that_is_left(
    world: World, autojump_clock: object
) -> None:
    old = await world.ready("old")
    taken = int(old.plan.stages[0].price.need(old.plan.kv_tokens))
    new = await world.ready("new")
    assert old.serving
    assert {stage.peer.memory_bytes for stage in new.plan.stages} == {4 * GIB - taken}
