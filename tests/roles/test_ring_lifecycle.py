"""Idle rings, room for new ones, and lost ones that come back: real rings on virtual time over peers that obey."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
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
from swarmnode.ids import ModelId, NodeId, RequestId, RingId
from swarmnode.roles.loaded_ring import LoadedRing
from swarmnode.roles.members import Member
from swarmnode.roles.planning import plan_ring
from swarmnode.roles.reports import Beat
from swarmnode.roles.restoring import Restoring
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
    broken: bool = False
    """Loads fail."""
    stuck: bool = False
    """Loads take for ever."""
    look_s: float = 0.0
    """What looking at a model's files takes, before it is loaded again."""

    def __post_init__(self) -> None:
        self.lifecycle = RingLifecycle(self.rings.values, self.settings, self.emit)
        self.restoring = Restoring(self.look, lambda *due: self._start(*due, asked=False), self.emit)
        self.nursery.start_soon(self.lifecycle.run)
        self.nursery.start_soon(self.restoring.run)

    async def look(self, _: ModelId) -> None:
        await trio.sleep(self.look_s)

    def emit(self, event: str, values: Mapping[str, object]) -> None:
        self.events.append((event, str(values["model"])))

    def load(self, model: str, **options: Any) -> LoadedRing:
        return self._start(model, LoadOptions(**options), asked=True)

    def _start(self, model: str, options: LoadOptions, *, asked: bool) -> LoadedRing:
        manifest, number = self.registry.get(model), RingId(f"{model}-{len(self.events)}")

        def plan(offers: Sequence[PeerResources]) -> PlannedRing:
            return plan_ring(manifest, options, offers, self.settings, number, 1)

        planned, leaving = self.lifecycle.find_room(self.members, plan, evict=asked)
        self.lifecycle.evict(self.lifecycle.hold(leaving), model)
        ring = LoadedRing(planned, self.post, self._over)
        self.rings[ring.ring] = ring
        self.restoring.begun(ring, options, asked=asked)
        self.nursery.start_soon(self.lifecycle.serve, ring, leaving)
        return ring

    def _over(self, ring: LoadedRing) -> None:
        del self.rings[ring.ring]
        self.restoring.over(ring)

    def ring_of(self, model: str) -> LoadedRing | None:
        return next((ring for ring in self.rings.values() if ring.model == model), None)

    def restored(self, model: str) -> dict[str, Any] | None:
        return self.restoring.status(ModelId(model), self.ring_of(model))

    async def ready(self, model: str, **options: Any) -> LoadedRing:
        ring = self.load(model, **options)
        await ring.settled.wait()
        assert ring.state == "ready"
        self.restoring.up(ring)
        await trio.testing.wait_all_tasks_blocked()
        return ring

    def post(self, node: NodeId, frame: Frame) -> None:
        self.told.append((trio.current_time(), frame.kind, node))
        ring = self.rings[RingId(frame.header["ring"])] if "ring" in frame.header else None
        stage = ring.stage_of(node) if ring is not None else None
        if ring is None or stage is None:
            return
        match frame.kind:
            case "load" if self.broken:
                ring.feed(StageDown(stage, "load_failed", "its disk is full", gone=True))
            case "load" if not self.stuck:
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


async def test_a_load_that_an_unload_ends_was_never_ready(world: World, autojump_clock: object) -> None:
    world.stuck = True
    ring = world.load("old")
    await trio.sleep(2.5)
    await ring.unload(force=False)
    await trio.sleep(1000)  # longer than a ring may stand idle
    assert (ring.error, world.events) == (None, [])


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


async def test_l1_all_drains_of_a_ring_end_with_its_last_reply(world: World, autojump_clock: object) -> None:
    """Two people unload it."""
    old = await world.ready("old")
    streams = [old.open(RequestId(name), {}) for name in ("r", "s")]
    began, ended = trio.current_time(), list[float]()

    async def unload() -> None:
        await old.unload(force=False)
        ended.append(trio.current_time() - began)

    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(unload)
            await trio.sleep(1)
        old.close(streams.pop())
        await trio.sleep(1)
        assert old.requests, "a reply runs on"
        old.close(streams.pop())
    assert ended == [3 + UNLOAD_TAKES_S] * 2


