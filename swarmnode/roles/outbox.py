"""Frames on their way to one channel: queued without waiting, sent by one task, bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from swarmnode.errors import LinkBroken

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarmnode.wire.frames import Frame
    from swarmnode.wire.link import Channel
    from swarmnode.wire.pipe import FramePipe

MAX_FRAMES = 4096
MAX_BYTES = 256 << 20
"""Frames, and bytes of body, that may wait here. What a ring has under way is bounded by its scheduler (a prompt piece
of a few MiB per stage, a row per session), so a longer queue means that the other end stopped reading."""


class Outbox:
    """`post` never waits, so a router can call it for every frame; `run` sends in order until it is cancelled."""

    def __init__(self) -> None:
        self._send, self._receive = trio.open_memory_channel["Frame"](MAX_FRAMES)
        self._bytes = 0

    def post(self, frame: Frame) -> None:
        """Queue a frame; raises LinkBroken when the other end has let too much pile up."""
        if self._bytes and self._bytes + len(frame.body) > MAX_BYTES:
            raise LinkBroken(f"the other end left {self._bytes} bytes unread")
        try:
            self._send.send_nowait(frame)
        except trio.WouldBlock:
            raise LinkBroken(f"the other end left {MAX_FRAMES} frames unread") from None
        self._bytes += len(frame.body)

    async def run(self, channel: Channel | FramePipe, stamp: Callable[[Frame], Frame] = lambda frame: frame) -> None:
        """Send what is posted, each frame as `stamp` returns it; raises LinkBroken when the channel does."""
        async for frame in self._receive:
            await channel.send(stamp(frame))
            self._bytes -= len(frame.body)
