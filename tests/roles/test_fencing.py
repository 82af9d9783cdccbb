"""What a coordinator's term is worth at those that it commands: nothing of one that is over is done."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
from contexts import node_context
from load_specs import one_stage_load

from swarmnode.catalog.registry import Registry
from swarmnode.catalog.store import ShardStore
from swarmnode.config import read_settings
from swarmnode.ids import BootId, NodeId
from swarmnode.roles import peer as peer_role
from swarmnode.roles.context import PeerResources
from swarmnode.roles.coordinator import Coordinator
from swarmnode.roles.identity import NodeIdentity
from swarmnode.roles.joining import PeerMembership
from swarmnode.roles.members import Member
from swarmnode.roles.peer import Peer
from swarmnode.wire.address import Address
from swarmnode.wire.bodies import pack_body
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import Identity
from swarmnode.wire.memory import MemoryNetwork

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from swarmnode.roles.load_spec import LoadSpec
    from swarmnode.wire.link import Channel, Hello

TERM, BOUND_S = 5, 10.0
SPEC = one_stage_load((), "attic")


class Stage:
    """In the place of a `StageHost`: notes what it was told."""

    phase, worker, gauges, links = "ready", None, None, ()
    told: list[str]

    def __init__(self, context: object, spec: LoadSpec, *_: object) -> None:
        self.spec = spec
        self.told.append("load")

    async def run(self) -> None:
        await trio.sleep_forever()

    def activity(self) -> None: ...

    def announce(self) -> None: ...

    def coordinator_lost(self) -> None: ...

    def unload(self) -> None:
        self.told.append("unload")

    def link(self, *_: object) -> None:
        self.told.append("link")

    def take(self, frame: Frame) -> None:
        self.told.append(frame.kind)


@dataclass
class Swarm:
    """A peer whose coordinator answers in TERM; `say` sends it a frame, `voted` is the term of the peer's own votes."""

    folder: Path
    voted: int = 0
    lost: list[str] = field(default_factory=list)
    said: list[Frame] = field(default_factory=list)
    """By the peer."""
    channels: dict[str, Channel] = field(default_factory=dict)

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        network = MemoryNetwork()
        context = replace(
            node_context(Identity(NodeId("attic"), BootId("a"), "attic"), network, read_settings(self.folder, {})),
            emit=self._emit,
        )
        house = Identity(NodeId("house"), BootId("h"), "house", term=TERM)
        async with trio.open_nursery() as nursery:
            at = await nursery.start(partial(network.listen, Address("127.0.0.1", 0), self._serve, house))
            kept = NodeIdentity.open(self.folder / "attic")
            member = PeerMembership(kept, cast("Any", None), renews=False, voted=lambda: self.voted)
            peer = Peer(context, [at], PeerResources(1 << 30, "cpu", 1), ShardStore(self.folder / "store"), member)
            nursery.start_soon(peer.run)
            await self.until(lambda: len(self.channels) == 2)
            task_status.started()

    async def _serve(self, kind: str, hello: Hello, channel: Channel) -> None:
        self.channels[kind] = channel
        async for frame in channel:
            self.said.append(frame)

    def _emit(self, event: str, values: Mapping[str, object]) -> None:
        if event == "coordinator_lost":
            self.lost.append(str(values["reason"]))

    async def until(self, holds: Any) -> None:
        with trio.fail_after(BOUND_S):
            while not holds():  # noqa: ASYNC110 - the peer's own tasks
                await trio.sleep(0.01)

    async def say(self, channel: str, frame: Frame) -> None:
        await self.channels[channel].send(frame)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the peer's stages were told."""
    Stage.told = []
    monkeypatch.setattr(peer_role, "StageHost", Stage)
    return Stage.told


def load(**term: int) -> Frame:
    return Frame("load", {**SPEC.header(), **term}, pack_body(SPEC.body()))


