"""A TCP proxy that spoils what passes, per direction and while it runs; every toxic counts what it did.

After Toxiproxy's list: latency, bandwidth, a cut one way (bytes vanish, the connection stays), reset, slicer, corrupt,
stall. It runs trio in a thread of its own, so that blocking tests of real processes can turn toxics on and off.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Iterator

READ_BYTES = 64 << 10
FIFO_BYTES = 256 << 10
"""What a home router's queue holds before its senders must wait."""
STEP_S = 0.01
NOWHERE = ("127.0.0.1", 9)
"""Nobody listens there."""
CLOSE_S = 5.0


@dataclass
class Effects:
    """What a direction's toxics did: a test that saw nothing of them proved nothing."""

    passed_bytes: int = 0
    delayed_chunks: int = 0
    limited_s: float = 0.0
    vanished_bytes: int = 0
    corrupted_bytes: int = 0
    slices: int = 0
    stalled_s: float = 0.0


@dataclass
class Direction:
    """The toxics of one direction of all connections; change them while it runs."""

    latency_s: float = 0.0
    uplink: Uplink | None = None
    cut: bool = False
    """Bytes vanish, and neither end hears of it."""
    stalled: bool = False
    """Nothing is passed on, so the sender's queue fills; what it sent comes late, when this is over."""
    slice_bytes: int = 0
    corrupt_every: int = 0
    """Flip a bit of every so many'th byte."""
    effects: Effects = field(default_factory=Effects)


