"""Attacks on a live swarm port, over TLS: the attacker is told to calm down or cut off, and another client goes on."""

from __future__ import annotations

import ssl
import struct
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import h2.config
import h2.connection
import h2.events
import hyperframe.frame as hf
import msgpack
import pytest
import trio
import trio.testing
from channel_handlers import echo
from credentials import Node, Swarm

from swarmnode.errors import LinkBroken, Overloaded, ProtocolError
from swarmnode.wire import deadlines, direct, limits
from swarmnode.wire.address import Address
from swarmnode.wire.connection import Connection
from swarmnode.wire.crowd import BURST, MAX_SOURCES, Strikes
from swarmnode.wire.direct import DirectTransport
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import CHANNEL_KINDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    Flood = Callable[[h2.connection.H2Connection, str], bytes]
    from pathlib import Path

    from swarmnode.wire.link import Channel, Hello, Identity

ENHANCE_YOUR_CALM = 0xB
BATCH, BATCHES = 50, 100
"""Frames at a time, and how often: a pause between two lets the GOAWAY arrive before the reset that follows more."""
PAUSE_S = 0.01
END_S = 10.0


class Port:
    """A coordinator's swarm port, with a friend who keeps talking to it."""

    def __init__(self, swarm: Swarm, address: Address, friend: Channel) -> None:
        self.swarm = swarm
        self.address = address
        self._friend = friend
        self._said = 0
        self.opened: list[trio.abc.AsyncResource] = []

    async def friend_goes_on(self) -> None:
        """The friend's connection, which was there before, still carries frames both ways."""
        self._said += 1
        with trio.fail_after(END_S):
            await self._friend.send(Frame("end", {"session": self._said}))
            assert (await self._friend.receive()).header["session"] == self._said

    async def attacker(self, member: Node | None) -> trio.SSLStream[trio.SocketStream]:
        """A connection of a member's, or without a certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["swarmnode/1"])
        if member is not None:
            context.load_cert_chain(member.files.certificate, member.files.key)
        raw = await trio.open_tcp_stream(self.address.host, self.address.port)
        stream = trio.SSLStream(raw, context, https_compatible=True)
        self.opened.append(stream)
        await stream.do_handshake()
        return stream


@pytest.fixture
async def port(tmp_path: Path, nursery: trio.Nursery) -> AsyncIterator[Port]:
    swarm = Swarm(tmp_path / "swarm")
    house, friend = swarm.node("house", ("coordinator", "peer")), swarm.node("friend")
    transport = DirectTransport(house.tls(enrolment=True))
    listen = partial(transport.listen, Address("127.0.0.1", 0), echo, house.identity)
    address = await nursery.start(listen)
    async with DirectTransport(friend.tls()).dial(address, "control", friend.identity) as channel:
        port = Port(swarm, address, channel)
        yield port
        for stream in port.opened:
            await trio.aclose_forcefully(stream)


def bare_client() -> h2.connection.H2Connection:
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    client.initiate_connection()
    return client


def request(path: str) -> list[tuple[str, str]]:
    return [(":method", "POST"), (":scheme", "https"), (":authority", "x"), (":path", path)]


def rapid_reset(client: h2.connection.H2Connection, path: str) -> bytes:
    stream = client.get_next_available_stream_id()
    client.send_headers(stream, request(path))
    client.reset_stream(stream)
    return client.data_to_send()


def made_reset(client: h2.connection.H2Connection, path: str) -> bytes:
    """MadeYouReset: the server must reset the stream, for the client broke its rules."""
    stream = client.get_next_available_stream_id()
    client.send_headers(stream, request(path))
    data = client.data_to_send() + hf.WindowUpdateFrame(stream, window_increment=2**31 - 1).serialize()
    client.reset_stream(stream)
    client.data_to_send()
    return data


def empty_data(client: h2.connection.H2Connection, path: str) -> bytes:
    opening = b""
    if not client.streams:
        client.send_headers(1, request(path))
        opening = client.data_to_send()
    return opening + hf.DataFrame(1).serialize()


def continuations(client: h2.connection.H2Connection, path: str) -> bytes:
    """A header block that never ends."""
    if client.state_machine.state is h2.connection.ConnectionState.IDLE:
        client.send_headers(1, request(path))  # only this client's state: the frames below are sent instead
        client.data_to_send()
        head = hf.HeadersFrame(1)
        head.data = b"\x82"
        return head.serialize()
    return hf.ContinuationFrame(1).serialize()


CALMED = {
    "reset": rapid_reset,
    "made reset": made_reset,
    "PING": lambda client, path: hf.PingFrame(0).serialize(),
    "SETTINGS": lambda client, path: hf.SettingsFrame(0).serialize(),
    "empty DATA": empty_data,
}


@pytest.mark.parametrize("member", [True, False], ids=["a member", "a stranger"])
@pytest.mark.parametrize("flood", CALMED.values(), ids=CALMED)
async def test_a_flood_is_answered_with_calm_down_and_a_friend_goes_on(port: Port, flood: Flood, member: bool) -> None:
    await port.friend_goes_on()
    code = await flooded(port, flood, member)
    assert code == ENHANCE_YOUR_CALM
    await port.friend_goes_on()


@pytest.mark.parametrize("member", [True, False], ids=["a member", "a stranger"])
async def test_continuation_frames_without_end_are_cut_off(port: Port, member: bool) -> None:
    """h2 bounds those itself, with a code of its own."""
    assert await flooded(port, continuations, member) is not None
    await port.friend_goes_on()


async def flooded(port: Port, flood: Flood, member: bool) -> int | None:
    """Send a flood until the other side hangs up; returns the code of its GOAWAY."""
    stream = await port.attacker(port.swarm.node("attacker") if member else None)
    path = "/channel/steps" if member else "/channel/join"
    client = bare_client()
    seen = bytearray()
    with trio.fail_after(END_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_collect, stream, seen, nursery.cancel_scope)
            with suppress(trio.BrokenResourceError):
                await stream.send_all(client.data_to_send())
                for _ in range(BATCHES):
                    await stream.send_all(b"".join(flood(client, path) for _ in range(BATCH)))
                    await trio.sleep(PAUSE_S)
                pytest.fail("the whole flood was taken")
    return goaway_code(bytes(seen))


async def _collect(stream: trio.abc.ReceiveStream, seen: bytearray, scope: trio.CancelScope) -> None:
    with suppress(trio.BrokenResourceError):
        while data := await stream.receive_some(65_536):
            seen += data
    scope.cancel()


def goaway_code(data: bytes) -> int | None:
    """The code of the first GOAWAY among HTTP/2 frames."""
    while len(data) >= 9:
        length, kind = int.from_bytes(data[:3], "big"), data[3]
        if kind == 0x7:
            return int(struct.unpack(">I", data[13:17])[0])
        data = data[9 + length :]
    return None


async def test_handshakes_for_nothing_are_counted_before_they_cost_anything(port: Port) -> None:
    """Whoever comes back without end is refused at once; the friend, from the same address, is not cut off."""
    for number in range(20 * BURST):  # while they come faster than they are forgiven
        try:
            stream = await port.attacker(None)
        except (trio.BrokenResourceError, OSError):
            assert number >= BURST
            break
        await trio.aclose_forcefully(stream)
    else:
        pytest.fail("nothing was refused")
    await port.friend_goes_on()


def test_strikes_are_per_source_and_forgiven() -> None:
    strikes = Strikes()
    for _ in range(BURST):
        strikes.count("a", 0.0)
    with pytest.raises(Overloaded):
        strikes.count("a", 0.0)
    strikes.count("b", 0.0)
    strikes.count("a", 1.0)
    for _ in range(10 * BURST):
        strikes.count("c", 0.0)
        strikes.forgive("c")
    for number in range(2 * MAX_SOURCES):
        strikes.count(str(number), 0.0)
    assert len(strikes._budgets) == MAX_SOURCES


# -- frames


GROUP = {"k": "group", "sessions": [1], "gens": [0], "poss": [0], "ns": [1], "dtype": "float32"}


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


def tensor(shape: list[int], claimed: int, body: bytes) -> bytes:
    return framed(msgpack.packb({**GROUP, "shape": shape, "bytes": claimed}) + body)


BAD_FRAMES = {
    "length beyond all limits": (2**32 - 1).to_bytes(4, "big"),
    "no length": bytes(4),
    "map of four billion entries": framed(b"\xdf\xff\xff\xff\xff\xa1k"),
    "text of four gigabytes": framed(b"\x81\xa1k\xdb\xff\xff\xff\xff"),
    "nested 10,000 deep": framed(b"\x81\xa1k" + b"\x91" * 10_000),
    "extension type": framed(b"\x81\xa1k\xc7\x01\x05x"),
    "number as key": framed(msgpack.packb({1: 2})),
    "tensor larger than its body": tensor([4, 4], 64, b"1234"),
    "tensor smaller than its body": tensor([1, 1], 4, bytes(64)),
    "tensor that claims other bytes than its shape": tensor([4, 4], 4, bytes(4)),
    "tensor whose shape overflows": tensor([2**24] * 4, 4, bytes(4)),
    "tensor with a dimension of zero": tensor([0, 4], 4, bytes(4)),
    "tensor with a negative dimension": tensor([-1, -1], 4, bytes(4)),
    "tensor of rank 5": tensor([1] * 5, 4, bytes(4)),
}


@pytest.mark.parametrize("data", BAD_FRAMES.values(), ids=BAD_FRAMES)
async def test_a_frame_that_lies_ends_its_channel_only(port: Port, data: bytes) -> None:
    """The liar is told why; its other channels on that connection and everybody else go on."""
    liar = port.swarm.node("liar")
    async with linked(port, liar) as (connection, channel):
        second = connection.open_channel("steps")
        await direct.greet(second, liar.identity)
        connection.session.send(channel._id, data)
        connection.wake_writer()
        with trio.fail_after(END_S), pytest.raises(ProtocolError):
            await channel.receive()
        await second.send(Frame("end", {"session": 9}))
        with trio.fail_after(END_S):
            assert (await second.receive()).header["session"] == 9
    await port.friend_goes_on()


@asynccontextmanager
async def linked(port: Port, member: Node) -> AsyncIterator[tuple[Connection, Channel]]:
    """A member's connection with a channel that is up, to misbehave on."""
    stream = await port.attacker(member)
    async with trio.open_nursery() as nursery:
        connection = Connection(stream, client=True)
        nursery.start_soon(connection.run)
        channel = connection.open_channel("steps")
        await direct.greet(channel, member.identity)
        yield connection, channel
        nursery.cancel_scope.cancel()


