"""What a coordinator takes for life: whatever a member's process sends on any channel, until it says goodbye."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
from beats import beat_of
from contexts import node_context

from swarmnode.catalog.registry import Registry
from swarmnode.cluster.membership import DEAD_S, NodeState
from swarmnode.cluster.node_book import NodeRecord
from swarmnode.config import read_settings
from swarmnode.errors import LinkBroken
from swarmnode.ids import BootId, NodeId
from swarmnode.roles.coordinator import LISTEN_S, Coordinator
from swarmnode.roles.gateway import Gateway
from swarmnode.wire.address import Address
from swarmnode.wire.bodies import pack_body
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import Identity
from swarmnode.wire.memory import MemoryNetwork

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from swarmnode.cluster.voter_book import Seated
    from swarmnode.wire.link import Channel

ATTIC = Identity(NodeId("a" * 32), BootId("boot of attic"), "attic", ("peer",), incarnation=1)
COPY = Identity(ATTIC.node, BootId("of a copy"), "attic", ("peer",), incarnation=2)


class EverybodysEnrolment:
    """Nobody is a stranger, and nobody was removed."""

    def __init__(self) -> None:
        self.nodes = [NodeRecord(ATTIC.node, ATTIC.name, math.inf)]
        self.founders: list[Seated] = []

    async def note_name(self, node: NodeId, name: str) -> None:
        await trio.lowlevel.checkpoint()

    def removed(self, node: NodeId) -> bool:
        return False

    def revoked(self) -> Frame:
        return Frame("revoked", {}, pack_body({"nodes": []}))

    def where(self) -> Frame:
        return Frame("places", {}, pack_body({"places": []}))


class House:
    """A coordinator on virtual time, and one member that has beaten once."""

    def __init__(self, folder: Path) -> None:
        self.network = MemoryNetwork()
        me = Identity(NodeId("house"), BootId("b"), "house", ("coordinator",))
        context = node_context(me, self.network, read_settings(folder, environ={}))
        self.coordinator = Coordinator(context, Registry(folder), cast("Any", EverybodysEnrolment()))
        self._me = me
        self.address = Address("127.0.0.1", 0)

    async def run(self, nursery: trio.Nursery) -> None:
        await nursery.start(self.coordinator.run)
        serve = self.coordinator.serve_channel
        self.address = await nursery.start(self.network.listen, self.address, serve, self._me)

    def dial(self, kind: str, identity: Identity = ATTIC) -> Any:
        return self.network.dial(self.address, kind, identity)

    def state(self) -> NodeState:
        return self.coordinator.state(ATTIC.node)


@pytest.fixture
async def house(tmp_path: Path, nursery: trio.Nursery) -> AsyncIterator[House]:
    house = House(tmp_path)
    await house.run(nursery)
    yield house
    nursery.cancel_scope.cancel()


async def ask_for_files(channel: Channel, seconds: float) -> None:
    """One piece after the other, as a node does that fetches much over a slow line."""
    wanted = {"model": "none", "path": "none", "offset": 0, "size": 1, "sha256": "0" * 64}
    for _ in range(round(seconds)):
        await channel.send(Frame("fetch", wanted))
        assert (await channel.receive()).kind == "error"
        await trio.sleep(1)


async def test_a_member_that_fetches_files_lives_while_its_beats_do_not_come(
    house: House, autojump_clock: object
) -> None:
    async with house.dial("requests"), house.dial("control") as control, house.dial("files") as files:
        await control.send(beat_of(ATTIC))
        await ask_for_files(files, 4 * DEAD_S)
        assert house.state() is NodeState.ALIVE
        await trio.sleep(DEAD_S + 2 * LISTEN_S)
        assert house.state() is NodeState.DEAD


async def test_what_another_process_of_the_identity_sends_is_no_life_of_the_member(
    house: House, autojump_clock: object
) -> None:
    async with house.dial("requests"), house.dial("control") as control, house.dial("files", COPY) as files:
        await control.send(beat_of(ATTIC))
        await ask_for_files(files, DEAD_S + 2)
        assert house.state() is NodeState.DEAD


async def test_a_member_that_says_goodbye_has_left_at_once_and_is_back_with_its_next_start(
    house: House, autojump_clock: object
) -> None:
    gateway = Gateway(house.coordinator)
    async with house.dial("requests") as requests, house.dial("control") as control:
        await control.send(beat_of(ATTIC))
        await trio.sleep(0.1)
        assert house.state() is NodeState.ALIVE
        async with house.dial("control", COPY) as of_another:
            await of_another.send(Frame("bye", {"reason": "the node was stopped"}))
            await trio.sleep(0.1)
        assert house.state() is NodeState.ALIVE
        await control.send(Frame("bye", {"reason": "the node was stopped"}))
        with pytest.raises((trio.EndOfChannel, LinkBroken)):
            await requests.receive()
    assert house.state() is NodeState.LEFT
    assert [member["state"] for member in gateway.nodes()["members"]] == ["left"]
    async with house.dial("requests", COPY):
        await trio.sleep(0.1)
        assert house.state() is NodeState.ALIVE
