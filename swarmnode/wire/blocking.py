"""Frames over file descriptors for a stage worker's threads: blocking, without trio."""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING

from swarmnode.errors import LinkBroken
from swarmnode.wire.frames import FrameDecoder, encode

if TYPE_CHECKING:
    from swarmnode.wire.frames import Buffer, Frame

READ_BYTES = 1 << 20
"""As much as an enlarged pipe can hold."""
IOV_MAX = 512
"""Buffers in one writev; the kernel's limit is 1024."""


class FrameReader:
    """Reads frames from `fd`; used by one thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._decoder = FrameDecoder()
        self._frames: deque[Frame] = deque()

    def read(self) -> Frame | None:
        """The next frame; None when the other end closed the pipe between frames.

        Raises ProtocolError for bad frames, LinkBroken when the pipe closes inside one.
        """
        while not self._frames:
            data = os.read(self._fd, READ_BYTES)
            if not data:
                self._check_whole()
                return None
            self._frames.extend(self._decoder.feed(data))
        return self._frames.popleft()

    def _check_whole(self) -> None:
        if self._decoder.buffered:
            raise LinkBroken(f"the pipe closed inside a frame, after {self._decoder.buffered} bytes of it")


class FrameWriter:
    """Writes frames to `fd`; used by one thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, *frames: Frame) -> None:
        """Write all of them, in as few system calls as the pipe takes. Raises LinkBroken when nobody reads."""
        buffers: list[Buffer] = [part for frame in frames for part in encode(frame) if len(part)]
        try:
            while buffers:
                drop_front(buffers, os.writev(self._fd, buffers[:IOV_MAX]))
        except BrokenPipeError as error:
            raise LinkBroken("the pipe's other end is closed") from error


def drop_front(buffers: list[Buffer], n_bytes: int) -> None:
    """Take `n_bytes` off the front."""
    done = 0
    while done < len(buffers) and n_bytes >= len(buffers[done]):
        n_bytes -= len(buffers[done])
        done += 1
    del buffers[:done]
    if n_bytes:
        buffers[0] = memoryview(buffers[0])[n_bytes:]