async def test_more_channels_than_allowed_are_refused_by_the_connection(port: Port) -> None:
    async with linked(port, port.swarm.node("greedy")) as (connection, _):
        for _ in range(limits.MAX_CHANNELS - 1):
            connection.open_channel("steps")
        with pytest.raises(Overloaded):
            connection.open_channel("steps")
    await port.friend_goes_on()


# -- whoever does not talk, and whoever does not read


async def test_many_idle_members_do_not_keep_a_friend_out(port: Port) -> None:
    """Members have no crowd to wait in: silence of theirs costs a socket until HELLO_S, and nobody a place."""
    member = port.swarm.node("idle")
    for _ in range(40):
        await port.attacker(member)
    await port.friend_goes_on()
    other = port.swarm.node("newcomer")
    with trio.fail_after(END_S):
        async with DirectTransport(other.tls()).dial(port.address, "control", other.identity) as channel:
            await channel.send(Frame("end", {"session": 1}))
            await channel.receive()


@pytest.mark.parametrize("kind", CHANNEL_KINDS)
async def test_a_connection_that_is_not_read_is_broken_off(attic: Identity, kind: str, autojump_clock: object) -> None:
    """The sender's task is not held for ever, and no more piles up than the send queue takes."""
    near, far = trio.testing.memory_stream_pair()
    failed: list[str] = []
    over = trio.Event()
    sent = 0

    async def pour(_kind: str, _hello: Hello, channel: Channel) -> None:
        nonlocal sent
        await trio.testing.wait_all_tasks_blocked()  # WELCOME is out
        far.send_stream.send_all_hook = trio.sleep_forever  # from now on nothing more is read over there
        try:
            while True:
                await channel.send(Frame("data", {"offset": 0}, bytes(limits.MAX_CHUNK_BYTES)))
                sent += limits.MAX_CHUNK_BYTES
        except LinkBroken as error:
            failed.append(error.message)
            over.set()
            raise

    began_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(direct.Server(pour, attic).serve, far)
        connection = Connection(near, client=True)
        nursery.start_soon(connection.run)
        await direct.greet(connection.open_channel(kind), attic)
        await over.wait()
        nursery.cancel_scope.cancel()
    assert failed == [f"the peer did not read for {deadlines.WRITE_S:g} s"]
    assert trio.current_time() - began_s <= deadlines.WRITE_S + 2
    assert sent <= limits.SEND_QUEUE_BYTES + limits.WRITE_BYTES + limits.MAX_CHUNK_BYTES


