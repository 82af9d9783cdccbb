"""One HTTP/1.1 connection of the API: hypercorn's protocol on a trio stream, with bounded writes.

hypercorn's own TCPServer is not used because its send is shielded without a deadline (one client that stops reading
keeps a server from ever ending), and because it turns `PRI` and `Upgrade: h2c` into HTTP/2; here a client that offers
that upgrade, as Java's does, gets its answer in HTTP/1.1. A client that closes its sending side counts as one that
leaves, whatever is still being answered.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import h11
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, RawData, Updated
from hypercorn.protocol.h11 import H2ProtocolAssumedError, H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from swarmnode.api.exchange import ABORT_KEY, VIA_KEY

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

    from hypercorn.events import Event
    from hypercorn.trio.worker_context import WorkerContext
    from hypercorn.typing import H11SendableEvent
    from starlette.types import ASGIApp

    from swarmnode.api.limits import ApiLimits

log = logging.getLogger("swarmnode.api.http")

RECEIVE_BYTES = 1 << 16
READ_AHEAD = 4
"""Receives that may wait for the protocol: enough that the end behind some pipelined requests is seen."""
MAX_HEADER_BYTES = 1 << 16
"""Request line and headers: browsers send up to some 10 KiB of cookies on localhost, which all its ports share."""
PIECE_BYTES = 1 << 16
"""What must get through within the write deadline: 64 KiB in 30 s is 2 KiB/s, slower than any line in use."""
REFUSE_HTTP2 = b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
REFUSE_TWO_LENGTHS = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
TWO_LENGTHS = {b"content-length", b"transfer-encoding"}
"""A request with both ends where either says; a proxy that goes by the other one would take what follows for a request
of somebody else's (RFC 9112, 6.1)."""


def hypercorn_config() -> Config:
    config = Config()
    config.accesslog = None
    config.errorlog = log
    config.alpn_protocols = ["http/1.1"]
    config.keep_alive_max_requests = 1 << 40  # no connection ends by count: a client would see a reset
    config.h11_max_incomplete_size = MAX_HEADER_BYTES
    config.include_server_header = False
    return config


class _TwoLengths(Exception):
    """A request says twice, and differently, how long it is."""


class _PlainProtocol(H11Protocol):
    """HTTP/1.1 and nothing else. The head of an answer waits for its body where one of known length follows: one write,
    one packet, and a client that wakes up once."""

    _head = b""

    async def _check_protocol(self, event: h11.Request) -> None:
        if event.method == b"PRI":
            raise H2ProtocolAssumedError(b"")
        if {name for name, _ in event.headers} >= TWO_LENGTHS:
            raise _TwoLengths

    async def _send_h11_event(self, event: H11SendableEvent) -> None:
        try:
            data = self.connection.send(event)
        except h11.LocalProtocolError:
            if self.connection.their_state is not h11.ERROR:
                raise
            return
        if isinstance(event, h11.Response) and _length(event) > 0:
            self._head = data
            return
        head, self._head = self._head, b""
        if head or data:
            await self.send(RawData(head + data))


def _length(response: h11.Response) -> int:
    """Bytes of the body that its headers declare; 0 where they do not."""
    return next((int(value) for name, value in response.headers if name == b"content-length"), 0)


Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Client:
    """The other end of an accepted connection. `abort` ends it at once and wakes every task that waits on it.

    `address` is its own, `here` the one it reached; None where the kernel knows none. `via` is the node whose link it
    came over, None for a client of the API port itself.
    """

    stream: trio.abc.HalfCloseableStream
    abort: Callable[[], None]
    address: Address | None = None
    here: Address | None = None
    via: str | None = None

    @property
    def local(self) -> bool:
        """A program on this machine, at the port itself."""
        if self.via is not None or self.address is None:
            return False
        host = ipaddress.ip_address(self.address[0].partition("%")[0])
        return (getattr(host, "ipv4_mapped", None) or host).is_loopback


