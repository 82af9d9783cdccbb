"""One HTTP/2 connection on trio: one task reads, one writes; channels are queues between them and their users."""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING

import trio

from swarmnode.errors import LinkBroken, NodeRemoved, Overloaded, ProtocolError
from swarmnode.wire import h2_session as h2s
from swarmnode.wire import limits
from swarmnode.wire.carried import CarriedStream
from swarmnode.wire.deadlines import CHANNEL_CLOSE_S, FRAME_S, WRITE_S
from swarmnode.wire.frames import FrameDecoder, encode, frame_size
from swarmnode.wire.link import Channel
from swarmnode.wire.prompt import PromptStream
from swarmnode.wire.routes import DIRECT
from swarmnode.wire.tls_stream import TlsStream
from swarmnode.wire.traffic import Counts
from swarmnode.wire.unread import LONGEST_FRAME_BYTES, Share, Unread

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarmnode.errors import SwarmError
    from swarmnode.wire.frames import Frame

_CANCEL = 0x8
SMALL_FRAME_BYTES = 64 << 10
"""A decode step's frame: it is written in the step that queues it. Larger ones wait for the writer and take turns."""
BUNDLE_FRAMES = 16
"""What came in one read of the connection is taken in one go, so many frames at a time: a pass of the scheduler between
any two would be paid by every token, and one peer's thousands of frames must not keep all others waiting."""
NOT_FOR_IT, REMOVED, TOO_MANY = 403, 410, 429
"""Statuses that turn a channel down: by what its opener's certificate is for, because that node was removed from the
swarm, by how many connections it has."""
_REFUSALS: dict[int, tuple[type[SwarmError], str]] = {
    NOT_FOR_IT: (LinkBroken, "to this node: its certificate is not for that"),
    REMOVED: (
        NodeRemoved,
        "to this node: it was removed from the swarm, and can join again only with a new --data-dir and a new token",
    ),
    TOO_MANY: (
        LinkBroken,
        f"to this node: it has {limits.MAX_MEMBER_CONNECTIONS} connections there, or {limits.MAX_CHANNELS} channels "
        "on this one, as many as a node may",
    ),
}