async def test_a_load_of_an_earlier_term_than_the_coordinators_starts_nothing(
    tmp_path: Path, told: list[str], nursery: trio.Nursery
) -> None:
    swarm = Swarm(tmp_path)
    await nursery.start(swarm.run)
    await swarm.say("requests", load(term=TERM - 1))
    await swarm.until(lambda: swarm.lost)
    assert "term 4 speaks, and term 5 has begun" in swarm.lost[0]
    assert told == []


async def test_a_coordinator_of_an_earlier_term_than_was_heard_before_is_told_nothing(
    tmp_path: Path, told: list[str], nursery: trio.Nursery
) -> None:
    NodeIdentity.open(tmp_path / "attic").keep_term(TERM + 1)
    swarm = Swarm(tmp_path)
    await nursery.start(swarm.run)
    await swarm.until(lambda: swarm.lost)
    assert "term 5 speaks, and term 6 has begun" in swarm.lost[0]
    assert swarm.said == []


HEARD = [
    ("requests", load(term=TERM)),
    ("requests", Frame("unload", {"ring": SPEC.ring, "term": TERM})),
    ("requests", Frame("link", {"ring": SPEC.ring, "term": TERM}, pack_body({"next": []}))),
    ("requests", Frame("probe_ring", {"ring": SPEC.ring, "term": TERM}, pack_body({}))),
    ("requests", Frame("open", {"ring": SPEC.ring, "request": "r"}, pack_body({}))),
    ("requests", Frame("cancel", {"request": "r"})),
    ("requests", Frame("issued", {}, pack_body({"certificate": b"none"}))),
    ("requests", Frame("seat", {}, pack_body({"certificate": b"none"}))),
    ("requests", Frame("logs", {"ask": "r"})),
    ("control", Frame("revoked", {}, pack_body({"nodes": ["cellar"]}))),
    ("control", Frame("places", {}, pack_body({"places": ["192.0.2.1:7700"]}))),
    ("control", Frame("heard", {"seq": 0, "above": 1})),
    ("control", Frame("relay_offer", {"call": "c", "source": "cellar"})),
]


@pytest.mark.parametrize(("channel", "frame"), HEARD, ids=[frame.kind for _, frame in HEARD])
async def test_what_a_coordinator_says_after_this_voter_voted_again_is_not_done(
    tmp_path: Path, told: list[str], nursery: trio.Nursery, channel: str, frame: Frame
) -> None:
    """Long before the peer has heard of a new coordinator: a lease there does not stop what is on its way."""
    swarm = Swarm(tmp_path)
    await nursery.start(swarm.run)
    await swarm.say("requests", load())
    await swarm.until(lambda: told)
    swarm.voted = TERM + 1
    incarnation = NodeIdentity.open(tmp_path / "attic").incarnation()
    await swarm.say(channel, frame)
    await swarm.until(lambda: swarm.lost)
    assert "term 5 speaks, and term 6 has begun" in swarm.lost[0]
    assert told == ["load"]
    assert not (tmp_path / "attic" / "identity" / "coordinators.json").exists()
    assert NodeIdentity.open(tmp_path / "attic").incarnation() == incarnation


@pytest.mark.parametrize("kind", ["load", "unload", "link", "probe_ring"])
def test_a_coordinators_commands_name_its_term(tmp_path: Path, kind: str) -> None:
    context = node_context(
        Identity(NodeId("house"), BootId("h"), "house"), MemoryNetwork(), read_settings(tmp_path, {})
    )
    coordinator = Coordinator(context, Registry(tmp_path), cast("Any", None), term=TERM)
    posted: list[Frame] = []
    outbox: Any = SimpleNamespace(post=posted.append)
    member = Member(Identity(NodeId("attic"), BootId("a"), "attic"), trio.CancelScope(), outbox=outbox)
    coordinator.members[member.node] = member
    coordinator.post(member.node, Frame(kind, {"ring": "r"}, b""))
    coordinator.post(member.node, Frame("open", {"ring": "r", "request": "r"}, b""))
    assert [frame.header.get("term") for frame in posted] == [TERM, None]
