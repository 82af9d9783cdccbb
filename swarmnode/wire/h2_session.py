"""One HTTP/2 connection without I/O: bytes in, events out; channels with bounded, fair sending on top of h2.

h2 keeps the protocol's state. Added here: windows worth having, queues for what the windows do not let out yet, turns
between channels, credit that returns only when a consumer took the data, and budgets against floods.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NewType

import h2.config
import h2.connection
import h2.events
import h2.exceptions
from h2.errors import ErrorCodes
from h2.settings import SettingCodes

from swarmnode.errors import LinkBroken, Overloaded, ProtocolError
from swarmnode.wire import limits
from swarmnode.wire.flood import Flood, FloodGuard
from swarmnode.wire.h2_data import HEAD_BYTES, DataConnection, data_frame_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarmnode.wire.frames import Buffer

    Header = tuple[bytes, bytes]

ChannelId = NewType("ChannelId", int)
Headers = tuple[tuple[str, str], ...]
PATH_PREFIX = "/channel/"
CREDIT_BYTES = 32 << 10
"""Of a channel: nothing beside its window, and some dozen steps' frames."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The peer opened a channel; nothing is promised to it until `accept`.

    `one_too_many`: more than MAX_CHANNELS are open. h2 holds to its limit only a peer that acknowledged our settings.
    """

    channel: ChannelId
    path: str
    one_too_many: bool = False


@dataclass(frozen=True, slots=True)
class Accepted:
    channel: ChannelId
    status: int


@dataclass(frozen=True, slots=True)
class Data:
    """Bytes of a channel. `credit` goes to `consumed` when the consumer took them."""

    channel: ChannelId
    data: bytes
    credit: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The peer will send no more on this channel."""

    channel: ChannelId


@dataclass(frozen=True, slots=True)
class Reset:
    """The channel is gone in both directions."""

    channel: ChannelId
    code: int


@dataclass(frozen=True, slots=True)
class Closed:
    """The peer closed the connection with GOAWAY."""

    code: int


Event = Opened | Accepted | Data | Ended | Reset | Closed


@dataclass(slots=True)
class _Outbound:
    buffers: deque[memoryview] = field(default_factory=deque)
    queued: int = 0
    finished: bool = False
    """END_STREAM goes out behind the queue."""
    reset_after: bool = False
    """RST_STREAM goes out behind END_STREAM: the peer may stop sending."""
    remote_ended: bool = False
    local_ended: bool = False
    owed: int = 0
    """Credit of what was consumed, not given back yet."""