async def test_a_slow_reader_that_does_read_is_served(attic: Identity, autojump_clock: object) -> None:
    """17 KB/s: a write just within its deadline is no attack."""
    near, far = trio.testing.memory_stream_pair()
    real = far.send_stream.send_all_hook

    async def slow() -> None:
        await trio.sleep(deadlines.WRITE_S - 1)
        if real is not None:
            await real()

    async def pour(_kind: str, _hello: Hello, channel: Channel) -> None:
        await trio.testing.wait_all_tasks_blocked()
        far.send_stream.send_all_hook = slow
        for number in range(5):
            await channel.send(Frame("data", {"offset": number}, bytes(limits.MAX_CHUNK_BYTES)))
        await trio.sleep_forever()  # to return would leave the rest two seconds

    async with trio.open_nursery() as nursery:
        nursery.start_soon(direct.Server(pour, attic).serve, far)
        connection = Connection(near, client=True)
        nursery.start_soon(connection.run)
        channel = connection.open_channel("files")
        await direct.greet(channel, attic)
        for number in range(2):
            assert (await channel.receive()).header["offset"] == number
        nursery.cancel_scope.cancel()


# -- whoever opens without end


async def test_a_greedy_member_has_no_more_connections_than_any_other(port: Port) -> None:
    """Beyond them it is told why, and places that it gives back are there again; others do not notice."""
    greedy, other = port.swarm.node("greedy"), port.swarm.node("other")
    transport = DirectTransport(greedy.tls())
    async with trio.open_nursery() as nursery:
        hold = partial(nursery.start, _hold, transport, port.address, greedy.identity)
        held: list[trio.CancelScope] = [await hold() for _ in range(limits.MAX_MEMBER_CONNECTIONS)]
        with pytest.raises(LinkBroken, match="it has 64 connections there"):
            async with transport.dial(port.address, "control", greedy.identity):
                pytest.fail("one connection too many")
        async with DirectTransport(other.tls()).dial(port.address, "control", other.identity):
            await port.friend_goes_on()
        held.pop().cancel()
        with trio.fail_after(END_S):
            while True:
                with suppress(LinkBroken):
                    async with transport.dial(port.address, "control", greedy.identity):
                        break
        nursery.cancel_scope.cancel()


