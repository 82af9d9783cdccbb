"""The relay with real TLS and real sockets: two nodes that only reach the coordinator, and what it sees of them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from channel_handlers import echo
from credentials import Node, Swarm

from swarmnode.errors import LinkBroken, ProtocolError
from swarmnode.ids import NodeId, RingId
from swarmnode.roles import relay as relay_module
from swarmnode.roles.relay import Relay
from swarmnode.wire.address import Address
from swarmnode.wire.connection import DirectChannel
from swarmnode.wire.direct import DirectTransport
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import LinkOptions, Parameters
from swarmnode.wire.traffic import Traffic
from swarmnode.wire.tunnel import TunnelStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from swarmnode.wire.link import Channel, Hello

STALLED_FRAMES = 100
"""Of 1 MiB: more than all the queues between two ends hold."""
LANE = LinkOptions(Parameters(RingId("r1"), (1, 0), "act", 0))


class Home:
    """A coordinator with a relay, and peers behind a NAT: what they are told comes by `offers`."""

    def __init__(self, folder: Path) -> None:
        swarm = Swarm(folder)
        self.coordinator = swarm.node("coordinator", ("coordinator",))
        self.attic, self.cellar, self.shed = (swarm.node(name) for name in ("attic", "cellar", "shed"))
        self.traffic = Traffic()
        self.offers: dict[NodeId, list[str]] = {self.cellar.node: []}
        self.relay = Relay(self._tell, self.traffic)
        self.address = Address("127.0.0.1", 0)
        self.seen = b""
        self._offered = trio.Event()

    def _tell(self, node: NodeId, frame: Frame) -> bool:
        if node not in self.offers:
            return False
        self.offers[node].append(frame.header["call"])
        self._offered.set()
        self._offered = trio.Event()
        return True

    async def offered(self) -> str:
        """The call that the cellar is told of next."""
        while not self.offers[self.cellar.node]:
            await self._offered.wait()
        return self.offers[self.cellar.node].pop(0)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[trio.Nursery]:
        async with trio.open_nursery() as nursery:
            transport = DirectTransport(self.coordinator.tls())
            self.address = await nursery.start(transport.listen, self.address, self._serve, self.coordinator.identity)
            yield nursery
            nursery.cancel_scope.cancel()

    async def _serve(self, kind: str, hello: Hello, channel: Channel) -> None:
        assert kind == "relay"
        await self.relay.serve(hello, channel)

    @asynccontextmanager
    async def call(self, caller: Node, callee: NodeId, options: LinkOptions = LANE) -> AsyncIterator[TunnelStream]:
        transport = DirectTransport(caller.tls())
        async with transport.dial(self.address, "relay", caller.identity, options) as channel:
            await channel.send(Frame("relay_call", {"to": callee}))
            yield TunnelStream(channel)

    @asynccontextmanager
    async def lane(self) -> AsyncIterator[Channel]:
        """From the attic through the relay to the cellar, each of whom has proved itself to the other."""
        async with (
            self.call(self.attic, self.cellar.node) as tunnel,
            DirectTransport(self.attic.tls()).connect_over(tunnel, self.attic.identity, LANE) as link,
            link.open("steps") as channel,
        ):
            yield channel

    async def answer(self, node: Node, serve: object) -> None:
        """As the node that is offered a call: take it, and serve its stream as an accepted connection."""
        call = await self.offered()
        transport = DirectTransport(node.tls())
        async with trio.open_nursery() as nursery:
            await nursery.start(transport.listen, Address("127.0.0.1", 0), serve, node.identity)
            async with transport.dial(self.address, "relay", node.identity) as channel:
                await channel.send(Frame("relay_answer", {"call": call}))
                await transport.accept(TunnelStream(channel), "relay")
            nursery.cancel_scope.cancel()


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


async def test_frames_cross_the_relay_between_nodes_that_prove_themselves_to_each_other(home: Home) -> None:
    async with home.running() as nursery:
        nursery.start_soon(home.answer, home.cellar, echo)
        async with home.lane() as channel:
            assert channel.certified is not None
            assert channel.certified.node == home.cellar.node
            for body in (b"x", b"y" * 3_000_000):
                await channel.send(Frame("data", {"offset": 0}, body[: 1 << 20]))
                assert (await channel.receive()).body == body[: 1 << 20]


async def test_the_relay_counts_frames_and_bytes_of_a_lane(home: Home) -> None:
    async with home.running() as nursery:
        nursery.start_soon(home.answer, home.cellar, echo)
        async with home.lane() as channel:
            for _ in range(20):
                await channel.send(Frame("data", {"offset": 0}, b"z" * 10_000))
                await channel.receive()
    (row,) = home.traffic.snapshot()
    assert (row["kind"], row["ring"], row["lane"]) == ("relayed", "r1", "act")
    assert row["frames_out"] == 21  # the hello, and those
    assert row["frames_in"] == 21  # the welcome, and the echoes
    assert 200_000 < int(row["bytes_out"]) < 220_000


async def test_the_relay_cannot_read_what_it_hands_on(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    handed_on: list[bytes] = []

    async def noting(source: Channel, target: Channel, *rest: object) -> None:
        async for frame in source:
            handed_on.append(bytes(frame.body))
            await target.send(frame)

    monkeypatch.setattr(relay_module, "_hand_on", noting)
    async with home.running() as nursery:
        nursery.start_soon(home.answer, home.cellar, echo)
        async with home.lane() as channel:
            await channel.send(Frame("data", {"offset": 0}, b"a secret prompt"))
            await channel.receive()
        nursery.cancel_scope.cancel()
    assert len(b"".join(handed_on)) > 1000
    assert b"secret" not in b"".join(handed_on)


def stuck(channel: Channel) -> bool:
    """Whether its queue is full, and the other end has no room that it did not use: only a reader changes that."""
    assert isinstance(channel, DirectChannel)
    return channel._full and not channel._connection.session._h2.local_flow_control_window(channel._id)


async def test_a_reader_that_stalls_holds_up_his_own_lane_only(home: Home) -> None:
    """And no more waits for him than queues hold: then his sender waits, too."""
    reads, sent, got = trio.Event(), list[int](), list[int]()

    async def stall(_kind: str, _hello: Hello, channel: Channel) -> None:
        await reads.wait()
        async for frame in channel:
            got.append(frame.header["offset"])

    async def send_all(channel: Channel) -> None:
        for number in range(STALLED_FRAMES):
            await channel.send(Frame("data", {"offset": number}, bytes(1 << 20)))
            sent.append(number)

    async with home.running() as nursery:
        nursery.start_soon(home.answer, home.cellar, stall)
        async with home.lane() as stalled:
            nursery.start_soon(send_all, stalled)
            with trio.fail_after(20):
                while not stuck(stalled):  # noqa: ASYNC110 - nothing tells when queues are full
                    await trio.sleep(0.01)
            await trio.testing.wait_all_tasks_blocked()  # the sender has noted what filled the queue
            before = len(sent)
            nursery.start_soon(home.answer, home.cellar, echo)
            async with home.lane() as other:
                for number in range(20):
                    await other.send(Frame("data", {"offset": number}, b"x"))
                    assert (await other.receive()).header["offset"] == number
            assert len(sent) == before < STALLED_FRAMES
            assert got == []
            reads.set()
            with trio.fail_after(20):
                while len(got) < STALLED_FRAMES:  # noqa: ASYNC110 - frames come one by one
                    await trio.sleep(0.05)
    assert got == list(range(STALLED_FRAMES))


async def test_who_is_not_connected_cannot_be_called(home: Home) -> None:
    async with home.running(), home.call(home.attic, home.shed.node) as tunnel:
        with pytest.raises(trio.BrokenResourceError, match="is not connected to the coordinator"):
            await tunnel.receive_some()


async def test_who_does_not_answer_fails_the_call(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "RELAY_ANSWER_S", 0.05)
    async with home.running(), home.call(home.attic, home.cellar.node) as tunnel:
        with pytest.raises(trio.BrokenResourceError, match="did not answer through the relay"):
            await tunnel.receive_some()


async def test_only_the_called_node_may_answer(home: Home) -> None:
    async with home.running() as nursery, home.call(home.attic, home.cellar.node):
        with pytest.raises(ProtocolError, match="nobody waits for this answer"):
            await _answer_as(home, home.shed)
        nursery.cancel_scope.cancel()


async def _answer_as(home: Home, node: Node) -> None:
    await _say(home, node, Frame("relay_answer", {"call": await home.offered()}))


async def _say(home: Home, node: Node, first: Frame) -> None:
    async with DirectTransport(node.tls()).dial(home.address, "relay", node.identity) as channel:
        await channel.send(first)
        await channel.receive()


async def test_a_node_holds_so_many_tunnels_and_no_more(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "MAX_TUNNELS_PER_NODE", 1)
    async with home.running() as nursery, home.call(home.attic, home.cellar.node):
        with pytest.raises(trio.BrokenResourceError, match="holds 1 tunnels of this node"):
            async with home.call(home.attic, home.cellar.node) as second:
                await second.receive_some()
        nursery.cancel_scope.cancel()


async def test_an_end_that_goes_away_breaks_the_other(home: Home) -> None:
    async def leaves(_kind: str, _hello: Hello, channel: Channel) -> None:
        await channel.receive()
        raise LinkBroken("the stage is gone")

    async with home.running() as nursery:
        nursery.start_soon(home.answer, home.cellar, leaves)
        async with home.lane() as channel:
            await channel.send(Frame("data", {"offset": 0}, b"x"))
            with trio.fail_after(5), pytest.raises(LinkBroken, match="the stage is gone"):
                await channel.receive()


async def test_relay_channels_begin_with_a_call_or_an_answer(home: Home) -> None:
    async with home.running():
        with pytest.raises(ProtocolError, match="not tunnel"):
            await _say(home, home.attic, Frame("tunnel", {"n": 1}, b"x"))