class H2Session:
    """Both ends use this class. Methods that take bytes from the peer raise ProtocolError only; after it, what
    `data_to_send` still holds (a GOAWAY) should be written and the connection closed."""

    def __init__(self, *, client: bool, stranger: bool = False, window_bytes: int = limits.STREAM_WINDOW_BYTES) -> None:
        """`window_bytes`: what the peer may send on one channel before any of it is consumed."""
        self._client = client
        self._h2 = DataConnection(h2.config.H2Configuration(client_side=client, header_encoding=None))
        self._guard = FloodGuard(server=not client, stranger=stranger)
        self._out: dict[ChannelId, _Outbound] = {}
        self._credit_bytes = min(CREDIT_BYTES, window_bytes // 8)
        self._turns: deque[ChannelId] = deque()
        self._waiting: set[ChannelId] = set()
        self._closed = False
        self._ready: list[Buffer] = []
        """What is to be written and nobody took yet."""
        self._start(window_bytes)
        self._collect()

    def _start(self, window_bytes: int) -> None:
        self._h2.initiate_connection()
        self._h2.update_settings(
            {
                SettingCodes.INITIAL_WINDOW_SIZE: window_bytes,
                SettingCodes.MAX_FRAME_SIZE: limits.H2_FRAME_BYTES,
                SettingCodes.MAX_CONCURRENT_STREAMS: limits.MAX_CHANNELS,
                **({SettingCodes.ENABLE_PUSH: 0} if self._client else {}),
            }
        )
        # h2 looks at its limit once per call: a large frame right behind the peer's acknowledgement would be refused
        self._h2.max_inbound_frame_size = limits.H2_FRAME_BYTES
        self._h2.increment_flow_control_window(window_bytes * limits.MAX_CHANNELS - 65_535)

    # -- what the peer sent

    def receive_data(self, data: Buffer, now: float) -> list[Event]:
        """Take bytes as they came; `now` in seconds of a monotonic clock."""
        if self._closed:
            raise ProtocolError("the peer sent more after the connection was closed")
        try:
            view, at_rest = memoryview(data), self._guard.at_rest
            self._guard.inspect(view, now)
            events, done = self._take_data_frames(view) if at_rest else ([], 0)
            if done < len(view):
                events += self._translate(self._h2.receive_data(view[done:]), now)
                self._collect()
            return events
        except h2.exceptions.ProtocolError as error:
            self.close(error.error_code)
            raise ProtocolError(f"the peer broke HTTP/2: {error}") from error
        except ProtocolError as error:
            self.close(ErrorCodes.ENHANCE_YOUR_CALM if isinstance(error, Flood) else ErrorCodes.PROTOCOL_ERROR)
            raise

    def _take_data_frames(self, view: memoryview) -> tuple[list[Event], int]:
        """Whole DATA frames at the front, and how many bytes they take; what follows is h2's."""
        events: list[Event] = []
        done = 0
        while (found := data_frame_at(view, done)) is not None:
            channel, size = ChannelId(found[0]), found[1]
            out = self._out.get(channel)
            if out is None or out.remote_ended or not self._h2.take_data(channel, size):
                break
            begin = done + HEAD_BYTES
            done = begin + size
            events.append(Data(channel, bytes(view[begin:done]), size))
        return events, done

    def _translate(self, h2_events: Sequence[h2.events.Event], now: float) -> list[Event]:
        events: list[Event] = []
        for event in h2_events:
            if isinstance(event, h2.events.DataReceived):
                events.extend(self._take_data(event))
            elif isinstance(event, h2.events.StreamReset):
                events.extend(self._take_reset(event, now))
            elif isinstance(event, h2.events.StreamEnded):
                events.extend(self._take_end(ChannelId(event.stream_id)))
            elif isinstance(event, h2.events.RequestReceived):
                events.append(self._take_request(event))
            elif isinstance(event, h2.events.ResponseReceived):
                events.append(Accepted(ChannelId(event.stream_id), _status(event.headers)))
            elif isinstance(event, h2.events.ConnectionTerminated):
                self._closed = True
                events.append(Closed(int(event.error_code or 0)))
            elif isinstance(event, (h2.events.WindowUpdated, h2.events.RemoteSettingsChanged)):
                self._wake_all()
        return events

    def _take_data(self, event: h2.events.DataReceived) -> list[Event]:
        channel = ChannelId(event.stream_id)
        if channel not in self._out:
            self._credit(channel, event.flow_controlled_length)
            return []
        if not event.data:
            self._credit(channel, event.flow_controlled_length)
            return []
        return [Data(channel, event.data, event.flow_controlled_length)]

    def _take_reset(self, event: h2.events.StreamReset, now: float) -> list[Event]:
        if not event.remote_reset:
            self._guard.spend("reset", now)
        known = self._forget(ChannelId(event.stream_id))
        return [Reset(ChannelId(event.stream_id), int(event.error_code or 0))] if known else []

    def _take_end(self, channel: ChannelId) -> list[Event]:
        out = self._out.get(channel)
        if out is None:
            return []
        out.remote_ended = True
        self._forget_if_done(channel, out)
        return [Ended(channel)]

    def _take_request(self, event: h2.events.RequestReceived) -> Event:
        channel = ChannelId(event.stream_id)
        self._out[channel] = _Outbound()
        return Opened(channel, _header(event.headers, b":path"), len(self._out) > limits.MAX_CHANNELS)

    # -- what we do

    def open_channel(self, path: str, headers: Headers = ()) -> ChannelId:
        """Open a channel; raises Overloaded when the connection has as many as the peer allows, LinkBroken when it
        is closed."""
        if self._closed:
            raise LinkBroken("the connection is closed")
        try:
            channel = ChannelId(self._h2.get_next_available_stream_id())
            pseudo = ((":method", "POST"), (":scheme", "https"), (":authority", "swarmnode"), (":path", path))
            self._h2.send_headers(channel, (*pseudo, *headers))
        except h2.exceptions.TooManyStreamsError as error:
            raise Overloaded(f"no more channels on this connection: {error}") from error
        except h2.exceptions.ProtocolError as error:
            raise LinkBroken(f"a channel could not be opened: {error}") from error
        self._out[channel] = _Outbound()
        self._collect()
        return channel

    def accept(self, channel: ChannelId, status: int = 200) -> None:
        """Answer an opened channel; anything but 200 refuses it and ends it."""
        refused = status != 200
        if channel in self._out and not self._closed:
            self._h2.send_headers(channel, ((":status", str(status)),), end_stream=refused)
            if refused:
                self._out[channel].local_ended = True
                self.reset(channel, ErrorCodes.NO_ERROR)
            self._collect()

    def send(self, channel: ChannelId, *buffers: Buffer) -> None:
        """Queue bytes. A view is kept as it is until it is written: the caller must not change it."""
        out = self._open_for_sending(channel)
        for buffer in buffers:
            if len(buffer):
                out.buffers.append(memoryview(buffer))
                out.queued += len(buffer)
        self._wake(channel)

    def finish(self, channel: ChannelId, *, reset_after: bool = False) -> None:
        """No more bytes from us. With `reset_after` the peer is told to stop as well, behind all that is queued."""
        out = self._out.get(channel)
        if out is not None:
            out.finished = True
            out.reset_after = out.reset_after or reset_after
            self._wake(channel)

    def reset(self, channel: ChannelId, code: int = ErrorCodes.CANCEL) -> None:
        """End a channel at once in both directions; what is queued is dropped. Unknown channels are ignored."""
        if self._forget(channel) and not self._closed:
            self._h2.reset_stream(channel, code)
            self._collect()

    def consumed(self, channel: ChannelId, credit: int) -> None:
        """A consumer took a `Data`: give its credit back, CREDIT_BYTES of it at a time (also for channels that are
        gone)."""
        out = self._out.get(channel)
        if out is not None:
            out.owed += credit
            credit = out.owed
            if credit < self._credit_bytes:
                return
            out.owed = 0
        if not self._closed:
            self._credit(channel, credit)
            self._collect()

    def queued_bytes(self, channel: ChannelId) -> int:
        """Bytes queued on a channel and not yet handed out for writing; 0 for channels that are gone."""
        out = self._out.get(channel)
        return out.queued if out is not None else 0

    def close(self, code: int = ErrorCodes.NO_ERROR) -> None:
        """Queue GOAWAY. h2 is dead after it, so a graceful end drains the channels first."""
        if not self._closed:
            self._closed = True
            if self._h2.state_machine.state is not h2.connection.ConnectionState.CLOSED:
                self._h2.close_connection(code)
            self._collect()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def idle(self) -> bool:
        """Nothing is queued on any channel."""
        return not any(out.queued or (out.finished and not out.local_ended) for out in self._out.values())

    def data_to_send(self, max_bytes: int = limits.WRITE_BYTES) -> bytes:
        """What to write next: about `max_bytes` at most, taken from the channels in turns; b"" when nothing can go."""
        written = 0
        while not self._closed and self._turns and written < max_bytes:
            channel = self._turns.popleft()
            self._waiting.discard(channel)
            written += self._send_some(channel)
        self._collect()
        data = b"".join(self._ready)
        self._ready = []
        self._guard.flushed()
        return data

    @property
    def wants_write(self) -> bool:
        """`data_to_send` may have something; asked before a writer is woken for nothing."""
        return bool(self._ready or (self._turns and not self._closed))

    def _collect(self) -> None:
        data = self._h2.data_to_send()
        if data:
            self._ready.append(data)

    # -- sending

    def _send_some(self, channel: ChannelId) -> int:
        out = self._out.get(channel)
        if out is None or out.local_ended:
            return 0
        allowed = min(
            self._h2.local_flow_control_window(channel), self._h2.max_outbound_frame_size, limits.DATA_FRAME_BYTES
        )
        sent = 0
        if out.queued and allowed > 0:
            part = _take(out, allowed)
            sent = len(part)
            self._collect()
            self._ready += [self._h2.head_of(channel, sent), part]
            if out.queued:
                self._wake(channel)
        if out.finished and not out.queued:
            self._end(channel, out)
        return sent

    def _end(self, channel: ChannelId, out: _Outbound) -> None:
        self._h2.end_stream(channel)
        out.local_ended = True
        if out.reset_after and not out.remote_ended:
            self.reset(channel, ErrorCodes.NO_ERROR)
        self._forget_if_done(channel, out)

    def _forget_if_done(self, channel: ChannelId, out: _Outbound) -> None:
        if out.local_ended and out.remote_ended:
            self._forget(channel)

    def _forget(self, channel: ChannelId) -> bool:
        """Whether it was known. What it owes goes back: the connection's window is all channels'."""
        out = self._out.pop(channel, None)
        if out is not None and not self._closed:
            self._credit(channel, out.owed)
        return out is not None

    def _wake(self, channel: ChannelId) -> None:
        if channel not in self._waiting:
            self._waiting.add(channel)
            self._turns.append(channel)

    def _wake_all(self) -> None:
        for channel, out in self._out.items():
            if out.queued or (out.finished and not out.local_ended):
                self._wake(channel)

    def _open_for_sending(self, channel: ChannelId) -> _Outbound:
        out = self._out.get(channel)
        if out is None or out.finished or self._closed:
            raise LinkBroken(f"channel {channel} is closed for sending")
        return out

    def _credit(self, channel: ChannelId, credit: int) -> None:
        if credit:
            self._h2.acknowledge_received_data(credit, channel)


def _take(out: _Outbound, most: int) -> bytes | memoryview:
    """Up to `most` bytes off the queue: small buffers joined, a large one cut without a copy."""
    first = out.buffers[0]
    if len(first) >= most:
        out.buffers[0] = first[most:]
        if not out.buffers[0]:
            out.buffers.popleft()
        out.queued -= most
        return first[:most]
    parts: list[memoryview] = []
    left = most
    while out.buffers and left:
        part = out.buffers.popleft()
        if len(part) > left:
            out.buffers.appendleft(part[left:])
            part = part[:left]
        parts.append(part)
        left -= len(part)
    out.queued -= most - left
    return b"".join(parts)


def _header(headers: Sequence[Header], name: bytes) -> str:
    """One header's text; "" where it is missing."""
    return next((bytes(value).decode("ascii", "replace") for key, value in headers if bytes(key) == name), "")


def _status(headers: Sequence[Header]) -> int:
    text = _header(headers, b":status")
    return int(text) if text.isascii() and text.isdigit() else 0
