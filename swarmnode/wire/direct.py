"""Direct links: TCP between two nodes, TLS on it, HTTP/2 in it, HELLO and WELCOME on every channel."""

from __future__ import annotations

import errno
import logging
import socket
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import trio

from swarmnode.errors import LinkBroken, SwarmError
from swarmnode.wire import limits
from swarmnode.wire.address import Address, home_of, require_loopback
from swarmnode.wire.connection import NOT_FOR_IT, REMOVED, TOO_MANY, Connection, DirectChannel
from swarmnode.wire.crowd import Crowd, Strikes
from swarmnode.wire.deadlines import CONNECT_S, HELLO_S, JOIN_S, KEEPALIVE_S, TCP_USER_TIMEOUT_S
from swarmnode.wire.handshake import greet
from swarmnode.wire.link import CHANNEL_KINDS, JOIN_KIND, NO_OPTIONS
from swarmnode.wire.nursery import open_flat_nursery
from swarmnode.wire.serving import Service, count
from swarmnode.wire.tls import Secured
from swarmnode.wire.unread import NodeUnread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from swarmnode.wire.certificates import NodeCertificate
    from swarmnode.wire.link import Channel, ChannelHandler, Identity, LinkOptions, Standing
    from swarmnode.wire.tls import SwarmTls
    from swarmnode.wire.traffic import Traffic

NOTSENT_LOWAT_BYTES = 128 << 10
"""More than this unsent in the kernel and a small frame would wait behind it where we cannot take turns."""

_UNGUARDED: AbstractContextManager[None] = nullcontext()
_log = logging.getLogger(__name__)


