"""Loads that were answered before they were up: what is on disk of them by then, and who finishes them."""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import trio
from contexts import node_context
from kept_alone import KeptAlone

from swarmnode.api.backend import LoadOptions
from swarmnode.catalog.registry import Registry
from swarmnode.cluster.member_table import Heading, Row, Update
from swarmnode.cluster.membership import NodeState
from swarmnode.cluster.ring_life_messages import ProbeReturned, StageDown, StageLinked, StageReady, StageUnloaded
from swarmnode.compute.scripted_servable import write_scripted_servable
from swarmnode.config import read_settings
from swarmnode.errors import Conflict, LoadRefused, MembersAwaited, NoSpace
from swarmnode.ids import BootId, ModelId, NodeId, RingId
from swarmnode.roles import planning, rings
from swarmnode.roles.coordinator import Coordinator
from swarmnode.roles.gateway import Gateway
from swarmnode.roles.members import Member
from swarmnode.roles.reports import Beat
from swarmnode.roles.rings import KEEP_AGAIN_S
from swarmnode.roles.swarm_state import SwarmState
from swarmnode.wire.link import Identity
from swarmnode.wire.memory import MemoryNetwork

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from swarmnode.catalog.manifest import Manifest
    from swarmnode.roles.planning import FilesHere, Known
    from swarmnode.wire.frames import Frame

MODEL, PEER = "scripted", NodeId("attic")
HANGS_S = 10.0
"""A disk that answers nothing, in a test."""
CAPABILITIES = ("serve-n-stage", "serve-one-stage", "serve-concurrent", "serve-kv-budget")


class Replica(KeptAlone):
    full = False

    async def write(self, document: bytes, expected: int, voters: tuple[NodeId, ...] | None = None) -> None:
        if self.full:
            raise NoSpace("No space left on device")
        await super().write(document, expected, voters)


class House:
    """A coordinator that finds the document of the one before it, and one peer."""

    def __init__(self, folder: Path, **settings: str) -> None:
        if not (folder / "models" / MODEL).exists():
            write_scripted_servable(folder / "models", MODEL, {"default": [1]}, layers=2, stages=1)
        self.replica = Replica(folder / "swarm.json")
        self.state = SwarmState(self.replica)
        context = node_context(
            Identity(NodeId("house"), BootId("h"), "house"), MemoryNetwork(), read_settings(folder, environ=settings)
        )
        enrolment: Any = SimpleNamespace(nodes=())
        self.coordinator = Coordinator(context, Registry(folder / "models"), enrolment, self.state)
        self.gateway = Gateway(self.coordinator)
        self.loads = False
        """Whether the peer does what it is told to load; otherwise it takes for ever."""
        self.sent: list[str] = []
        """What the peer was told, by kind."""
        self.deaf = False
        """Whether the peer does nothing at all that it is told."""
        outbox: Any = SimpleNamespace(post=self._obey)
        identity = Identity(PEER, BootId("a"), "attic", capabilities=CAPABILITIES)
        beat = Beat(memory_bytes=4 << 30, device="cpu", threads=1, stages=[])
        self.peer = Member(identity, trio.CancelScope(), outbox=outbox, beat=beat)

    @asynccontextmanager
    async def coordinating(self, *, loads: bool = False) -> AsyncIterator[House]:
        self.loads = loads
        async with trio.open_nursery() as nursery:
            await nursery.start(self.coordinator.run)
            yield self
            nursery.cancel_scope.cancel()

    def join(self) -> None:
        self.coordinator.members[PEER] = self.peer
        self.coordinator.rings.restoring.room_changed()

    def _obey(self, frame: Frame) -> None:
        self.sent.append(frame.kind)
        if self.deaf:
            return
        ring = self.coordinator.rings.running[RingId(frame.header["ring"])]
        match frame.kind:
            case "load" if self.loads:
                ring.feed(StageReady(0, "127.0.0.1:1", 4096))
            case "link":
                ring.feed(StageLinked(0, ring.life.links))
            case "probe_ring":
                ring.feed(ProbeReturned())
            case "unload":
                ring.feed(StageUnloaded(0))

    @property
    def told(self) -> str:
        return str(self.gateway.status(MODEL)["state"])