async def test_l1_a_drain_does_not_wait_for_replies_that_have_failed(world: World, autojump_clock: object) -> None:
    """Their clients may take their time to read that; a reply after them is one to wait for."""
    old = await world.ready("old")
    old.open(RequestId("failed"), {})
    old.part_from(0)
    began = trio.current_time()
    stream = old.open(RequestId("r"), {})
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(old.unload, force=False))
        await trio.sleep(2)
        old.feed(LOST)
    assert stream.ended
    assert trio.current_time() - began == 2 + UNLOAD_TAKES_S


@pytest.mark.parametrize("world", [{"max_loaded_models": 2}], indirect=True)
async def test_l2_two_models_on_a_peer_where_two_are_allowed_in_the_memory_that_is_left(
    world: World, autojump_clock: object
) -> None:
    old = await world.ready("old")
    taken = int(old.plan.stages[0].price.need(old.plan.kv_tokens))
    new = await world.ready("new")
    assert old.serving
    assert {stage.peer.memory_bytes for stage in new.plan.stages} == {4 * GIB - taken}


LOST = StageDown(1, "stage_lost", "stage 1's worker was ended by SIGKILL", gone=True)


async def test_a_lost_ring_is_loaded_again_with_its_stages_where_they_were(
    world: World, autojump_clock: object
) -> None:
    old = await world.ready("old", peers=("b", "a"), dtype="bfloat16")
    old.feed(LOST)
    error = world.restoring.error(ModelId("old"), old)
    assert error is not None
    assert "SIGKILL" in error.message
    status = world.restored("old")
    assert status is not None
    assert (status["stage"], status["waits_for"]) == (1, "its other stages to give their memory back")
    await old.over.wait()
    await trio.testing.wait_all_tasks_blocked()
    again = world.ring_of("old")
    assert again is not None
    assert (again.life.nodes, again.dtype) == (old.life.nodes, "bfloat16")
    await again.settled.wait()
    world.restoring.up(again)
    assert (again.serving, world.restored("old")) == (True, None)


async def test_without_a_place_it_says_what_it_waits_for_and_takes_nobodys(
    world: World, autojump_clock: object
) -> None:
    old = await world.ready("old")
    gone = world.members.pop(1)
    old.feed(LOST)
    await old.over.wait()
    await trio.sleep(1)
    status = world.restored("old")
    assert status is not None
    assert "2 free peers, 1 are connected" in status["waits_for"]
    assert 0 < status["next_try_s"] <= 30
    one = await world.ready("new", num_stages=1)
    world.members.append(gone)
    world.restoring.room_changed()
    await trio.sleep(60)
    assert one.serving, "it is not evicted for what nobody asked for"
    assert "old" not in {ring.model for ring in world.rings.values()}
    await one.unload(force=True)
    await trio.sleep(1)
    assert {ring.model for ring in world.rings.values()} == {"old"}
    assert world.events.count(("ring_waits", "old")) == 2, "once for each thing that it waited for"


@pytest.mark.parametrize("when", ["while it runs", "while it waits"])
async def test_a_removed_peer_that_was_named_is_not_waited_for(world: World, autojump_clock: object, when: str) -> None:
    old = await world.ready("old", peers=("a", "b"))
    world.members[1] = member("c")
    if when == "while it runs":
        world.restoring.drop_peers({"id-of-b", "b"})
        world.restoring.up(old)  # said again
    old.feed(LOST)
    await old.over.wait()
    await trio.sleep(1)
    if when == "while it waits":
        status = world.restored("old")
        assert status is not None
        assert "no peer is called 'b'" in status["waits_for"]
        world.restoring.drop_peers({"id-of-z", "z"})
        world.restoring.drop_peers({"id-of-b", "b"})
        await trio.sleep(1)
    again = world.ring_of("old")
    assert again is not None
    assert (again.serving, again.life.nodes) == (True, ("id-of-a", "id-of-c"))
    assert world.events.count(("ring_peers_dropped", "old")) == 1
    world.restoring.up(again)
    assert [(r["peers"], r["num_stages"]) for r in world.restoring.records(())] == [([], 2)]


