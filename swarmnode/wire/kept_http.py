"""Requests to one HTTP/1.1 server, one after the other, on a connection that is kept: what a polled link is made of.

Driven with h11 alone. A client library's pools, redirects, cookies and tasks cost more CPU than all the rest of a trip.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import h11
import httpx
import trio

from swarmnode.errors import LinkBroken
from swarmnode.wire.deadlines import CONNECT_S, TLS_S

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Mapping

RECEIVE_BYTES = 1 << 16
MAX_HEADER_BYTES = 1 << 16
"""Status line and headers of an answer; proxies add some."""
ALWAYS = {"accept-encoding": "identity", "user-agent": "swarmnode"}
"""What travels is encrypted: to compress it would cost time alone. Some tunnels refuse a client without a name."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole one."""

    status: int
    body: bytes


class KeptConnection:
    """`ask`, then `answer`. It is made when it is first needed, and again whenever the server has ended it between two
    requests; a request that failed is never sent again. All raise LinkBroken; the caller sets the deadlines."""

    def __init__(self, url: str, tls: ssl.SSLContext | None, max_answer_bytes: int) -> None:
        """`url`: http(s)://HOST[:PORT][/PREFIX]. `tls` None: for https what the public web's certificates need."""
        try:
            self._url = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise LinkBroken(f"{url[:120]!r} is no URL: {error}") from None
        self._prefix = self._url.raw_path.decode("ascii").rstrip("/")
        self._tls = tls
        self._max_answer_bytes = max_answer_bytes
        self._http = h11.Connection(h11.CLIENT)
        self._stream: trio.abc.Stream | None = None
        self._socket: trio.SocketStream | None = None

    async def ask(self, method: str, target: str, headers: Mapping[str, str], body: bytes = b"") -> None:
        """Send a request in one write. An answer that came before its end is the one that `answer` returns."""
        if self._stream is None or self._ended():
            await self.aclose()
            await self._connect()
        own = {"host": self._url.netloc.decode("ascii"), **ALWAYS, "content-length": str(len(body))}
        request = h11.Request(method=method, target=self._prefix + target, headers=list({**own, **headers}.items()))
        parts = [self._http.send(event) or b"" for event in (request, h11.Data(body), h11.EndOfMessage())]
        assert self._stream is not None
        with suppress(trio.BrokenResourceError):  # whoever refuses a body answers, and reads no more of it
            await self._stream.send_all(b"".join(parts))

    async def answer(self) -> Answer:
        """Wait for the whole answer."""
        status, body = 0, bytearray()
        while not isinstance(event := await self._next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > self._max_answer_bytes:
                    raise LinkBroken(f"it was answered with more than {self._max_answer_bytes} bytes")
        if self._http.our_state is self._http.their_state is h11.DONE and not self._http.trailing_data[0]:
            self._http.start_next_cycle()
        else:  # what came behind an answer would be taken for that of the next request
            await self.aclose()
        return Answer(status, bytes(body))

    async def aclose(self) -> None:
        """Close at once."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await trio.aclose_forcefully(stream)

    async def _connect(self) -> None:
        secure = self._url.scheme == "https"
        try:
            with trio.fail_after(CONNECT_S):
                self._socket = await trio.open_tcp_stream(self._url.host, self._url.port or (443 if secure else 80))
            self._stream = await self._secured(self._socket) if secure else self._socket
        except (OSError, trio.TooSlowError, trio.BrokenResourceError) as error:
            why = error.__cause__ or error
            raise LinkBroken(f"no connection to {self._url}: {why or type(why).__name__}") from error
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEADER_BYTES)

    async def _secured(self, stream: trio.SocketStream) -> trio.abc.Stream:
        context = self._tls or _public_tls()
        context.set_alpn_protocols(["http/1.1"])
        secured = trio.SSLStream(stream, context, server_hostname=self._url.host, https_compatible=True)
        try:
            with trio.fail_after(TLS_S):
                await secured.do_handshake()
        except BaseException:
            await trio.aclose_forcefully(stream)
            raise
        return secured

    def _ended(self) -> bool:
        """Whether the server, or a proxy, ended the connection while it was idle: nothing else is to be read then."""
        return self._socket is None or self._socket.socket.is_readable()

    async def _next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        assert self._stream is not None
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                data = await self._stream.receive_some(RECEIVE_BYTES)
                if not data and self._http.their_state is h11.SEND_RESPONSE:
                    raise LinkBroken("the server hung up before it answered")
                self._http.receive_data(bytes(data))
        except h11.RemoteProtocolError as error:
            raise LinkBroken(f"the server broke off: {error}") from error
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise LinkBroken(f"the connection broke: {error.__cause__ or error}") from error
        return event


@cache
def _public_tls() -> ssl.SSLContext:
    """For the public web's certificates. Made once: to read them all takes longer than a handshake."""
    return httpx.create_ssl_context(trust_env=False)


@asynccontextmanager
async def kept_connection(url: str, tls: ssl.SSLContext | None, max_answer_bytes: int) -> AsyncIterator[KeptConnection]:
    """Closed at the end of the block."""
    kept = KeptConnection(url, tls, max_answer_bytes)
    try:
        yield kept
    finally:
        await kept.aclose()
