"""Frames on their way to one channel: sent at once where that needs no waiting, else queued, bounded, and in order."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

import trio

from swarmnode.errors import LinkBroken, SwarmError
from swarmnode.wire.pipe import FramePipe

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarmnode.wire.frames import Frame

MAX_FRAMES = 4096
MAX_BYTES = 256 << 20
"""Frames, and bytes of body, that may wait here. What a ring has under way is bounded by its scheduler (a prompt piece
of a few MiB per stage, a row per session), so a longer queue means that the other end stopped reading."""


class Sender(Protocol):
    """What an outbox needs of a channel."""

    async def send(self, frame: Frame) -> None: ...

    def send_nowait(self, *frames: Frame) -> None: ...


class Outbox:
    """`post` never waits, so a router can call it for every frame; `run` joins it to a channel until it is cancelled.

    While nothing waits, `post` gives a frame straight to the channel: a queue and a task's turn in between would be
    paid by every token. What cannot go at once is queued, and `run` sends it in order.
    """

    def __init__(self, stamp: Callable[[Frame], Frame] | None = None) -> None:
        """Each frame is sent as `stamp` returns it, which is called in the step that posts it."""
        self._stamp = stamp or _as_it_is
        self._waiting: deque[Frame] = deque()
        self._bytes = 0
        self._arrived = trio.Event()
        self._idle: Sender | FramePipe | None = None
        """The channel, while nothing waits for it."""

    @property
    def empty(self) -> bool:
        """All that was posted has been given to the channel, and `run` holds one."""
        return self._idle is not None

    def post(self, *frames: Frame) -> None:
        """Send or queue frames, in one write where they are small. Raises LinkBroken when the other end has let too
        much pile up."""
        if self._bytes and self._bytes + sum(len(frame.body) for frame in frames) > MAX_BYTES:
            raise LinkBroken(f"the other end left {self._bytes} bytes unread")
        if self._waiting and len(self._waiting) + len(frames) > MAX_FRAMES:
            raise LinkBroken(f"the other end left {MAX_FRAMES} frames unread")
        stamped = [self._stamp(frame) for frame in frames]
        if self._idle is None:
            self._queue(stamped)
        elif not self._send_now(self._idle, stamped):
            self._idle = None
            self._arrived.set()

    async def run(self, channel: Sender | FramePipe) -> None:
        """Send what is posted; raises LinkBroken when the channel does. Then what was not sent waits for the next."""
        try:
            while True:
                await self._send_waiting(channel)
                self._arrived, self._idle = trio.Event(), channel
                await self._arrived.wait()
        finally:
            self._idle = None

    def _queue(self, frames: list[Frame]) -> None:
        self._waiting.extend(frames)
        self._bytes += sum(len(frame.body) for frame in frames)

    def _send_now(self, channel: Sender | FramePipe, frames: list[Frame]) -> bool:
        """False: `run` has to go on with them."""
        try:
            channel.send_nowait(*frames)
        except SwarmError:  # it is full, and `run` waits; or it broke, and `run` meets the same error
            self._queue(frames)
            return False
        return not (isinstance(channel, FramePipe) and channel.unsent)

    async def _send_waiting(self, channel: Sender | FramePipe) -> None:
        if isinstance(channel, FramePipe) and channel.unsent:
            await channel.send()
        while self._waiting:
            frame = self._waiting[0]
            await channel.send(frame)
            self._waiting.popleft()
            self._bytes -= len(frame.body)


def _as_it_is(frame: Frame) -> Frame:
    return frame
