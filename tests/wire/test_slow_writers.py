"""Whoever sends a byte now and then: every read of the swarm port has a deadline or a least rate, in virtual time."""

from __future__ import annotations

import ssl
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from credentials import Swarm

from swarmnode.errors import LinkBroken
from swarmnode.wire import deadlines, direct, limits
from swarmnode.wire.connection import Connection
from swarmnode.wire.frames import Frame, encode_bytes
from swarmnode.wire.handshake import _hello_frame
from swarmnode.wire.link import NO_PARAMETERS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from swarmnode.wire.connection import DirectChannel
    from swarmnode.wire.link import Channel, Hello, Identity

BIG = encode_bytes(Frame("data", {"offset": 0}, bytes(limits.MAX_CHUNK_BYTES)))


async def echo(kind: str, hello: Hello, channel: Channel) -> None:
    async for frame in channel:
        await channel.send(Frame("data", {"offset": len(frame.body)}))


@asynccontextmanager
async def linked(who: Identity) -> AsyncIterator[Connection]:
    """The dialer's side of a connection, with nothing opened."""
    near, far = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(direct.Server(echo, who).serve, far)
        connection = Connection(near, client=True)
        nursery.start_soon(connection.run)
        yield connection
        nursery.cancel_scope.cancel()


async def drip(connection: Connection, channel: DirectChannel, data: bytes, at_once: int, every_s: float) -> None:
    """Send `data` in small parts; ends early where the channel does."""
    with suppress(LinkBroken):
        for start in range(0, len(data), at_once):
            connection.session.send(channel._id, data[start : start + at_once])
            connection.wake_writer()
            await trio.sleep(every_s)


@pytest.mark.parametrize("kind", ["control", "steps", "files"])
async def test_a_frame_must_not_come_byte_by_byte(attic: Identity, kind: str, autojump_clock: object) -> None:
    """Its channel ends and is told why; another one on the same connection goes on."""
    async with linked(attic) as connection, trio.open_nursery() as nursery:
        slow, other = connection.open_channel(kind), connection.open_channel(kind)
        await direct.greet(slow, attic)
        await direct.greet(other, attic)
        began_s = trio.current_time()
        nursery.start_soon(drip, connection, slow, BIG, 1, 1.0)
        with pytest.raises(LinkBroken, match="a frame stopped coming"):
            await slow.receive()
        assert trio.current_time() - began_s == pytest.approx(deadlines.FRAME_S, abs=2)
        await other.send(Frame("data", {"offset": 0}, b"four"))
        assert (await other.receive()).header["offset"] == 4
        nursery.cancel_scope.cancel()


async def test_a_frame_that_stops_in_the_middle(attic: Identity, autojump_clock: object) -> None:
    async with linked(attic) as connection:
        channel = connection.open_channel("files")
        await direct.greet(channel, attic)
        connection.session.send(channel._id, BIG[: len(BIG) // 2])
        connection.wake_writer()
        began_s = trio.current_time()
        with pytest.raises(LinkBroken, match="a frame stopped coming"):
            await channel.receive()
        assert trio.current_time() - began_s == pytest.approx(deadlines.FRAME_S, abs=2)


async def test_a_slow_line_brings_its_frame(attic: Identity, autojump_clock: object) -> None:
    """At a little more than the least rate, a frame of 1 MiB takes a quarter of an hour."""
    async with linked(attic) as connection, trio.open_nursery() as nursery:
        channel = connection.open_channel("files")
        await direct.greet(channel, attic)
        began_s = trio.current_time()
        nursery.start_soon(drip, connection, channel, BIG, limits.SLOWEST_FRAME_BYTES // 8, deadlines.FRAME_S / 9)
        assert (await channel.receive()).header["offset"] == limits.MAX_CHUNK_BYTES
        assert trio.current_time() - began_s > 10 * deadlines.FRAME_S


async def test_silence_between_frames_is_no_slowness(attic: Identity, autojump_clock: object) -> None:
    async with linked(attic) as connection:
        channel = connection.open_channel("control")
        await direct.greet(channel, attic)
        for size in (3, 5):
            await trio.sleep(24 * 3600)
            await channel.send(Frame("data", {"offset": 0}, bytes(size)))
            assert (await channel.receive()).header["offset"] == size


async def test_hello_byte_by_byte_has_hello_s_in_all(attic: Identity, autojump_clock: object) -> None:
    async with linked(attic) as connection, trio.open_nursery() as nursery:
        channel = connection.open_channel("control")
        began_s = trio.current_time()
        hello = encode_bytes(_hello_frame(attic, NO_PARAMETERS))
        nursery.start_soon(drip, connection, channel, hello, 1, 1.0)
        with pytest.raises(LinkBroken, match="no HELLO within 5 s"):
            await channel.receive()
        assert trio.current_time() - began_s == pytest.approx(deadlines.HELLO_S, abs=0.1)
        nursery.cancel_scope.cancel()


async def test_a_preface_byte_by_byte_ends_with_hello_s(attic: Identity, autojump_clock: object) -> None:
    near, far = trio.testing.memory_stream_pair()
    ended = trio.Event()

    async def serve() -> None:
        await direct.Server(echo, attic).serve(far)
        ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        began_s = trio.current_time()
        with suppress(trio.BrokenResourceError):
            for byte in b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n":
                await near.send_all(bytes([byte]))
                await trio.sleep(1)
        await ended.wait()
        assert trio.current_time() - began_s <= deadlines.HELLO_S + deadlines.CHANNEL_CLOSE_S + 1
        nursery.cancel_scope.cancel()


async def test_a_tls_handshake_byte_by_byte_has_tls_s_in_all(tmp_path: Path, autojump_clock: object) -> None:
    house = Swarm(tmp_path).node("house", ("coordinator",))
    near, far = trio.testing.memory_stream_pair()
    outgoing = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()

    async def trickle() -> None:
        with suppress(trio.BrokenResourceError):
            for byte in outgoing.read():
                await near.send_all(bytes([byte]))
                await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trickle)
        began_s = trio.current_time()
        with pytest.raises(LinkBroken, match="no TLS handshake within"):
            await house.tls().secure_accepted(far)
        assert trio.current_time() - began_s == pytest.approx(deadlines.TLS_S)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("waits", ["send", "flush"])
async def test_whoever_waits_for_room_hears_at_once_that_its_channel_was_given_up(
    attic: Identity, waits: str, autojump_clock: object
) -> None:
    """The other machine reads nothing, so nothing is written that would wake it."""
    near, far = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(direct.Server(echo, attic).serve, far)
        connection = Connection(near, client=True)
        nursery.start_soon(connection.run)
        channel = connection.open_channel("files")
        await direct.greet(channel, attic)
        near.send_stream.send_all_hook = trio.sleep_forever
        began_s = trio.current_time()

        async def give_up() -> None:
            await trio.sleep(1)
            channel.abort()

        nursery.start_soon(give_up)
        with pytest.raises(LinkBroken):
            await pour(channel, flush=waits == "flush")
        assert trio.current_time() - began_s == pytest.approx(1)
        nursery.cancel_scope.cancel()


async def pour(channel: DirectChannel, *, flush: bool) -> None:
    while True:
        await channel.send(Frame("data", {"offset": 0}, bytes(limits.MAX_CHUNK_BYTES)))
        if flush:
            await channel.flush()
