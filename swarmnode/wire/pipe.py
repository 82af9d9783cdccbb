"""Frames over a subprocess's pipes on trio: the node's end of a stage worker."""

from __future__ import annotations

import contextlib
import fcntl
import os
from typing import TYPE_CHECKING

import trio

from swarmnode.errors import LinkBroken, Overloaded
from swarmnode.wire.blocking import IOV_MAX, READ_BYTES, drop_front
from swarmnode.wire.frames import FrameDecoder, encode, frame_size
from swarmnode.wire.traffic import Counts

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from swarmnode.wire.frames import Buffer, Frame

PIPE_BYTES = 1 << 20
"""The largest pipe an ordinary user may have: a prompt piece goes through in a few wake-ups, not in forty."""


class FramePipe:
    """A worker's stdout (`receive_fd`) and stdin (`send_fd`); both are owned and closed here.

    One task receives and one sends. The pipe is its own queue: who does not receive lets the worker's writes block.
    Reads and writes are tried at once and wait only when they must; trio's `FdStream` waits a scheduler pass first,
    which every token would pay.
    """

    def __init__(self, receive_fd: int, send_fd: int) -> None:
        for fd in (receive_fd, send_fd):
            _enlarge(fd)
            os.set_blocking(fd, False)
        self.counts = Counts()
        self._receive_fd = receive_fd
        self._send_fd = send_fd
        self._decoder = FrameDecoder()
        self._unsent: list[Buffer] = []
        self._torn = False
        self._drained = False
        """The last read took all there was, so another would only be told to wait."""

    async def send(self, *frames: Frame) -> None:
        """Write the frames, in as few writes as the pipe takes, behind what `send_nowait` left. Raises LinkBroken when
        the worker's input is closed.

        A cancelled send leaves part of a frame in the pipe: nothing can be sent after it.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        self._queue(frames)
        self._torn = True
        while not self._write():
            await self._wait(trio.lowlevel.wait_writable, self._send_fd)
        self._torn = False
        await trio.lowlevel.cancel_shielded_checkpoint()

    def send_nowait(self, *frames: Frame) -> None:
        """Write what the pipe takes of some frames; what is `unsent` then needs a `send`, if only one of no frames.

        Raises Overloaded while an earlier frame is unsent, LinkBroken as `send` does.
        """
        if self._unsent:
            raise Overloaded("the pipe to the worker is full")
        self._queue(frames)
        self._write()

    @property
    def unsent(self) -> bool:
        return bool(self._unsent)

    def _queue(self, frames: tuple[Frame, ...]) -> None:
        if self._torn:
            raise LinkBroken("an earlier frame for the worker was cut off")
        self._unsent += self._encode(frames)

    def _write(self) -> bool:
        """False: the pipe is full, and something is left."""
        try:
            while self._unsent:
                drop_front(self._unsent, os.writev(self._send_fd, self._unsent[:IOV_MAX]))
        except BlockingIOError:
            return False
        except OSError as error:
            raise LinkBroken("the worker's input is closed") from error
        return True

    async def receive(self) -> list[Frame]:
        """What the worker wrote in one go; nothing when it closed its output between frames.

        Raises ProtocolError for bad frames, LinkBroken when the output ends inside one.
        """
        while True:
            data = await self._read()
            if not data:
                if self._decoder.buffered:
                    raise LinkBroken("the worker's output ended inside a frame")
                return []
            self.counts.bytes_in += len(data)
            frames = self._decoder.feed(data)
            self.counts.frames_in += len(frames)
            if frames:
                return frames

    def close(self) -> None:
        """Close both ends; the worker takes the end of its input as the order to end. Waiting calls get LinkBroken."""
        for fd in (self._receive_fd, self._send_fd):
            if fd >= 0:
                trio.lowlevel.notify_closing(fd)
                os.close(fd)
        self._receive_fd = self._send_fd = -1

    def _encode(self, frames: tuple[Frame, ...]) -> list[Buffer]:
        buffers: list[Buffer] = []
        for frame in frames:
            encoded = encode(frame)
            self.counts.gave(frame_size(encoded))
            buffers.extend(part for part in encoded if len(part))
        return buffers

    async def _read(self) -> bytes:
        waited = False
        while True:
            if self._drained:
                await self._wait(trio.lowlevel.wait_readable, self._receive_fd)
                waited, self._drained = True, False
            try:
                data = os.read(self._receive_fd, READ_BYTES)
            except BlockingIOError:
                self._drained = True
            except OSError as error:
                raise LinkBroken("the worker's output is closed") from error
            else:
                if not waited:
                    await trio.lowlevel.cancel_shielded_checkpoint()
                self._drained = 0 < len(data) < READ_BYTES
                return data

    async def _wait(self, ready: Callable[[int], Awaitable[None]], fd: int) -> None:
        try:
            await ready(fd)
        except trio.ClosedResourceError as error:
            raise LinkBroken("the pipe to the worker was closed") from error


def _enlarge(fd: int) -> None:
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        with contextlib.suppress(OSError):  # a machine-wide limit on pipes' memory; slower, not wrong
            fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