async def test_loads_that_fail_are_tried_later_and_later(world: World, autojump_clock: object) -> None:
    old = await world.ready("old")
    world.broken = True
    old.feed(LOST)
    await old.over.wait()
    await trio.sleep(100)
    began = sorted({at for at, kind, _ in world.told if kind == "load"})
    assert [round(later - at) for at, later in pairwise(began[1:])] == [5, 10, 20, 40]
    status = world.restored("old")
    assert status is not None
    assert ("its disk is full" in status["waits_for"], status["failures"]) == (True, 5)
    world.broken = False
    await trio.sleep(80)
    again = world.ring_of("old")
    assert again is not None
    assert again.serving


async def test_rings_that_are_lost_one_after_another_are_no_failed_loads(world: World, autojump_clock: object) -> None:
    ring = await world.ready("old")
    for _ in range(3):
        ring.feed(LOST)
        await ring.over.wait()
        status = world.restored("old")
        assert status is not None
        assert status["failures"] == 0
        await trio.sleep(20)  # the pause, and no steady run
        found = world.ring_of("old")
        assert found is not None
        ring = found
        world.restoring.up(ring)


@pytest.mark.parametrize("meanwhile", ["nothing", "asked for", "let go", "asked for and lost"])
async def test_a_lost_model_is_looked_at_before_it_is_loaded_and_loaded_once(
    world: World, autojump_clock: object, meanwhile: str
) -> None:
    old = await world.ready("old", num_stages=2)
    world.look_s = 30.0
    old.feed(StageDown(0, "stage_lost", "killed", gone=True))
    await old.over.wait()
    await trio.sleep(10.0)
    assert world.ring_of("old") is None, "it is being looked at"
    if meanwhile == "let go":
        world.restoring.forget(ModelId("old"))
    elif meanwhile != "nothing":
        asked = await world.ready("old", num_stages=2)
        if meanwhile == "asked for and lost":
            asked.feed(StageDown(0, "stage_lost", "killed", gone=True))
    await trio.sleep(100.0)
    assert [ring.model for ring in world.rings.values()] == ([] if meanwhile == "let go" else ["old"])
    assert len(world.at("load")) == {"nothing": 4, "asked for": 4, "let go": 2, "asked for and lost": 6}[meanwhile]


async def test_a_first_load_that_fails_is_not_tried_again(world: World, autojump_clock: object) -> None:
    world.broken = True
    ring = world.load("old")
    assert [record["model"] for record in world.restoring.records(())] == ["old"], "while it is under way"
    await ring.over.wait()
    assert world.restoring.records(()) == []
    await trio.sleep(1000)
    assert len(world.at("load")) == 2
    assert world.restored("old") is None


@pytest.mark.parametrize("how", ["unload", "idle", "evict"])
async def test_what_goes_without_a_fault_is_let_go(world: World, autojump_clock: object, how: str) -> None:
    old = await world.ready("old")
    assert [record["model"] for record in world.restoring.records(())] == ["old"]
    match how:
        case "unload":
            await old.unload(force=True)
        case "idle":
            await trio.sleep(1000)
        case _:
            await world.ready("new")
    await old.over.wait()
    await trio.sleep(1000)
    assert world.ring_of("old") is None
    assert "old" not in [record["model"] for record in world.restoring.records(())]


async def test_what_was_written_down_is_loaded_with_the_same_options(world: World, autojump_clock: object) -> None:
    old = await world.ready("old", peers=("b", "a"), dtype="bfloat16", quantization="none")
    records = json.loads(json.dumps(world.restoring.records(())))
    asked: list[tuple[str, LoadOptions]] = []

    def load(model: str, options: LoadOptions) -> LoadedRing:
        asked.append((model, options))
        raise LoadRefused("nobody is here")

    later = Restoring(world.look, load, lambda _event, _values: None)
    later.remember([{"model": "damaged"}, *records])
    world.nursery.start_soon(later.run)
    await trio.sleep(11)
    options = LoadOptions(peers=("b", "a"), dtype="bfloat16", quantization="none", prefer=old.life.nodes)
    assert asked == [("old", options)]
    status = later.status(ModelId("old"), None)
    assert status is not None
    assert status["waits_for"] == "nobody is here"
    assert later.records(()) == records
    later.forget(ModelId("old"))
    await trio.sleep(100)
    assert (len(asked), later.records(())) == (1, [])