class DirectTransport:
    """A `link.Transport` over TCP. Without `tls` nothing is encrypted or proved, so it stays on this machine: that is
    for benchmarks and tests of what lies above; a node always has it."""

    def __init__(self, tls: SwarmTls | None) -> None:
        self.tls = tls
        self._crowds = Crowds()
        self._server: Server | None = None

    @asynccontextmanager
    async def dial(
        self,
        address: Address,
        kind: str,
        identity: Identity,
        options: LinkOptions = NO_OPTIONS,
    ) -> AsyncIterator[Channel]:
        """See `link.Transport.dial`."""
        async with self.connect(address, identity, options) as link, link.open(kind) as channel:
            yield channel

    @asynccontextmanager
    async def connect(
        self, address: Address, identity: Identity, options: LinkOptions = NO_OPTIONS
    ) -> AsyncIterator[DirectLink]:
        """See `link.Transport.connect`."""
        address = address if self.tls is not None else require_loopback(address)
        async with self.connect_over(await connect(address), identity, options) as link:
            yield link

    async def listen(
        self,
        address: Address,
        handler: ChannelHandler,
        identity: Identity,
        *,
        traffic: Traffic | None = None,
        standing: Standing | None = None,
        task_status: trio.TaskStatus[Address] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """See `link.Transport.listen`."""
        address = address if self.tls is not None else require_loopback(address)
        listeners = await _open_listeners(address)
        self._server = Server(handler, identity, traffic, standing)

        async def serve(stream: trio.SocketStream) -> None:
            _tune(stream)
            await self.accept(stream, stream.socket.getpeername()[0] if stream.socket.fileno() >= 0 else "")

        async with open_flat_nursery() as nursery:
            await nursery.start(trio.serve_listeners, serve, listeners)
            task_status.started(Address(address.host, listeners[0].socket.getsockname()[1]))

    @asynccontextmanager
    async def connect_over(
        self, stream: trio.abc.Stream, identity: Identity, options: LinkOptions = NO_OPTIONS
    ) -> AsyncIterator[DirectLink]:
        """`connect`, over a stream that reaches the other node already."""
        secured = await self._secure(stream)
        async with link_over(secured.stream, identity, options, secured.peer, self._guard(secured)) as link:
            yield link

    async def _secure(self, stream: trio.abc.Stream) -> Secured:
        """The one place where TLS is put around a dialed stream."""
        return Secured(stream, None) if self.tls is None else await self.tls.secure_dialed(stream)

    def _guard(self, secured: Secured) -> AbstractContextManager[None]:
        if self.tls is None or secured.peer is None:
            return nullcontext()
        return self.tls.until_revoked(secured.peer.node)

    async def accept(self, stream: trio.abc.Stream, source: str, signer: str = "") -> None:
        """Serve one stream, by whatever way it came, as the listener's: the one place where TLS is put around it, and
        where what its other end may do is decided. `signer`: the member that signed what brought it, which then counts
        for itself and not for its source: behind a tunnel all have the same."""
        if self._server is None:
            raise LinkBroken("this node does not listen yet")
        server, crowds = self._server, self._crowds
        if self.tls is None:
            await server.serve(stream)
            return
        home = signer or home_of(source)
        try:
            crowds.strikes.count(home, trio.current_time())
            with crowds.shaking.place(home):
                secured = await self.tls.secure_accepted(stream)
            admission = self._admit(secured, source, crowds)
            if admission.certified is None:
                waiting = crowds.joining if admission.kinds else crowds.refused
                with waiting.place(home), trio.move_on_after(JOIN_S):
                    await server.serve(secured.stream, admission)
            else:
                crowds.strikes.forgive(home)
                with self._guard(secured), crowds.members.place(admission.certified.node):
                    await server.serve(secured.stream, admission)
        except SwarmError as error:
            _log.info("a connection from %s ended: %s", source, error)
            await trio.aclose_forcefully(stream)

    def _admit(self, secured: Secured, source: str, crowds: Crowds) -> Admission:
        """What the other end may do here; without a certificate in it, no longer than JOIN_S."""
        if secured.peer is None:
            return _stranger(source)
        if self.tls is not None and self.tls.is_revoked(secured.peer.node):
            return Admission(kinds=(), source=source, refusal=REMOVED)
        if not crowds.members.has_room(secured.peer.node):
            return Admission(kinds=(), source=source, refusal=TOO_MANY)
        return Admission(certified=secured.peer, source=source, unread=crowds.unread(secured.peer.node))


@asynccontextmanager
async def dial_over(
    stream: trio.abc.Stream,
    kind: str,
    identity: Identity,
    options: LinkOptions = NO_OPTIONS,
    certified: NodeCertificate | None = None,
    guard: AbstractContextManager[None] = _UNGUARDED,
) -> AsyncIterator[Channel]:
    """`dial`, over a stream that is connected already, to whom its handshake said; `guard` may end the connection."""
    async with link_over(stream, identity, options, certified, guard) as link, link.open(kind) as channel:
        yield channel


@asynccontextmanager
async def link_over(
    stream: trio.abc.Stream,
    identity: Identity,
    options: LinkOptions = NO_OPTIONS,
    certified: NodeCertificate | None = None,
    guard: AbstractContextManager[None] = _UNGUARDED,
) -> AsyncIterator[DirectLink]:
    """`connect`, over a stream that is connected already."""
    async with open_flat_nursery() as nursery:
        connection = Connection(stream, client=True, window_bytes=options.window_bytes)
        nursery.start_soon(_run, connection, guard)
        yield DirectLink(connection, identity, options, certified)
        await connection.aclose()
        nursery.cancel_scope.cancel()


class DirectLink:
    """A `link.Link` on one connection."""

    def __init__(
        self, connection: Connection, identity: Identity, options: LinkOptions, certified: NodeCertificate | None
    ) -> None:
        self.channels = 0
        self._connection = connection
        self._identity = identity
        self._options = options
        self._certified = certified

    @property
    def over(self) -> bool:
        return self._connection.over

    async def wait_over(self) -> None:
        await self._connection.wait_over()

    @asynccontextmanager
    async def open(self, kind: str) -> AsyncIterator[Channel]:
        """See `link.Link.open`."""
        async with self._connection.open_channel(kind) as channel:
            self.channels += 1
            try:
                channel.certified = self._certified
                channel.welcome = await greet(channel, self._identity, self._options)
                count(channel, channel.welcome.identity, self._options.parameters, self._options.traffic)
                yield channel
            finally:
                self.channels -= 1


async def _run(connection: Connection, guard: AbstractContextManager[None]) -> None:
    with guard:
        await connection.run()


@dataclass(frozen=True, slots=True)
class Admission:
    """What the other end of an accepted connection proved, and the channels it may open."""

    kinds: tuple[str, ...] = CHANNEL_KINDS
    certified: NodeCertificate | None = None
    source: str = ""
    max_channels: float = inf
    """In the connection's whole life."""
    unread: NodeUnread = field(default_factory=NodeUnread)
    """What of it is not read yet, on all its connections."""
    refusal: int = NOT_FOR_IT
    """The HTTP status for channels of other kinds."""


OPEN = Admission(kinds=(*CHANNEL_KINDS, JOIN_KIND))
"""Within this machine, without TLS."""


def _stranger(source: str) -> Admission:
    """For a connection without a certificate: one channel, to join on."""
    return Admission((JOIN_KIND,), source=source, max_channels=1, unread=NodeUnread(limits.MAX_STRANGER_UNREAD_BYTES))


@dataclass(frozen=True, slots=True)
class Crowds:
    """Who holds how many connections. A home's nodes share one address, so a source has room for several."""

    shaking: Crowd = field(default_factory=lambda: Crowd(places=256, per_source=64))
    joining: Crowd = field(default_factory=lambda: Crowd(places=32, per_source=8))
    refused: Crowd = field(default_factory=lambda: Crowd(places=32, per_source=8))
    """Those that are only told that they may not; beyond it they are not told."""
    members: Crowd = field(default_factory=lambda: Crowd(inf, limits.MAX_MEMBER_CONNECTIONS))
    """By node: a member that opens connections without end has no more of them than any other."""
    strikes: Strikes = field(default_factory=Strikes)
    accounts: WeakValueDictionary[str, NodeUnread] = field(default_factory=WeakValueDictionary)

    def unread(self, node: str) -> NodeUnread:
        """The account that all connections of a node share; it goes with the last of them."""
        return self.accounts.setdefault(node, NodeUnread())


class Server:
    """The listener's side of every connection, over whatever stream."""

    def __init__(
        self,
        handler: ChannelHandler,
        identity: Identity,
        traffic: Traffic | None = None,
        standing: Standing | None = None,
    ) -> None:
        self._service = Service(handler, identity, traffic, standing)

    async def serve(self, stream: trio.abc.Stream, admission: Admission = OPEN) -> None:
        """One connection, until it ends; nothing that happens on it raises here."""
        opened = trio.Event()
        channels = 0

        async with open_flat_nursery() as nursery:

            def on_open(channel: DirectChannel) -> None:
                nonlocal channels
                opened.set()
                channels += 1
                if channel.kind in admission.kinds and channels <= admission.max_channels:
                    channel.certified, channel.source = admission.certified, admission.source
                    channel.bound(admission.unread.of(channel.kind))
                    connection.accept(channel)
                    nursery.start_soon(self._service.serve, channel)
                else:
                    connection.refuse(channel, admission.refusal if channel.kind in OPEN.kinds else 404)

            connection = Connection(stream, client=False, on_open=on_open, stranger=admission.max_channels < inf)
            nursery.start_soon(_close_unless, opened, connection)
            await connection.run()
            opened.set()


async def _close_unless(opened: trio.Event, connection: Connection) -> None:
    with trio.move_on_after(HELLO_S) as scope:
        await opened.wait()
    if scope.cancelled_caught:
        await connection.aclose()


async def _open_listeners(address: Address) -> list[trio.SocketListener]:
    """For every address that the host's name stands for; with port 0 only the first, since each would get its own."""
    try:
        listeners = await trio.open_tcp_listeners(address.port, host=address.host)
    except OSError as error:
        raise LinkBroken(f"cannot listen on {address}: {error}") from error
    if address.port == 0:
        for extra in listeners[1:]:
            await extra.aclose()
        del listeners[1:]
    return listeners


async def connect(address: Address) -> trio.SocketStream:
    """A tuned TCP stream; raises LinkBroken."""
    try:
        with trio.fail_after(CONNECT_S):
            stream = await trio.open_tcp_stream(address.host, address.port)
    except trio.TooSlowError:
        raise LinkBroken(
            f"{address} did not answer within {CONNECT_S:g} s: it is switched off, or a firewall drops what comes; "
            "let the port through there"
        ) from None
    except OSError as error:
        raise LinkBroken(f"cannot connect to {address}: {_why(error)}") from error
    _tune(stream)
    return stream


def _why(error: OSError) -> str:
    """The causes behind "all attempts failed", and what to do about them."""
    causes = (
        error.__cause__.exceptions if isinstance(error.__cause__, BaseExceptionGroup) else [error.__cause__ or error]
    )
    found = dict.fromkeys(_cause(cause) for cause in causes)
    return "; ".join(found)


def _cause(error: BaseException) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, socket.gaierror):
        return "no machine of that name is known here; write its address instead"
    if number == errno.ECONNREFUSED:
        return "connection refused: nothing listens there; start the node, or correct the address or its port"
    if number in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return "no route to it: correct the address, or join this machine to its network"
    if number == errno.ETIMEDOUT:
        return "no answer: it is switched off, or a firewall drops what comes; let the port through there"
    return str(error)


def _tune(stream: trio.SocketStream) -> None:
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, NOTSENT_LOWAT_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(TCP_USER_TIMEOUT_S * 1000))
    if hasattr(socket, "TCP_KEEPIDLE"):
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(KEEPALIVE_S))
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(KEEPALIVE_S / 3))