class DirectChannel(Channel):
    """A channel of one connection. Bytes wait here undecoded: the consumer decodes, and so gives credit back."""

    def __init__(self, connection: Connection, channel: h2s.ChannelId, kind: str) -> None:
        self.kind = kind
        self.route = connection.route
        self.counts = Counts()
        self._connection = connection
        self._id = channel
        self._longest = LONGEST_FRAME_BYTES.get(kind, limits.MAX_FRAME_BYTES)
        self._decoder = FrameDecoder(self._longest)
        self._unread = Share(Unread(limits.MAX_CARRIED_BYTES))
        self._frames: deque[Frame] = deque()
        self._inbox: deque[h2s.Data] = deque()
        self._arrived = trio.Event()
        self._waited_on = False
        """Somebody waits in `receive`: what was given out before has been dealt with."""
        self._take_at_once: Callable[[Frame], bool] | None = None
        self._thrown: Exception | None = None
        """By it; nothing more is read."""
        self._ended = False
        self._broken: SwarmError | None = None
        self._without_pause = 0
        """Frames in a row that were at hand, so that their reader let nobody else run."""
        self._slow: tuple[float, int] | None = None
        """While a frame is awaited that has begun: since when, and from how many of its bytes on."""
        self._unreadable: ProtocolError | None = None
        """Nothing after a bad frame can be read, but the other side can still be told why."""

    @property
    def heard_bytes(self) -> int:
        return self._connection.heard_bytes

    def bound(self, unread: Unread) -> None:
        """For a channel the peer opened, before anything was received: the account that what it sends counts on; and
        longer frames than HELLO only behind it."""
        self._unread = Share(unread)
        self._decoder = FrameDecoder(min(limits.MAX_HELLO_FRAME_BYTES, self._longest))

    async def send(self, frame: Frame) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._broken is None and self._full:
            await self._connection.written()
        self._queue(frame)
        await trio.lowlevel.cancel_shielded_checkpoint()  # the writer gets its turn now, not after the caller

    def send_nowait(self, *frames: Frame) -> None:
        if self._full:
            raise Overloaded(f"more than {limits.SEND_QUEUE_BYTES} bytes wait on a {self.kind} channel")
        self._queue(*frames)

    async def receive(self) -> Frame:
        self._without_pause += 1
        if self._without_pause > BUNDLE_FRAMES or (self._inbox and not self._frames):
            await trio.lowlevel.checkpoint()
            self._without_pause = 0
        while not self._frames:
            if self._thrown is not None:
                raise self._thrown
            if self._unreadable is not None:
                raise ProtocolError(self._unreadable.message)
            if self._inbox:
                self._decode(self._inbox.popleft())
            elif self._ended:
                self._check_whole()
                raise trio.EndOfChannel
            elif self._broken is not None:
                raise type(self._broken)(self._broken.message)
            else:
                await self._more()
        return self._unless_refused(self._frames.popleft())

    def take_at_once(self, take: Callable[[Frame], bool]) -> None:
        self._take_at_once = take

    async def _more(self) -> None:
        """Wait for bytes: without end between two frames, with a minimum rate inside one."""
        self._without_pause = 0
        self._waited_on = True
        try:
            await self._until_arrived()
        finally:
            self._waited_on = False

    async def _until_arrived(self) -> None:
        if not self._decoder.buffered:
            await self._arrived.wait()
            return
        if self._slow is None or self._decoder.buffered - self._slow[1] >= limits.SLOWEST_FRAME_BYTES:
            self._slow = trio.current_time(), self._decoder.buffered
        with trio.move_on_at(self._slow[0] + FRAME_S) as waiting:
            await self._arrived.wait()
        if waiting.cancelled_caught:
            raise LinkBroken(
                f"a frame stopped coming: {self._decoder.buffered} bytes of it, then too few in {FRAME_S:g} s"
            )

    async def flush(self) -> None:
        await trio.lowlevel.checkpoint()
        await self._until_taken()
        if self._broken is not None:
            raise type(self._broken)(self._broken.message)

    async def _until_taken(self) -> None:
        while self._broken is None and self._connection.session.queued_bytes(self._id):
            await self._connection.written()

    def end_sending(self) -> None:
        self._connection.session.finish(self._id)
        self._connection.wake_writer()

    async def aclose(self) -> None:
        self._take_at_once = None
        self._connection.session.finish(self._id, reset_after=True)
        self._connection.wake_writer()
        with trio.move_on_after(CHANNEL_CLOSE_S):
            await self._until_taken()
        self._leave("the channel was closed")

    def abort(self) -> None:
        self._leave("the channel was closed", _CANCEL)

    @property
    def _full(self) -> bool:
        return self._connection.session.queued_bytes(self._id) >= limits.SEND_QUEUE_BYTES

    def _queue(self, *frames: Frame) -> None:
        if self._broken is not None:
            raise type(self._broken)(self._broken.message)
        encoded = [encode(frame) for frame in frames]
        size = sum(map(frame_size, encoded))
        self._connection.note_frames(len(frames))
        self._connection.session.send(self._id, *chain.from_iterable(encoded))
        self.counts.gave(size, len(frames))
        if size <= SMALL_FRAME_BYTES:
            self._connection.write_now()
        else:
            self._connection.wake_writer()

    def _decode(self, data: h2s.Data) -> None:
        self._connection.session.consumed(self._id, data.credit)
        self._connection.wake_writer()
        begun = self._decoder.buffered
        try:
            frames = self._decoder.feed(data.data)
        except ProtocolError as error:
            self._unreadable = ProtocolError(error.message)  # without the traceback, which holds the bytes
            self._decoder = FrameDecoder()
            self._unread.end()
            return
        self._unread.remove(begun + len(data.data) - self._decoder.buffered)
        self.counts.bytes_in += len(data.data)
        self.counts.frames_in += len(frames)
        if frames:
            self._slow = None
            self._decoder.max_frame_bytes = self._longest
        self._frames.extend(frames)

    def _check_whole(self) -> None:
        if self._decoder.buffered:
            raise ProtocolError(f"the channel ended inside a frame, {self._decoder.buffered} bytes of it had come")

    def _leave(self, why: str, code: int | None = None) -> None:
        self.fail(LinkBroken(why))
        while self._inbox:
            self._connection.session.consumed(self._id, self._inbox.popleft().credit)
        self._decoder = FrameDecoder()
        self._unread.end()
        self._take_at_once = None
        self._connection.forget(self._id, code)

    # -- called by the connection

    def deliver(self, data: h2s.Data) -> None:
        if not self._unread.add(len(data.data)):
            self._connection.session.consumed(self._id, data.credit)
            self.fail(Overloaded(f"more than {self._unread.account.most_bytes} bytes of one node wait to be read"))
            self.abort()
            return
        at_rest = self._waited_on and not (self._frames or self._inbox or self._decoder.buffered)
        self._inbox.append(data)
        if self._take_at_once is None or not at_rest or not self._handed_over(self._take_at_once):
            self._notify()

    def _handed_over(self, take: Callable[[Frame], bool]) -> bool:
        """Whether nothing of what came is left for `receive`. No error of one channel's user gets to the reader."""
        self._decode(self._inbox.popleft())
        try:
            while self._frames and self._connection.may_offer():
                if self._frames[0].kind == "refuse" or not take(self._frames[0]):
                    break
                self._frames.popleft()
        except Exception as error:
            self._thrown, self._take_at_once = error, None
            self._frames.clear()
            return False
        return not (self._frames or self._decoder.buffered or self._unreadable)

    def end(self) -> None:
        self._ended = True
        self._notify()

    def fail(self, error: SwarmError) -> None:
        if self._broken is None:
            self._broken = error
            self._notify()
            self._connection.notify_written()  # a sender may be waiting for room

    def _notify(self) -> None:
        self._arrived.set()
        self._arrived = trio.Event()


