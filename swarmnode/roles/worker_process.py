"""A stage worker as the node sees it: started, spoken to in frames, watched, and ended within a bound."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import trio

from swarmnode.errors import LoadFailed
from swarmnode.wire.deadlines import WORKER_EXIT_S, WORKER_TERM_S
from swarmnode.wire.pipe import FramePipe

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

LOG_LINES = 200
"""Lines of a worker's stderr kept for status and error messages."""
MAX_LINE_CHARS = 2000
READ_BYTES = 64 << 10


@asynccontextmanager
async def start_worker(environment: Mapping[str, str]) -> AsyncIterator[WorkerProcess]:
    """Fork a worker; it is gone when the block is left, however that happens.

    Called on the trio thread, which must be the main thread: PDEATHSIG follows the thread that forked, and a pool
    thread ends while its child still runs. Raises LoadFailed where this machine gives no process.
    """
    reaper = _Reaper(_fork(environment))
    process = reaper.process
    try:
        stdin, stdout, stderr = (_claim(stream) for stream in (process.stdin, process.stdout, process.stderr))
        pipe = FramePipe(stdout, stdin)
        try:
            async with trio.lowlevel.FdStream(stderr) as errors:
                yield WorkerProcess(reaper, pipe, errors)
        finally:
            pipe.close()
    finally:
        await reaper.stop()


def _fork(environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "swarmnode", "worker", "--parent", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **environment},
            start_new_session=True,  # a Ctrl-C in the terminal reaches the node alone, which ends its workers in order
        )
    except OSError as error:
        raise LoadFailed(f"a stage worker cannot be started: {error}") from error


class WorkerProcess:
    """A running worker: its pipe of frames and the tail of its log."""

    def __init__(self, reaper: _Reaper, pipe: FramePipe, errors: trio.lowlevel.FdStream) -> None:
        self.pipe = pipe
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        self.log_over = trio.Event()
        """It closed its stderr, and `log` has all that is kept of it."""
        self._reaper = reaper
        self._errors = errors

    @property
    def pid(self) -> int:
        return self._reaper.process.pid

    @property
    def ended(self) -> bool:
        return self._reaper.process.poll() is not None

    async def wait(self) -> int:
        """The exit code; negative for a signal."""
        return await self._reaper.wait()

    def kill(self) -> None:
        """SIGKILL now; leaving `start_worker` still reaps it."""
        self._reaper.process.kill()

    async def collect_log(self) -> None:
        """Keep the tail of stderr until the worker closes it."""
        rest = b""
        with suppress(trio.ClosedResourceError, trio.BrokenResourceError):
            while data := await self._errors.receive_some(READ_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                self.log.extend(line.decode(errors="replace")[:MAX_LINE_CHARS] for line in lines)
                rest = rest[-MAX_LINE_CHARS:]
        if rest:
            self.log.append(rest.decode(errors="replace"))
        self.log_over.set()


class _Reaper:
    """Waits for the process through its pidfd, and ends it: its input is closed, then SIGTERM, then SIGKILL."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._pidfd = os.pidfd_open(process.pid)

    async def wait(self) -> int:
        while (code := self.process.poll()) is None:
            await trio.lowlevel.wait_readable(self._pidfd)
        return code

    async def stop(self) -> None:
        """Shielded: however the caller ends, the worker does not outlive it."""
        with trio.CancelScope(shield=True):
            for patience_s, sign in ((WORKER_EXIT_S, signal.SIGTERM), (WORKER_TERM_S, signal.SIGKILL)):
                with trio.move_on_after(patience_s):
                    await self.wait()
                    break
                self.process.send_signal(sign)
            await self.wait()
            os.close(self._pidfd)


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _claim(stream: object) -> int:
    """A descriptor of our own for one end of a pipe; the Popen object's own is closed."""
    fd = os.dup(stream.fileno())  # type: ignore[attr-defined]
    stream.close()  # type: ignore[attr-defined]
    return fd
