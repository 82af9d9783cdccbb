"""Direct links where things go wrong: silence, bad bytes, broken connections, crowds."""

from __future__ import annotations

import errno
import os
import random
import socket
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from channel_handlers import echo

from swarmnode.errors import InvalidRequest, LinkBroken, ProtocolError, SwarmError
from swarmnode.wire import direct, limits
from swarmnode.wire.address import Address, parse_address, require_loopback
from swarmnode.wire.connection import Connection
from swarmnode.wire.deadlines import CHANNEL_CLOSE_S, CONNECT_S, HELLO_S, TCP_USER_TIMEOUT_S
from swarmnode.wire.frames import Frame, encode_bytes
from swarmnode.wire.handshake import greet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from swarmnode.wire.link import Channel, Hello, Identity

ANYWHERE = Address("127.0.0.1", 0)
PLAIN = direct.DirectTransport(None)


def raw(size: int) -> Frame:
    return Frame("data", {"offset": 0}, bytes(size))


async def serve(stream: trio.abc.Stream, who: Identity, handler: object = echo) -> None:
    await direct.Server(handler, who).serve(stream)  # type: ignore[arg-type]


@asynccontextmanager
async def client_connection(stream: trio.abc.Stream) -> AsyncIterator[Connection]:
    """A connection without the handshake, to misbehave on."""
    async with trio.open_nursery() as nursery:
        connection = Connection(stream, client=True)
        nursery.start_soon(connection.run)
        yield connection
        nursery.cancel_scope.cancel()


# -- silence


async def test_no_hello_ends_the_channel_after_the_deadline(cellar: Identity, autojump_clock: object) -> None:
    near, far = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, far, cellar)
        async with client_connection(near) as connection:
            channel = connection.open_channel("steps")
            started = trio.current_time()
            with pytest.raises(LinkBroken, match="no HELLO within 5 s"):
                await channel.receive()
            assert trio.current_time() - started == pytest.approx(HELLO_S)


async def test_a_connection_without_channels_is_closed(cellar: Identity, autojump_clock: object) -> None:
    near, far = trio.testing.memory_stream_pair()
    started = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, far, cellar)
        async with client_connection(near) as connection:
            while not connection.session.closed:
                await connection.written()
            assert HELLO_S <= trio.current_time() - started <= HELLO_S + CHANNEL_CLOSE_S
        # and `serve` returns


async def test_no_welcome_is_a_broken_link(attic: Identity, autojump_clock: object) -> None:
    near, _far = trio.testing.memory_stream_pair()
    started = trio.current_time()
    with pytest.raises(LinkBroken, match="no WELCOME within 5 s"):
        async with direct.dial_over(near, "steps", attic):
            pytest.fail("the link came up")
    assert HELLO_S <= trio.current_time() - started <= HELLO_S + CHANNEL_CLOSE_S


async def test_a_listener_that_never_accepts_is_given_up(attic: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object, **__: object) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(trio, "open_tcp_stream", never)
    monkeypatch.setattr(direct, "CONNECT_S", 0.02)
    with pytest.raises(LinkBroken, match="did not answer within"):
        async with PLAIN.dial(Address("127.0.0.1", 9), "steps", attic):
            pytest.fail("the link came up")
    assert CONNECT_S == 5


async def test_nobody_listens(attic: Identity) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = Address(*unused.getsockname())
        with pytest.raises(LinkBroken, match=f"cannot connect to {address}"):
            async with PLAIN.dial(address, "steps", attic):
                pytest.fail("the link came up")


async def test_a_peer_that_stops_reading_cannot_hold_up_the_end(attic: Identity, autojump_clock: object) -> None:
    """The memory stream never takes more: leaving must still end, within the closing deadlines."""
    near, far = trio.testing.memory_stream_pair()
    near.send_stream.send_all_hook = trio.sleep_forever
    started = trio.current_time()
    with trio.move_on_after(1000) as scope, pytest.raises(LinkBroken):
        async with direct.dial_over(near, "steps", attic):
            pytest.fail("the link came up")
    assert not scope.cancelled_caught
    assert trio.current_time() - started <= HELLO_S + 2 * CHANNEL_CLOSE_S
    await far.aclose()


# -- bad bytes

BAD_BYTES = {
    "huge frame": (limits.MAX_FRAME_BYTES + 1).to_bytes(4, "big"),
    "empty frame": bytes(4),
    "not msgpack": b"\x00\x00\x00\x02\xc1\xc1",
    "unknown kind": b"\x00\x00\x00\x08\x81\xa1k\xa4warp",
    "tensor that lies": b"\x00\x00\x00\x07\x81\xa1k\xa3end",
}


