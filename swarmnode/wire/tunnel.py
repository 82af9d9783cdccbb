"""A stream through the coordinator: the bytes of an inner TLS in `tunnel` frames, which the relay cannot read.

Neither end waits for the other: what is written is queued on the way, within the bounds of its channels. A frame says
how many frames of the inner link its bytes hold, so that the relay can count them; it has no other way to know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from swarmnode.errors import ProtocolError, SwarmError
from swarmnode.wire.carried import CarriedStream
from swarmnode.wire.frames import Frame
from swarmnode.wire.limits import MAX_CHUNK_BYTES
from swarmnode.wire.routes import RELAYED, worst

if TYPE_CHECKING:
    from swarmnode.wire.frames import Buffer
    from swarmnode.wire.link import Channel


class TunnelStream(CarriedStream):
    """One end, over a `relay` channel that the coordinator has joined, or will join, to another."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self.route = worst((RELAYED, channel.route))
        self._channel = channel

    async def send_all(self, data: Buffer) -> None:
        view, frames = memoryview(data), self.take_frames()
        try:
            for start in range(0, len(view), MAX_CHUNK_BYTES):
                await self._channel.send(Frame("tunnel", {"n": frames}, view[start : start + MAX_CHUNK_BYTES]))
                frames = 0  # the first part stands for all of them
        except SwarmError as error:
            raise trio.BrokenResourceError(error.message) from error

    async def next_part(self) -> bytes | bytearray | memoryview:
        try:
            frame = await self._channel.receive()
            if frame.kind != "tunnel":
                raise ProtocolError(f"a tunnel brought {frame.kind}")
        except trio.EndOfChannel:
            return b""
        except SwarmError as error:
            raise trio.BrokenResourceError(error.message) from error
        return frame.body

    async def aclose(self) -> None:
        await self._channel.aclose()