async def _hold(
    transport: DirectTransport, address: Address, who: Identity, *, task_status: trio.TaskStatus[trio.CancelScope]
) -> None:
    with trio.CancelScope() as scope:
        async with transport.dial(address, "control", who):
            task_status.started(scope)
            await trio.sleep_forever()


async def test_a_member_that_ignores_the_number_of_channels_is_refused_more(port: Port) -> None:
    """It never acknowledged our settings, so HTTP/2 itself does not hold it to them."""
    stream = await port.attacker(port.swarm.node("greedy"))
    client, statuses = bare_client(), []
    await stream.send_all(client.data_to_send())
    for _ in range(limits.MAX_CHANNELS + 2):
        client.send_headers(client.get_next_available_stream_id(), request("/channel/api"))
    await stream.send_all(client.data_to_send())
    with trio.fail_after(END_S):
        while len(statuses) < limits.MAX_CHANNELS + 2:
            events = client.receive_data(await stream.receive_some(65_536))
            answers = [event for event in events if isinstance(event, h2.events.ResponseReceived)]
            statuses += [dict(answer.headers)[b":status"] for answer in answers]
    assert statuses == [b"200"] * limits.MAX_CHANNELS + [b"429"] * 2
    await port.friend_goes_on()


# -- what TLS must not do, and handshakes that are never finished


async def test_no_connection_is_resumed(port: Port) -> None:
    """A ticket would let whoever was removed in without a certificate."""
    stream = await port.attacker(port.swarm.node("attic"))
    await stream.send_all(bare_client().data_to_send())
    assert await stream.receive_some(65_536)
    assert stream.session is None or not stream.session.has_ticket


async def test_a_source_holds_no_more_unfinished_handshakes_than_its_share(port: Port) -> None:
    silent = [await trio.open_tcp_stream(port.address.host, port.address.port) for _ in range(64)]
    with trio.fail_after(END_S), pytest.raises((trio.BrokenResourceError, OSError)):
        await port.attacker(port.swarm.node("attic"))
    await port.friend_goes_on()
    for stream in silent:
        await trio.aclose_forcefully(stream)
    with trio.fail_after(END_S):
        while True:
            with suppress(trio.BrokenResourceError, OSError):
                await port.attacker(port.swarm.node("den"))
                break


async def test_a_network_of_ipv6_is_one_source(tmp_path: Path, nursery: trio.Nursery) -> None:
    """Every machine in it can have as many addresses as it likes."""
    house = Swarm(tmp_path / "swarm").node("house", ("coordinator", "peer"))
    transport = DirectTransport(house.tls(enrolment=True))
    await nursery.start(partial(transport.listen, Address("127.0.0.1", 0), echo, house.identity))
    for number in range(BURST + 1):
        near, far = trio.testing.memory_stream_pair()
        await near.aclose()
        await transport.accept(far, f"2001:db8::{number:x}")
    strikes = transport._crowds.strikes
    assert list(strikes._budgets) == ["2001:db8::/64"]
    with pytest.raises(Overloaded):
        strikes.count("2001:db8::/64", trio.current_time())
    nursery.cancel_scope.cancel()