class Uplink:
    """A token bucket that several directions may share, of several proxies, too: what a node's connections all go out
    by."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0
        """When all that was taken so far has gone out, by the clock that all threads share."""

    def wait_s(self, n_bytes: int) -> float:
        """Take a place in the line; seconds until these bytes have gone out."""
        with self._lock:
            now = time.monotonic()
            self._free_s = max(self._free_s, now) + n_bytes / self.bytes_per_s
            return self._free_s - now

    def overfull_s(self) -> float:
        """Until its queue holds no more than FIFO_BYTES."""
        return max(0.0, self._free_s - time.monotonic() - FIFO_BYTES / self.bytes_per_s)


class ToxicProxy:
    """Connections to `target`, which may be set later; `there` and `back` hold the toxics of the two directions. While
    it is `closed`, nothing more is let through."""

    def __init__(self, target: tuple[str, int] = NOWHERE) -> None:
        self.there, self.back = Direction(), Direction()
        self.closed = False
        self.connections = 0
        """That were let through, ever."""
        self.resets = 0
        self.address = ("", 0)
        self.target = target
        self.dialers: frozenset[int] | None = None
        """The processes whose connections from now on the toxics are for, as where one machine's lines are cut; None:
        everybody's."""
        self._streams: set[trio.SocketStream] = set()
        self._up = threading.Event()
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()
        self._thread = threading.Thread(target=trio.run, args=(self._run,), daemon=True)

    @property
    def place(self) -> str:
        """What to advertise."""
        host, port = self.address
        return f"{host}:{port}"

    def start(self) -> None:
        self._thread.start()
        if not self._up.wait(CLOSE_S):
            raise RuntimeError("the proxy did not come up")

    def close(self) -> None:
        if self._token is not None:
            self._token.run_sync_soon(self._scope.cancel)
        self._thread.join(CLOSE_S)

    def reset(self) -> None:
        """RST all connections that are up, at both ends."""
        if self._token is not None:
            self._token.run_sync_soon(self._reset_all)

    def hang_up(self) -> None:
        """End all connections that are up, at both ends and in good order."""
        if self._token is not None:
            self._token.run_sync_soon(self._end_all)

    async def _run(self) -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.address = listener.socket.getsockname()[:2]
        self._token = trio.lowlevel.current_trio_token()
        with self._scope:
            self._up.set()
            await trio.serve_listeners(self._serve, [listener])

    def _reset_all(self) -> None:
        self.resets += len(self._streams)
        for stream in list(self._streams):
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stream.socket.close()

    def _end_all(self) -> None:
        for stream in self._streams:
            with suppress(OSError):  # it has already gone
                stream.socket.shutdown(socket.SHUT_RDWR)

    async def _serve(self, near: trio.SocketStream) -> None:
        if self.closed:
            await near.aclose()
            return
        try:
            far = await trio.open_tcp_stream(*self.target)
        except OSError:
            await near.aclose()
            return
        self.connections += 1
        self._streams |= {near, far}
        try:
            async with near, far, trio.open_nursery() as nursery:
                there, back = self._ways(near)
                nursery.start_soon(self._carry, near, far, there, nursery.cancel_scope)
                nursery.start_soon(self._carry, far, near, back, nursery.cancel_scope)
        finally:
            self._streams -= {near, far}

    def _ways(self, near: trio.SocketStream) -> tuple[Direction, Direction]:
        if self.dialers is None or any(_dialed(pid, near.socket) for pid in self.dialers):
            return self.there, self.back
        return Direction(), Direction()

    async def _carry(
        self, source: trio.SocketStream, sink: trio.SocketStream, way: Direction, both: trio.CancelScope
    ) -> None:
        """Take and deliver in two tasks: latency must not slow the sender down."""
        send, receive = trio.open_memory_channel[tuple[float, bytes]](1 << 16)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_deliver, receive, sink, way)
                async with send:
                    while data := await self._take(source, way):
                        await _spoil(data, way, send)
        except* (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            both.cancel()

    async def _take(self, source: trio.SocketStream, way: Direction) -> bytes:
        data = bytes(await source.receive_some(READ_BYTES))
        while way.stalled:
            await trio.sleep(STEP_S)
            way.effects.stalled_s += STEP_S
        return data


async def _spoil(data: bytes, way: Direction, send: trio.MemorySendChannel[tuple[float, bytes]]) -> None:
    if way.cut:
        way.effects.vanished_bytes += len(data)
        return
    if way.corrupt_every:
        data = _corrupted(data, way)
    for piece in _sliced(data, way):
        due_s = trio.current_time() + way.latency_s
        way.effects.delayed_chunks += way.latency_s > 0
        if way.uplink is not None:
            wait_s = way.uplink.wait_s(len(piece))
            way.effects.limited_s += wait_s
            due_s += wait_s
        await send.send((due_s, piece))
        if way.uplink is not None:  # while its queue is full the sender waits, as TCP makes it
            await trio.sleep(way.uplink.overfull_s())


def _corrupted(data: bytes, way: Direction) -> bytes:
    spoilt = bytearray(data)
    for index in range(way.corrupt_every - 1, len(spoilt), way.corrupt_every):
        spoilt[index] ^= 1
        way.effects.corrupted_bytes += 1
    return bytes(spoilt)


def _sliced(data: bytes, way: Direction) -> Iterator[bytes]:
    size = way.slice_bytes or len(data)
    for start in range(0, len(data), size):
        way.effects.slices += way.slice_bytes > 0
        yield data[start : start + size]


async def _deliver(
    receive: trio.MemoryReceiveChannel[tuple[float, bytes]], sink: trio.SocketStream, way: Direction
) -> None:
    async for due_s, data in receive:
        await trio.sleep_until(due_s)
        await sink.send_all(data)
        way.effects.passed_bytes += len(data)
    await sink.send_eof()


def _dialed(pid: int, accepted: trio.socket.SocketType) -> bool:
    """Whether the other end of an IPv4 connection within this machine is a socket of that process."""
    ends = [
        f"{int.from_bytes(socket.inet_aton(host), 'little'):08X}:{port:04X}"
        for host, port in (accepted.getpeername(), accepted.getsockname())
    ]
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    inodes = {f"socket:[{row[9]}]" for row in rows if row[1:3] == ends}
    return any(_target(entry) in inodes for entry in Path(f"/proc/{pid}/fd").glob("*"))


def _target(link: Path) -> str:
    """Of a descriptor, unless it was closed meanwhile."""
    with suppress(FileNotFoundError):
        return os.readlink(link)
    return ""


@contextmanager
def toxic_proxy(target: tuple[str, int] = NOWHERE) -> Iterator[ToxicProxy]:
    proxy = ToxicProxy(target)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.close()
