"""HTTP/1.1 over a channel: its bytes in `http` frames, as a trio stream for a server, and as one call of a client."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import h11
import trio

from swarmnode.errors import LinkBroken, ProtocolError, SwarmError
from swarmnode.wire.deadlines import CHANNEL_CLOSE_S
from swarmnode.wire.frames import Frame
from swarmnode.wire.limits import MAX_HTTP_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarmnode.wire.link import Channel

Header = tuple[bytes, bytes]
MAX_HEADER_BYTES = 1 << 16
"""Status line and headers of an answer; the coordinator's own have some hundred bytes."""
END = b""


async def send_http(channel: Channel, data: bytes | bytearray | memoryview) -> None:
    """Send bytes; returns when the link took them, so that one piece at most waits here for a slow reader."""
    view = memoryview(data)
    for start in range(0, len(view), MAX_HTTP_BYTES):
        await channel.send(Frame("http", {}, view[start : start + MAX_HTTP_BYTES]))
        await channel.flush()


async def receive_http(channel: Channel) -> memoryview:
    """The next bytes; empty at the end. Raises LinkBroken, ProtocolError, or what the other end refused with."""
    while True:
        try:
            frame = await channel.receive()
        except trio.EndOfChannel:
            return memoryview(END)
        if frame.kind != "http":
            raise ProtocolError(f"an api channel brought {frame.kind}")
        if len(frame.body):
            return memoryview(frame.body)


class ChannelStream(trio.abc.HalfCloseableStream):
    """A channel for whoever serves HTTP on streams. It ends without a reset where the other end does its part:
    resets count against floods, and a call is no attack."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._rest = memoryview(END)
        self._input_over = trio.Event()
        self._left = False
        """The other end sends no more; it may still read."""

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if not self._rest:
            try:
                self._rest = await receive_http(self._channel)
            except SwarmError as error:
                self._input_over.set()
                raise trio.BrokenResourceError(error.message) from error
            if not self._rest:
                self._left = True
                self._input_over.set()
        size = max_bytes or MAX_HTTP_BYTES
        taken, self._rest = self._rest[:size], self._rest[size:]
        return bytes(taken)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        try:
            await send_http(self._channel, data)
        except SwarmError as error:
            raise trio.BrokenResourceError(error.message) from error

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def send_eof(self) -> None:
        """Whoever reads must go on doing so: the other end answers with its own end."""
        self._channel.end_sending()
        with trio.move_on_after(CHANNEL_CLOSE_S):
            await self._input_over.wait()

    def abort(self) -> None:
        """End it at once in both directions; where the other end has ended already, this end's end is enough."""
        if self._left:
            self._channel.end_sending()
        else:
            self._channel.abort()

    async def aclose(self) -> None:
        self.abort()
        await trio.lowlevel.checkpoint()


class Call:
    """One request on a channel of its own. The answer may be read while the request is still being sent."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEADER_BYTES)

    async def begin(self, method: str, target: str, headers: Sequence[Header]) -> None:
        """The request's head, in bytes that a server has checked already."""
        await self._send(h11.Request(method=method, target=target, headers=list(headers)))

    async def send_body(self, part: bytes) -> None:
        await self._send(h11.Data(part))

    async def end(self) -> None:
        await self._send(h11.EndOfMessage())

    async def answer(self) -> tuple[int, list[Header]]:
        """Status and headers of the final answer."""
        while not isinstance(event := await self._next_event(), h11.Response):
            if not isinstance(event, h11.InformationalResponse):
                raise LinkBroken("the coordinator's API hung up before it answered")
        return event.status_code, list(event.headers.raw_items())

    async def next_part(self) -> bytes:
        """Some of the answer's body; empty at its end. Raises LinkBroken when it ends before that."""
        event = await self._next_event()
        return bytes(event.data) if isinstance(event, h11.Data) else END

    async def hang_up(self) -> None:
        """End the channel, at the other end at once. A call whose request is out ends without a reset."""
        with trio.move_on_after(CHANNEL_CLOSE_S, shield=True), suppress(SwarmError):
            if self._http.our_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED):
                self._channel.end_sending()
                while await receive_http(self._channel):
                    pass
                await self._channel.aclose()
                return
        self._channel.abort()

    async def _send(self, event: h11.Event) -> None:
        await send_http(self._channel, self._http.send(event) or END)

    async def _next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(bytes(await receive_http(self._channel)))
        except h11.RemoteProtocolError as error:
            raise LinkBroken(f"the coordinator's API broke off: {error}") from error
        return event
