"""Frames over a subprocess's pipes on trio: the node's end of a stage worker."""

from __future__ import annotations

import contextlib
import fcntl
from collections import deque
from typing import TYPE_CHECKING

import trio

from swarmnode.errors import LinkBroken
from swarmnode.wire.frames import FrameDecoder, encode, frame_size
from swarmnode.wire.traffic import Counts

if TYPE_CHECKING:
    from swarmnode.wire.frames import Buffer, Frame

PIPE_BYTES = 1 << 20
"""The largest pipe an ordinary user may have: a prompt piece goes through in a few wake-ups, not in forty."""
_JOIN_BYTES = 64 << 10
"""Smaller buffers are joined into one write; copying a larger one costs more than a system call."""


class FramePipe:
    """A worker's stdout (`receive_fd`) and stdin (`send_fd`); both are owned and closed here.

    One task receives and one sends. The pipe is its own queue: who does not receive lets the worker's writes block.
    """

    def __init__(self, receive_fd: int, send_fd: int) -> None:
        for fd in (receive_fd, send_fd):
            _enlarge(fd)
        self.counts = Counts()
        self._receive_stream = trio.lowlevel.FdStream(receive_fd)
        self._send_stream = trio.lowlevel.FdStream(send_fd)
        self._decoder = FrameDecoder()
        self._frames: deque[Frame] = deque()
        self._torn = False

    async def send(self, *frames: Frame) -> None:
        """Write the frames, in as few writes as they need. Raises LinkBroken when the worker's input is closed.

        A cancelled send leaves part of a frame in the pipe: nothing can be sent after it.
        """
        if self._torn:
            raise LinkBroken("an earlier frame for the worker was cut off")
        buffers = self._encode(frames)
        self._torn = True
        try:
            for data in _joined(buffers):
                await self._send_stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise LinkBroken("the worker's input is closed") from error
        self._torn = False

    async def receive(self) -> Frame | None:
        """The next frame; None when the worker closed its output between frames.

        Raises ProtocolError for bad frames, LinkBroken when the output ends inside one.
        """
        if self._frames:
            await trio.lowlevel.checkpoint()
        while not self._frames:
            data = await self._read()
            if not data:
                if self._decoder.buffered:
                    raise LinkBroken("the worker's output ended inside a frame")
                return None
            self.counts.bytes_in += len(data)
            frames = self._decoder.feed(data)
            self.counts.frames_in += len(frames)
            self._frames.extend(frames)
        return self._frames.popleft()

    def close(self) -> None:
        """Close both ends; the worker takes the end of its input as the order to end."""
        for stream in (self._send_stream, self._receive_stream):
            stream.close()

    def _encode(self, frames: tuple[Frame, ...]) -> list[Buffer]:
        buffers: list[Buffer] = []
        for frame in frames:
            encoded = encode(frame)
            self.counts.gave(frame_size(encoded))
            buffers.extend(part for part in encoded if len(part))
        return buffers

    async def _read(self) -> bytes | bytearray:
        try:
            return await self._receive_stream.receive_some(PIPE_BYTES)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise LinkBroken("the worker's output is closed") from error


def _enlarge(fd: int) -> None:
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):  # a machine-wide limit on pipes' memory; slower, not wrong
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)


def _joined(buffers: list[Buffer]) -> list[Buffer]:
    """Neighbouring small buffers as one."""
    joined: list[Buffer] = []
    small: list[Buffer] = []
    for buffer in buffers:
        if len(buffer) < _JOIN_BYTES:
            small.append(buffer)
            continue
        if small:
            joined.append(b"".join(small))
            small = []
        joined.append(buffer)
    return [*joined, b"".join(small)] if small else joined