@pytest.mark.parametrize("data", BAD_BYTES.values(), ids=BAD_BYTES)
async def test_bad_frames_end_their_channel_with_the_reason(
    attic: Identity, cellar: Identity, autojump_clock: object, data: bytes
) -> None:
    near, far = trio.testing.memory_stream_pair()
    raised: list[SwarmError] = []

    async def note(kind: str, hello: Hello, channel: Channel) -> None:
        try:
            await echo(kind, hello, channel)
        except SwarmError as error:
            raised.append(error)
            raise

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, far, cellar, note)
        async with client_connection(near) as connection:
            bad, good = connection.open_channel("steps"), connection.open_channel("steps")
            for channel in (bad, good):
                await greet(channel, attic)
            connection.session.send(bad._id, data)
            connection.wake_writer()
            with pytest.raises(ProtocolError):
                await bad.receive()
            await good.send(raw(3))
            assert await good.receive() == raw(3)
    assert isinstance(raised[0], ProtocolError)


async def test_a_channel_that_ends_inside_a_frame(attic: Identity, cellar: Identity, autojump_clock: object) -> None:
    near, far = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, far, cellar)
        async with client_connection(near) as connection:
            channel = connection.open_channel("steps")
            await greet(channel, attic)
            connection.session.send(channel._id, encode_bytes(raw(100))[:50])
            connection.session.finish(channel._id)
            connection.wake_writer()
            with pytest.raises(ProtocolError, match="ended inside a frame"):
                await channel.receive()


async def test_bytes_that_are_no_http2_end_the_connection(cellar: Identity, autojump_clock: object) -> None:
    near, far = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, far, cellar)
        await near.send_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 10)
        got = b""
        while data := await near.receive_some():
            got += data
    assert got[-17 + 3] == 7  # a GOAWAY frame is the last thing said


# -- broken connections


@pytest.mark.parametrize("waiting", [1, 5])
async def test_a_broken_connection_wakes_everyone_at_once(
    attic: Identity, cellar: Identity, autojump_clock: object, waiting: int
) -> None:
    near, far = trio.testing.memory_stream_pair()
    woken: list[float] = []

    async def wait(channel: Channel) -> None:
        with pytest.raises(LinkBroken):
            await channel.receive()
        woken.append(trio.current_time())

    async def fill(channel: Channel) -> None:
        with suppress(LinkBroken):
            while True:
                await channel.send(raw(limits.MAX_CHUNK_BYTES))
        woken.append(trio.current_time())

    async def stall(kind: str, hello: Hello, channel: Channel) -> None:
        await trio.sleep(20)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, far, cellar, stall)
        async with client_connection(near) as connection:
            channels = [connection.open_channel("steps") for _ in range(2 * waiting)]
            for channel in channels:
                await greet(channel, attic)
            for number, channel in enumerate(channels):
                nursery.start_soon(wait if number % 2 else fill, channel)
            await trio.sleep(10)
            woken.clear()
            await far.aclose()
            await trio.sleep(1)
    assert len(woken) == 2 * waiting
    assert woken == pytest.approx([10.0] * 2 * waiting)


async def test_a_write_that_hangs_does_not_delay_the_news_of_a_broken_connection(
    attic: Identity, cellar: Identity, autojump_clock: object
) -> None:
    near, far = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, far, cellar)
        async with client_connection(near) as connection:
            channel = connection.open_channel("steps")
            await greet(channel, attic)
            near.send_stream.send_all_hook = trio.sleep_forever
            await channel.send(raw(1))
            await trio.sleep(10)
            await far.send_stream.aclose()
            started = trio.current_time()
            with pytest.raises(LinkBroken):
                await channel.receive()
            assert trio.current_time() == started
        await far.aclose()


async def test_the_listener_going_away_is_noticed_over_tcp(attic: Identity, cellar: Identity) -> None:
    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()

        async def listen(*, task_status: trio.TaskStatus[Address]) -> None:
            with scope:
                await PLAIN.listen(ANYWHERE, echo, cellar, task_status=task_status)

        address = await nursery.start(listen)
        async with PLAIN.dial(address, "steps", attic) as channel:
            scope.cancel()
            with trio.fail_after(5), pytest.raises(LinkBroken):
                await channel.receive()


# -- many


async def test_many_channels_on_one_connection_keep_their_order(attic: Identity, cellar: Identity) -> None:
    near, far = trio.testing.memory_stream_pair()
    rng = random.Random(7)

    async def talk(connection: Connection, sizes: list[int]) -> None:
        channel = connection.open_channel("files")
        async with channel, trio.open_nursery() as inner:
            await greet(channel, attic)

            async def send() -> None:
                for size in sizes:
                    await channel.send(raw(size))

            inner.start_soon(send)
            assert [len((await channel.receive()).body) for _ in sizes] == sizes

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, far, cellar)
        async with client_connection(near) as connection, trio.open_nursery() as talks:
            for _ in range(8):
                talks.start_soon(talk, connection, [rng.randrange(200_000) for _ in range(20)])


async def test_channels_come_and_go_without_end(attic: Identity, cellar: Identity, autojump_clock: object) -> None:
    near, far = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, far, cellar)
        async with client_connection(near) as connection:
            for number in range(300):
                async with connection.open_channel("requests") as channel:
                    await greet(channel, attic)
                    await channel.send(raw(number))
                    assert len((await channel.receive()).body) == number
                await trio.sleep(0.1)
            assert connection._channels == {}
            assert connection.session._out == {}


