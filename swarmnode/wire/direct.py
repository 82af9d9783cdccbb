"""Direct links: TCP between two nodes, HTTP/2 on it, HELLO and WELCOME on every channel."""

from __future__ import annotations

import socket
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from swarmnode.errors import LinkBroken
from swarmnode.wire.address import Address, require_loopback
from swarmnode.wire.connection import Connection, DirectChannel
from swarmnode.wire.deadlines import CONNECT_S, HELLO_S, TCP_USER_TIMEOUT_S
from swarmnode.wire.handshake import greet
from swarmnode.wire.link import CHANNEL_KINDS, NO_OPTIONS
from swarmnode.wire.nursery import open_flat_nursery
from swarmnode.wire.serving import Service, count

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from swarmnode.wire.link import Channel, ChannelHandler, Identity, LinkOptions
    from swarmnode.wire.traffic import Traffic

NOTSENT_LOWAT_BYTES = 128 << 10
"""More than this unsent in the kernel and a small frame would wait behind it where we cannot take turns."""


@asynccontextmanager
async def dial(
    address: Address,
    kind: str,
    identity: Identity,
    options: LinkOptions = NO_OPTIONS,
) -> AsyncIterator[Channel]:
    """See `link.Transport.dial`."""
    stream = await _connect(require_loopback(address))
    async with dial_over(_secure(stream), kind, identity, options) as channel:
        yield channel


@asynccontextmanager
async def dial_over(
    stream: trio.abc.Stream, kind: str, identity: Identity, options: LinkOptions = NO_OPTIONS
) -> AsyncIterator[Channel]:
    """`dial`, over a stream that is connected already."""
    async with open_flat_nursery() as nursery:
        connection = Connection(stream, client=True)
        nursery.start_soon(connection.run)
        async with connection.open_channel(kind) as channel:
            channel.welcome = await greet(channel, identity, options.parameters)
            count(channel, channel.welcome.identity, options.parameters, options.traffic)
            yield channel
        await connection.aclose()
        nursery.cancel_scope.cancel()


async def listen(
    address: Address,
    handler: ChannelHandler,
    identity: Identity,
    *,
    traffic: Traffic | None = None,
    task_status: trio.TaskStatus[Address] = trio.TASK_STATUS_IGNORED,
) -> None:
    """See `link.Transport.listen`."""
    address = require_loopback(address)
    try:
        (listener,) = await trio.open_tcp_listeners(address.port, host=address.host)
    except OSError as error:
        raise LinkBroken(f"cannot listen on {address}: {error}") from error
    server = Server(handler, identity, traffic)

    async def serve(stream: trio.SocketStream) -> None:
        _tune(stream)
        await server.serve(_secure(stream))

    async with open_flat_nursery() as nursery:
        await nursery.start(trio.serve_listeners, serve, [listener])
        task_status.started(Address(address.host, listener.socket.getsockname()[1]))


class Server:
    """The listener's side of every connection, over whatever stream."""

    def __init__(self, handler: ChannelHandler, identity: Identity, traffic: Traffic | None = None) -> None:
        self._service = Service(handler, identity, traffic)

    async def serve(self, stream: trio.abc.Stream) -> None:
        """One connection, until it ends; nothing that happens on it raises here."""
        opened = trio.Event()

        async with open_flat_nursery() as nursery:

            def on_open(channel: DirectChannel) -> None:
                opened.set()
                if channel.kind in CHANNEL_KINDS:
                    connection.accept(channel)
                    nursery.start_soon(self._service.serve, channel)
                else:
                    connection.refuse(channel, 404)

            connection = Connection(stream, client=False, on_open=on_open)
            nursery.start_soon(_close_unless, opened, connection)
            await connection.run()
            opened.set()


async def _close_unless(opened: trio.Event, connection: Connection) -> None:
    with trio.move_on_after(HELLO_S) as scope:
        await opened.wait()
    if scope.cancelled_caught:
        await connection.aclose()


async def _connect(address: Address) -> trio.SocketStream:
    try:
        with trio.fail_after(CONNECT_S):
            stream = await trio.open_tcp_stream(address.host, address.port)
    except trio.TooSlowError:
        raise LinkBroken(f"{address} did not answer within {CONNECT_S:g} s") from None
    except OSError as error:
        raise LinkBroken(f"cannot connect to {address}: {error}") from error
    _tune(stream)
    return stream


def _secure(stream: trio.abc.Stream) -> trio.abc.Stream:
    """The one place where TLS is put around a stream; until then `require_loopback` keeps links on this machine."""
    return stream


def _tune(stream: trio.SocketStream) -> None:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOTSENT_LOWAT_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(TCP_USER_TIMEOUT_S * 1000))