async def test_a_load_that_was_answered_is_finished_by_the_next_coordinator(
    tmp_path: Path, writes_in_place: None, autojump_clock: object
) -> None:
    async with House(tmp_path).coordinating() as house:
        house.join()
        status = await house.gateway.load(MODEL, LoadOptions(dtype="bfloat16"))
        assert (status["state"], house.state.rings) == ("loading", ())
    async with House(tmp_path).coordinating(loads=True) as successor:
        assert successor.told == "restoring"
        successor.join()
        await trio.sleep(60)
        assert successor.told == "ready"
        (ring,) = successor.coordinator.rings.running.values()
        assert (ring.dtype, ring.epoch, len(successor.state.rings)) == ("bfloat16", 2, 1)


async def test_a_load_that_cannot_be_written_down_is_taken_back(
    tmp_path: Path, writes_in_place: None, autojump_clock: object
) -> None:
    async with House(tmp_path).coordinating() as house:
        house.join()
        house.replica.full = True
        with pytest.raises(NoSpace):
            await house.gateway.load(MODEL, LoadOptions())
        assert (house.coordinator.rings.running, house.told) == ({}, "available")


async def test_what_was_to_make_room_stays_where_the_load_cannot_be_written_down(
    tmp_path: Path, writes_in_place: None, autojump_clock: object
) -> None:
    write_scripted_servable(tmp_path / "models", "old", {"default": [1]}, layers=2, stages=1)
    async with House(tmp_path, SWARM_MAX_LOADED_MODELS="1").coordinating(loads=True) as house:
        house.join()
        await house.gateway.load("old", LoadOptions(wait=True))
        (old,) = house.coordinator.rings.running.values()
        house.replica.full = True
        with pytest.raises(NoSpace):
            await house.gateway.load(MODEL, LoadOptions())
        await trio.sleep(60)
        assert (old.serving, house.gateway.status("old")["state"], house.told) == (True, "ready", "available")
        assert house.sent.count("load") == 1, "what is taken back is not begun"
        house.replica.full = False
        await house.gateway.load(MODEL, LoadOptions(wait=True))
        assert (house.gateway.status("old")["state"], house.told) == ("available", "ready")
        assert [desired["model"] for desired in house.state.desired] == [MODEL]


async def test_a_load_that_failed_is_not_tried_by_the_next_coordinator(
    tmp_path: Path, writes_in_place: None, autojump_clock: object
) -> None:
    """Not even where its peers have not given their memory back by then."""
    async with House(tmp_path).coordinating() as house:
        house.join()
        await house.gateway.load(MODEL, LoadOptions())
        (ring,) = house.coordinator.rings.running.values()
        await trio.sleep(1)
        house.deaf = True
        ring.feed(StageDown(0, "load_failed", "out of memory"))
        await trio.sleep(1)
        assert (ring.state, ring.over.is_set(), house.state.desired) == ("failed", False, ())
    async with House(tmp_path).coordinating() as successor:
        assert successor.told == "available"


async def test_a_ring_that_is_up_is_written_down_as_soon_as_the_disk_takes_it(
    tmp_path: Path, writes_in_place: None, autojump_clock: object
) -> None:
    """Whoever coordinates next would unload it otherwise."""
    async with House(tmp_path).coordinating() as house:
        house.join()
        await house.gateway.load(MODEL, LoadOptions())
        house.replica.full = True
        (ring,) = house.coordinator.rings.running.values()
        ring.feed(StageReady(0, "127.0.0.1:1", 4096))
        await trio.sleep(2.5 * KEEP_AGAIN_S)
        assert (house.told, house.state.rings) == ("ready", ())
        house.replica.full = False
        await trio.sleep(KEEP_AGAIN_S)
        assert [record["stages"][0]["spec"]["ring"] for record in house.state.rings] == [ring.ring]