async def test_queued_frames_leave_in_one_write(attic: Identity, cellar: Identity, autojump_clock: object) -> None:
    near, far = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve, far, cellar)
        async with client_connection(near) as connection:
            channel = connection.open_channel("steps")
            await greet(channel, attic)
            writes = 0
            deliver = near.send_stream.send_all_hook
            assert deliver is not None

            async def count() -> None:
                nonlocal writes
                writes += 1
                await deliver()

            await trio.testing.wait_all_tasks_blocked()
            near.send_stream.send_all_hook = count
            for number in range(100):
                channel.send_nowait(Frame("end", {"session": number}))
            await channel.receive()
            assert writes == 1


async def test_frames_sent_together_are_one_write_to_a_socket(
    attic: Identity, cellar: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    got: list[int] = []

    async def handler(kind: str, hello: Hello, channel: Channel) -> None:
        got.extend([frame.header["session"] async for frame in channel])

    async with trio.open_nursery() as nursery:
        address = await nursery.start(PLAIN.listen, ANYWHERE, handler, cellar)
        async with PLAIN.dial(address, "steps", attic) as channel:
            await trio.testing.wait_all_tasks_blocked(0.05)
            writes = 0
            write = os.write

            def counted(fd: int, data: bytes) -> int:
                nonlocal writes
                writes += 1
                return write(fd, data)

            with monkeypatch.context() as patched:
                patched.setattr(os, "write", counted)
                channel.send_nowait(*(Frame("end", {"session": number}) for number in range(8)))
            assert writes == 1
        nursery.cancel_scope.cancel()
    assert got == list(range(8))


# -- sockets and addresses


async def test_sockets_are_tuned(attic: Identity, cellar: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned: list[trio.SocketStream] = []
    tune = direct._tune

    def note(stream: trio.SocketStream) -> None:
        tune(stream)
        tuned.append(stream)
        assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 128 << 10
        assert stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == TCP_USER_TIMEOUT_S * 1000

    monkeypatch.setattr(direct, "_tune", note)
    async with trio.open_nursery() as nursery:
        address = await nursery.start(partial(PLAIN.listen, ANYWHERE, echo, cellar))
        async with PLAIN.dial(address, "steps", attic):
            assert len(tuned) == 2
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "attic.lan", "127.0.0.1.evil.example"])
async def test_only_loopback_addresses_until_tls(attic: Identity, cellar: Identity, host: str) -> None:
    address = Address(host, 4000)
    with pytest.raises(InvalidRequest, match="not a loopback address"):
        await PLAIN.listen(address, echo, cellar)
    with pytest.raises(InvalidRequest, match="not a loopback address"):
        async with PLAIN.dial(address, "steps", attic):
            pytest.fail("the link came up")


async def test_an_address_in_use_is_named(cellar: Identity) -> None:
    async with trio.open_nursery() as nursery:
        address = await nursery.start(partial(PLAIN.listen, ANYWHERE, echo, cellar))
        with pytest.raises(LinkBroken, match=f"cannot listen on {address}"):
            await PLAIN.listen(address, echo, cellar)
        nursery.cancel_scope.cancel()


ADDRESSES = [("localhost:1", "localhost", 1), ("[::1]:65535", "::1", 65535), ("127.0.0.1:0", "127.0.0.1", 0)]


@pytest.mark.parametrize(("text", "host", "port"), ADDRESSES)
def test_addresses(text: str, host: str, port: int) -> None:
    assert parse_address(text) == Address(host, port)
    assert str(parse_address(text)) == text
    assert require_loopback(Address(host, port))


@pytest.mark.parametrize("text", ["", "4000", ":4000", "a:", "a:b", "a:65536", "a:-1", "::1:4000", "a:١"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_address(text)


@pytest.mark.parametrize(
    ("causes", "says"),
    [
        ([OSError(errno.ECONNREFUSED, "refused")], ["nothing listens there"]),
        ([OSError(errno.EHOSTUNREACH, "x"), OSError(errno.ENETUNREACH, "y")], ["no route to it"]),
        ([OSError(errno.ECONNREFUSED, "x"), OSError(errno.ETIMEDOUT, "y")], ["nothing listens there", "a firewall"]),
        ([socket.gaierror(-2, "unknown")], ["no machine of that name"]),
    ],
)
async def test_a_failed_connection_says_why_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch, causes: list[OSError], says: list[str]
) -> None:
    async def fail(host: str, port: int) -> trio.SocketStream:
        if len(causes) == 1:
            raise causes[0]
        raise OSError("all attempts to connect failed") from ExceptionGroup("multiple", causes)

    monkeypatch.setattr(trio, "open_tcp_stream", fail)
    with pytest.raises(LinkBroken) as raised:
        await direct.connect(Address("den", 7700))
    assert all(part in raised.value.message for part in says)
    assert "all attempts" not in raised.value.message


async def test_a_closed_port_is_said_to_be_one() -> None:
    with pytest.raises(LinkBroken, match="connection refused: nothing listens there"):
        await direct.connect(Address("127.0.0.1", 1))