def tcp_client(stream: trio.SocketStream, write_s: float) -> Client:
    """A client of the port; `write_s` is how long it may leave bytes unacknowledged."""
    sock = stream.socket
    _set_options(sock, write_s)
    with suppress(OSError):  # it has already gone; reading will say so
        address, here = (parse_socket_addr(sock.family, name) for name in (sock.getpeername(), sock.getsockname()))
        return Client(stream, sock.close, address, here)
    return Client(stream, sock.close)


class Connection:
    """Serves one accepted stream until either side ends it."""

    def __init__(
        self,
        app: ASGIApp,
        config: Config,
        context: WorkerContext,
        client: Client,
        tls: ssl.SSLContext | None,
        limits: ApiLimits,
    ) -> None:
        self._app = ASGIWrapper(app)  # type: ignore[arg-type]  # Starlette's and hypercorn's names for one protocol
        self._config = config
        self._context = context
        self._client = client
        self._tls = None if tls is None else trio.SSLStream(client.stream, tls, server_side=True, https_compatible=True)
        self._stream: trio.abc.Stream = self._tls or client.stream
        plain = client.stream if self._tls is None else None
        self._socket = plain.socket if isinstance(plain, trio.SocketStream) else None
        self._limits = limits
        self._writing = trio.Lock()
        self._patience = trio.CancelScope()
        """Its deadline ends the connection, whoever waits for what."""
        self._waiting: Literal["request", "headers", "nothing"] = "request"
        self._idle_since_s = trio.current_time()
        self._heard_s = self._idle_since_s
        self._protocol: _PlainProtocol

    @property
    def via(self) -> str | None:
        """The node whose link it came over."""
        return self._client.via

    @property
    def idle_since_s(self) -> float | None:
        """Since when it is between two requests, or before one is whole, so that ending it loses no reply.

        A request whose body still comes has been idle since the last of its bytes: whoever sends drop by drop gives
        way to everybody who does not.
        """
        if self._waiting != "nothing":
            return self._idle_since_s
        return self._heard_s if self._protocol.connection.their_state is h11.SEND_BODY else None

    async def run(self) -> None:
        """Returns when the connection is over; no failure of one client gets out."""
        try:
            if not await self._shake_hands():
                return
            async with TaskGroup() as self._tasks:
                self._protocol = self._new_protocol()
                await self._protocol.initiate()
                self._wait_at_most(self._limits.idle_connection_s)
                await self._read()
        except* OSError:
            pass  # the client is gone
        except* Exception as failures:
            log.error("a connection failed", exc_info=failures)
        finally:
            self.abort()

    def abort(self) -> None:
        """Close at once: wakes every task that waits on this stream."""
        self._client.abort()

    async def _shake_hands(self) -> bool:
        if self._tls is None:
            return True
        with trio.move_on_after(self._limits.handshake_s), suppress(trio.BrokenResourceError):
            await self._tls.do_handshake()
            return True
        return False  # too slow, or no TLS at all

    def _new_protocol(self) -> _PlainProtocol:
        state = ConnectionState({ABORT_KEY: self.abort, VIA_KEY: self._client.via})
        return _PlainProtocol(
            self._app,
            self._config,
            self._context,
            self._tasks,
            state,
            self._tls is not None,
            self._client.address,
            self._client.here,
            self._send,
        )

    async def _read(self) -> None:
        """Receive in a task of its own: the protocol waits on pipelined bytes until the running request is over."""
        sink, source = trio.open_memory_channel[bytes](READ_AHEAD)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._receive, sink)
            nursery.start_soon(self._keep_time)
            try:
                async for data in source:
                    self._begin_request()
                    await self._protocol.handle(RawData(data))
                await self._protocol.handle(RawData(b""))
            except H2ProtocolAssumedError:
                await self._write(REFUSE_HTTP2)
            except _TwoLengths:
                await self._write(REFUSE_TWO_LENGTHS)
            nursery.cancel_scope.cancel()
        await self._protocol.handle(Closed())

    async def _receive(self, sink: trio.MemorySendChannel[bytes]) -> None:
        with sink, suppress(trio.ClosedResourceError, trio.BrokenResourceError):
            while data := await self._stream.receive_some(RECEIVE_BYTES):
                self._heard_s = trio.current_time()
                await sink.send(bytes(data))
        await self._protocol.handle(Closed())

    def _begin_request(self) -> None:
        """The first bytes of a request give it `header_s` to become one."""
        if self._waiting == "request":
            self._waiting = "headers"
            self._wait_at_most(self._limits.header_s)

    async def _send(self, event: Event) -> None:
        if isinstance(event, RawData):
            await self._write(event.data)
        elif not isinstance(event, Updated):
            await self._end()
        elif event.idle:
            self._wait_for_request()
        else:
            self._waiting = "nothing"
            self._wait_at_most(math.inf)

    def _wait_for_request(self) -> None:
        self._waiting = "request"
        self._idle_since_s = trio.current_time()
        self._wait_at_most(self._limits.idle_connection_s)
        if self._protocol.connection.trailing_data[0]:  # it began while the last one was answered
            self._begin_request()

    def _wait_at_most(self, seconds: float) -> None:
        self._patience.deadline = trio.current_time() + seconds

    async def _keep_time(self) -> None:
        """End the connection when patience does, or when the server ends while there is no request."""
        with self._patience:
            await self._context.terminated.wait()
            if self._waiting != "request":
                await trio.sleep_forever()
        self.abort()

    async def _write(self, data: bytes) -> None:
        """All of `data`, or the connection ends: a part of it would corrupt what follows."""
        done = self._write_now(data)
        if done == len(data):
            return
        if done:
            self._writing.acquire_nowait()  # nobody else may come between
        else:
            await self._writing.acquire()
        try:
            whole = await self._write_all(memoryview(data)[done:])
        finally:
            self._writing.release()
        if not whole:
            await self._protocol.handle(Closed())

    async def _write_all(self, data: memoryview) -> bool:
        for piece in _pieces(data):
            if not await self._write_piece(piece):
                return False
        return True

    def _write_now(self, data: bytes) -> int:
        """How many bytes the client's socket takes without waiting: all, unless it reads slowly. A lock, a deadline and
        two passes of the scheduler would be paid by every token. None under TLS and while something else is written; a
        broken socket is left to who waits."""
        if self._socket is None or self._writing.locked():
            return 0
        try:
            return os.write(self._socket.fileno(), data)
        except OSError:
            return 0

    async def _write_piece(self, piece: memoryview) -> bool:
        """Shielded, since half a piece helps nobody; the deadline and `abort` end it."""
        with trio.move_on_after(self._limits.write_s, shield=True):
            try:
                await self._stream.send_all(piece)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return False
            return True
        self.abort()
        return False

    async def _end(self) -> None:
        with (
            trio.move_on_after(self._limits.write_s),
            suppress(trio.BrokenResourceError, trio.ClosedResourceError),
        ):
            await self._send_end()
        self.abort()
        await self._protocol.handle(Closed())

    async def _send_end(self) -> None:
        """Behind what is being written, and never beside it."""
        async with self._writing:
            if self._tls is None:
                await self._client.stream.send_eof()
            else:
                await self._tls.aclose()  # TLS has no half close; its own end mark tells a cut from an end


def _pieces(view: memoryview) -> Sequence[memoryview]:
    return [view[start : start + PIECE_BYTES] for start in range(0, len(view), PIECE_BYTES)]


def _set_options(sock: trio.socket.SocketType, write_s: float) -> None:
    """Small chunks leave at once, and the kernel too gives up on a client that acknowledges nothing, or is gone."""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(write_s * 1000))
        if hasattr(socket, "TCP_KEEPIDLE"):  # nothing is written while a reply is waited for
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, int(write_s) or 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(write_s / 3) or 1)
    except OSError:
        log.debug("socket options refused", exc_info=True)  # the client has already closed