class Connection:
    """Runs one stream. `on_open` is called (by the reader; it must not wait) for channels the peer opens."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        *,
        client: bool,
        on_open: Callable[[DirectChannel], None] | None = None,
        stranger: bool = False,
        window_bytes: int = limits.STREAM_WINDOW_BYTES,
    ) -> None:
        """`stranger`: the other end has proved nothing, and has smaller budgets. `window_bytes`: what it may send on
        a channel ahead of the consumer."""
        self.session = h2s.H2Session(client=client, stranger=stranger, window_bytes=window_bytes)
        self._stream = stream
        self._bytes = stream if isinstance(stream, TlsStream) else PromptStream(stream)
        carrier = stream.transport if isinstance(stream, TlsStream) else stream
        self._carrier = carrier if isinstance(carrier, CarriedStream) else None
        self.route = DIRECT if self._carrier is None else self._carrier.route
        self._on_open = on_open
        self._offers = 0
        self._channels: dict[h2s.ChannelId, DirectChannel] = {}
        self._wake = trio.Event()
        self._written = trio.Event()
        self._ended = trio.Event()
        self._writing = False
        """The writer task is at it, or must be: something is left of what was written at once."""
        self._closing = False
        self.heard_bytes = 0
        """Read from the stream, whatever they were for."""

    @property
    def over(self) -> bool:
        """It has ended, or is about to: nothing can be opened on it."""
        return self._closing or self._ended.is_set() or self.session.closed

    async def wait_over(self) -> None:
        """Wait until it has ended."""
        await self._ended.wait()

    async def run(self) -> None:
        """Read and write until the connection ends, for whatever reason; the channels hear of it."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write_all, nursery.cancel_scope)
                nursery.start_soon(self._read_to_end, nursery.cancel_scope)
        finally:
            self._fail_channels(LinkBroken("the connection was closed"))
            self._ended.set()
            await trio.aclose_forcefully(self._stream)

    def open_channel(self, kind: str) -> DirectChannel:
        channel_id = self.session.open_channel(h2s.PATH_PREFIX + kind)
        channel = DirectChannel(self, channel_id, kind)
        self._channels[channel_id] = channel
        self.wake_writer()
        return channel

    def refuse(self, channel: DirectChannel, status: int) -> None:
        """Turn down a channel the peer opened, before anything was read from it."""
        self.session.accept(channel._id, status)
        channel.abort()

    async def aclose(self) -> None:
        """Let everything queued out, say goodbye, and wait for the peer to hang up, all within CHANNEL_CLOSE_S."""
        with trio.move_on_after(CHANNEL_CLOSE_S):
            while not self._ended.is_set() and (self._writing or not self.session.idle):
                await self.written()
            self._close_after_writing()
            await self._ended.wait()

    def note_frames(self, n: int) -> None:
        """So many more are about to be written."""
        if self._carrier is not None:
            self._carrier.note_frames(n)

    def wake_writer(self) -> None:
        if self.session.wants_write or self._closing:
            self._wake.set()

    def write_now(self) -> None:
        """Write all that may go, if the socket takes it without waiting; the writer task sees to the rest."""
        if self._writing or self._closing:
            self.wake_writer()
            return
        try:
            self._writing = not self._bytes.send_now(self.session.data_to_send())
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self._writing = True  # the writer task meets the same error, and it may end the connection
        if self._writing or self.session.wants_write:
            self._wake.set()
        else:
            self.notify_written()

    async def written(self) -> None:
        """Wait until something more was written, or the connection ended."""
        if not self._ended.is_set():
            await self._written.wait()

    def forget(self, channel: h2s.ChannelId, code: int | None) -> None:
        """A user left a channel; with a code it is reset, without it ends behind what is queued."""
        if self._channels.pop(channel, None) is None:
            return
        if code is not None or self.session.queued_bytes(channel):
            self.session.reset(channel, _CANCEL if code is None else code)
        self.wake_writer()

    # -- the reader

    async def _read_to_end(self, scope: trio.CancelScope) -> None:
        """A task of its own: to wake it within the caller's stack, all coroutines above it are resumed."""
        self._fail_channels(await self._read_all())
        scope.deadline = trio.current_time() + CHANNEL_CLOSE_S
        self._close_after_writing()

    async def _read_all(self) -> SwarmError:
        try:
            while True:
                data = await self._bytes.receive_some(limits.READ_BYTES)
                if not data:
                    return LinkBroken("the peer closed the connection")
                self._offers = BUNDLE_FRAMES
                self.heard_bytes += len(data)
                for event in self.session.receive_data(data, trio.current_time()):
                    self._take(event)
                self.wake_writer()
                if self.session.closed and not self._closing:
                    return LinkBroken("the peer ended the connection")
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            return LinkBroken(f"the connection broke: {error.__cause__ or error}")
        except ProtocolError as error:
            return error

    def may_offer(self) -> bool:
        """Whether the reader may hand on one more frame by itself of what it read last."""
        self._offers -= 1
        return self._offers >= 0

    def _take(self, event: h2s.Event) -> None:
        if isinstance(event, h2s.Closed):
            return
        channel = self._channels.get(event.channel)
        if isinstance(event, h2s.Opened):
            self._opened(event)
        elif channel is None:
            if isinstance(event, h2s.Data):
                self.session.consumed(event.channel, event.credit)
        elif isinstance(event, h2s.Data):
            channel.deliver(event)
        elif isinstance(event, h2s.Ended):
            channel.end()
        elif isinstance(event, h2s.Reset):
            self._channels.pop(event.channel)
            channel.fail(LinkBroken(f"the peer reset the channel (code {event.code})"))
        elif event.status != 200:
            self._channels.pop(event.channel)  # what follows on it is only the end of the refusal
            refusal, why = _REFUSALS.get(event.status, (LinkBroken, f"with status {event.status}"))
            channel.fail(refusal(f"the peer refused a {channel.kind} channel {why}"))

    def _opened(self, event: h2s.Opened) -> None:
        kind = event.path.removeprefix(h2s.PATH_PREFIX)
        if self._on_open is None or kind == event.path:
            self.session.accept(event.channel, 404)
            return
        if event.one_too_many:
            self.session.accept(event.channel, TOO_MANY)
            return
        channel = DirectChannel(self, event.channel, kind)
        self._channels[event.channel] = channel
        self._on_open(channel)

    def accept(self, channel: DirectChannel) -> None:
        """Take a channel the peer opened."""
        self.session.accept(channel._id)
        self.wake_writer()

    # -- the writer

    async def _write_all(self, scope: trio.CancelScope) -> None:
        try:
            while True:
                if self._writing or self.session.wants_write:
                    await self._write_some()
                elif self._closing:
                    return
                else:
                    await self._wake.wait()
                    self._wake = trio.Event()
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._fail_channels(LinkBroken(f"the connection broke: {error.__cause__ or error}"))
            scope.cancel()
        except trio.TooSlowError:
            self._fail_channels(LinkBroken(f"the peer did not read for {WRITE_S:g} s"))
            scope.cancel()

    async def _write_some(self) -> None:
        """One write of all that may go now: this is the bundle."""
        data = self.session.data_to_send()
        if data or self._writing:
            self._writing = True
            with trio.fail_after(WRITE_S):
                await self._bytes.send_all(data)
            self._writing = False
        self.notify_written()

    def notify_written(self) -> None:
        """Wake whoever waits in `written`, to look again."""
        self._written.set()
        self._written = trio.Event()

    def _close_after_writing(self) -> None:
        self._closing = True
        self.session.close()
        self.wake_writer()

    def _fail_channels(self, error: SwarmError) -> None:
        for channel in tuple(self._channels.values()):
            channel.fail(error)
        self._channels.clear()
        self.notify_written()
