"""Frames over file descriptors for a stage worker's threads: blocking, without trio."""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from typing import TYPE_CHECKING

from swarmnode.errors import LinkBroken
from swarmnode.wire.frames import FrameDecoder, encode

if TYPE_CHECKING:
    from swarmnode.wire.frames import Buffer, Frame

READ_BYTES = 1 << 20
"""As much as an enlarged pipe can hold."""
STEP_BYTES = 64 << 10
"""Room for a decode step's frame: the C library maps memory anew for every buffer beyond 128 KiB."""
IOV_MAX = 512
"""Buffers in one writev; the kernel's limit is 1024."""


class FrameReader:
    """Reads frames from `fd`; used by one thread."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._decoder = FrameDecoder()
        self._frames: deque[Frame] = deque()
        self._most = STEP_BYTES

    def read(self) -> Frame | None:
        """The next frame; None when the other end closed the pipe between frames.

        Raises ProtocolError for bad frames, LinkBroken when the pipe closes inside one.
        """
        while not self._frames:
            data = os.read(self._fd, self._most)
            self._most = READ_BYTES if len(data) == self._most else STEP_BYTES
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


class SharedWriter:
    """Writes frames that any thread posts to `fd`, in the order posted.

    What the pipe takes is written by the thread that posts, while nothing else waits: a hand-over to a thread that must
    get the interpreter's lock first would be paid by every token. The rest is left to the thread that calls `run`.
    """

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._unsent: list[Buffer] = []
        self._changed = threading.Condition()
        self._closed = False

    def post(self, *frames: Frame) -> None:
        """Never waits for the other end. Raises LinkBroken when nobody reads, ProtocolError for a bad frame."""
        buffers = [part for frame in frames for part in encode(frame) if len(part)]
        with self._changed:
            idle = not self._unsent
            self._unsent += buffers
            if not idle or not self._write():
                self._changed.notify()

    def close(self) -> None:
        """`run` returns behind what was posted."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def run(self) -> None:
        """Write what `post` could not, until `close`. Raises LinkBroken when nobody reads."""
        ready = select.poll()
        ready.register(self._fd, select.POLLOUT)
        while self._await_unsent():
            ready.poll()
            with self._changed:
                self._write()

    def _await_unsent(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._unsent or self._closed)
            return bool(self._unsent)

    def _write(self) -> bool:
        """False: the pipe is full, and something is left."""
        try:
            while self._unsent:
                drop_front(self._unsent, os.writev(self._fd, self._unsent[:IOV_MAX]))
        except BlockingIOError:
            return False
        except BrokenPipeError as error:
            raise LinkBroken("the pipe's other end is closed") from error
        return True


def drop_front(buffers: list[Buffer], n_bytes: int) -> None:
    """Take `n_bytes` off the front."""
    done = 0
    while done < len(buffers) and n_bytes >= len(buffers[done]):
        n_bytes -= len(buffers[done])
        done += 1
    del buffers[:done]
    if n_bytes:
        buffers[0] = memoryview(buffers[0])[n_bytes:]