async def test_ring_epochs_go_on_where_the_coordinator_before_left_no_ring(
    tmp_path: Path, writes_in_place: None, autojump_clock: object
) -> None:
    async with House(tmp_path).coordinating() as house:
        house.join()
        for _ in range(3):
            with pytest.raises(LoadRefused):
                await house.gateway.load(MODEL, LoadOptions(num_stages=2))
        status = await house.gateway.load(MODEL, LoadOptions())
        assert status["epoch"] == 1, "a load that is refused has none"
        with pytest.raises(Conflict, match=r"scripted is loading \(ring epoch 1\); wait"):
            await house.gateway.load(MODEL, LoadOptions())
        await house.gateway.unload(MODEL, force=True)
    async with House(tmp_path).coordinating(loads=True) as successor:
        successor.join()
        assert (await successor.gateway.load(MODEL, LoadOptions(wait=True)))["epoch"] == 2
        with pytest.raises(Conflict, match=r"over 1 stages in \w+ \(ring epoch 2\); unload it first"):
            await successor.gateway.load(MODEL, LoadOptions(num_stages=2))


async def test_what_no_node_that_comes_back_can_help_is_refused_for_good(
    tmp_path: Path, writes_in_place: None, autojump_clock: object
) -> None:
    house = House(tmp_path)
    house.coordinator.enrolment.removed = lambda _: False  # type: ignore[method-assign]
    rows = (Row(NodeId("den"), "den", "", NodeState.ALIVE),)
    house.coordinator.context.known.take(Update((1, 1), 0, Heading("x"), rows), 0.0)
    async with house.coordinating():
        house.join()
        with pytest.raises(LoadRefused):
            await house.gateway.load(MODEL, LoadOptions(num_stages=99))
        with pytest.raises(MembersAwaited):
            await house.gateway.load(MODEL, LoadOptions(num_stages=2))


async def test_a_models_files_are_read_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    """The headers of a large model take as long as many tokens do: for a plan, a load, and a load by a successor."""
    threads: list[object] = []

    async def as_in_a_thread(
        work: Callable[..., object], *arguments: object, abandon_on_cancel: bool = False
    ) -> object:
        await trio.lowlevel.checkpoint()
        threads.append(work)
        try:
            return work(*arguments)
        finally:
            threads.pop()

    def examine(manifest: Manifest, files: FilesHere | None) -> Known:
        read.append(examine in threads)
        return planning.examine(manifest, files)

    read: list[bool] = []
    monkeypatch.setattr(trio.to_thread, "run_sync", as_in_a_thread)  # past a real one the clock would jump
    monkeypatch.setattr(rings, "examine", examine)
    async with House(tmp_path).coordinating() as house:
        house.join()
        await house.gateway.plan(MODEL, LoadOptions())
        await house.gateway.load(MODEL, LoadOptions())
    async with House(tmp_path).coordinating(loads=True) as successor:
        successor.join()
        await trio.sleep(60)
        assert successor.told == "ready"
    assert read == [True] * 3


async def test_files_are_read_once_for_all_plans_and_again_when_they_have_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[bool] = []

    def examine(manifest: Manifest, files: FilesHere | None) -> Known:
        read.append(files is not None)
        return planning.examine(manifest, files)

    monkeypatch.setattr(rings, "examine", examine)
    house = House(tmp_path)
    house.join()
    model_rings, registry = house.coordinator.rings, house.coordinator.registry
    here = registry.here
    for _ in range(2):
        model_rings.plan(ModelId(MODEL), LoadOptions())
    assert read == [True]
    monkeypatch.setattr(registry, "here", lambda: ())
    await model_rings.look(ModelId(MODEL))
    model_rings.plan(ModelId(MODEL), LoadOptions())
    assert read == [True], "they are elsewhere"
    monkeypatch.setattr(registry, "here", here)
    model_rings.plan(ModelId(MODEL), LoadOptions())
    assert read == [True, True]


async def test_a_coordinator_that_ends_waits_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, begun = threading.Event(), trio.Event()

    def examine(_: Manifest, __: FilesHere | None) -> Known:
        trio.from_thread.run_sync(begun.set)
        hangs.wait(HANGS_S)
        return planning.NOTHING_KNOWN

    monkeypatch.setattr(rings, "examine", examine)
    house = House(tmp_path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(house.coordinator.rings.look, ModelId(MODEL))
        await begun.wait()
        began_s = trio.current_time()
        nursery.cancel_scope.cancel()
    took_s = trio.current_time() - began_s
    hangs.set()
    assert took_s < HANGS_S / 2
