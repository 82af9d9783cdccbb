"""A TCP proxy that delays each direction by a fixed time and does not limit bandwidth: a long link on one machine.

`python -m benchmarks.proxy HOST:PORT --delay-ms 10` runs one; benchmarks import `delaying_proxy`. Bytes wait in a
queue while more is read, so a delay never slows the sender down. That the delay took effect is proved in
two ways: `measure_rtt_ms` sends an echo through a proxy of the same delay, and every proxy notes how long the bytes
of its real traffic stayed in it (`ProxiedAddress.held`).
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import statistics
import threading
import time
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from swarmnode.wire.address import Address, parse_address, require_loopback

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

READ_BYTES = 256 << 10
MAX_QUEUED_BYTES = 256 << 20
"""1 Gbit/s over two seconds of delay; a sender that fills it waits, so that a mistake cannot take all memory."""
CONNECT_S = 5.0
_PINGS = 50


@dataclass(slots=True)
class Held:
    """What went through one direction, and for how long it stayed."""

    chunks: int = 0
    bytes: int = 0
    total_ms: float = 0.0
    shortest_ms: float = float("inf")
    longest_ms: float = 0.0

    def note(self, n_bytes: int, held_s: float) -> None:
        held_ms = held_s * 1000
        self.chunks += 1
        self.bytes += n_bytes
        self.total_ms += held_ms
        self.shortest_ms = min(self.shortest_ms, held_ms)
        self.longest_ms = max(self.longest_ms, held_ms)

    @property
    def mean_ms(self) -> float:
        return self.total_ms / self.chunks if self.chunks else 0.0


@dataclass(frozen=True, slots=True)
class ProxiedAddress(Address):
    """Dial this instead of the target. `held` is (towards the target, back)."""

    held: tuple[Held, Held] = field(default_factory=lambda: (Held(), Held()), compare=False)


class _Line:
    """One direction of one connection. What was read waits until it is due, then for the sink to take it."""

    def __init__(self, source: socket.socket, sink: socket.socket, held: Held) -> None:
        self.source, self.sink, self.held = source, sink, held
        self.due: deque[tuple[float, memoryview]] = deque()
        """(when it was read, bytes that have waited long enough); empty bytes are the end."""
        self.queued_bytes = 0
        self.ended = False
        """Its source has ended."""
        self.over = False
        """And that was passed on."""

    @property
    def reads(self) -> bool:
        return not self.ended and self.queued_bytes <= MAX_QUEUED_BYTES


class DelayLoop:
    """Every connection of one proxy, in a plain loop for a thread: a study that shares its processors with the proxy
    measures less of it so. The delay is the same for all, so what is read is due in the order in which it came."""

    def __init__(self, listener: socket.socket, target: Address, delay_s: float, held: tuple[Held, Held]) -> None:
        self._listener, self._target, self._delay_s, self._held = listener, target, delay_s, held
        self._selector = selectors.DefaultSelector()
        self._lines: dict[socket.socket, tuple[_Line, _Line]] = {}
        """By socket: the line that it is the source of, and the one that it is the sink of."""
        self._watched: dict[socket.socket, int] = {}
        """What each socket wakes for; 0: nothing."""
        self._waiting: deque[tuple[float, _Line, bytes]] = deque()
        """(when it was read, its line, bytes), not due yet."""
        self._stopped, self._stop = socket.socketpair()

    def run(self) -> None:
        """Serve until `stop`."""
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._stopped, selectors.EVENT_READ)
        while not self._serve_once():
            pass
        for sock in (*self._lines, self._listener, self._stopped):
            sock.close()
        self._selector.close()

    def stop(self) -> None:
        """End `run`, and every connection with it; callable from any thread."""
        self._stop.close()

    def _serve_once(self) -> bool:
        """Whether it was stopped."""
        patience_s = self._waiting[0][0] + self._delay_s - time.monotonic() if self._waiting else None
        for key, events in self._selector.select(patience_s if patience_s is None else max(0.0, patience_s)):
            if key.fileobj is self._stopped:
                return True
            if key.fileobj is self._listener:
                self._accept()
            elif (lines := self._lines.get(key.fileobj)) is not None:  # type: ignore[call-overload]
                if events & selectors.EVENT_READ:
                    self._guarded(self._read, lines[0])
                if events & selectors.EVENT_WRITE:
                    self._guarded(self._write, lines[1])
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] + self._delay_s <= now:
            came_s, line, data = self._waiting.popleft()
            line.due.append((came_s, memoryview(data)))
            self._guarded(self._write, line)
        return False

    def _accept(self) -> None:
        try:
            near, _ = self._listener.accept()
        except OSError:  # it left again
            return
        try:
            far = socket.create_connection((self._target.host, self._target.port), timeout=CONNECT_S)
        except OSError:
            near.close()
            return
        there, back = _Line(near, far, self._held[0]), _Line(far, near, self._held[1])
        for sock, lines in ((near, (there, back)), (far, (back, there))):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._lines[sock], self._watched[sock] = lines, 0
            self._watch(sock)

    def _guarded(self, step: Callable[[_Line], None], line: _Line) -> None:
        """A connection that breaks on one side ends on both."""
        try:
            step(line)
        except BlockingIOError:
            pass
        except OSError:
            self._close(line)

    def _read(self, line: _Line) -> None:
        if not line.reads:  # a socket that hung up is told of whatever it is watched for
            return
        data = line.source.recv(READ_BYTES)
        line.queued_bytes += len(data)
        line.ended = not data
        self._waiting.append((time.monotonic(), line, data))
        if not line.reads:
            self._watch(line.source)

    def _write(self, line: _Line) -> None:
        """All that is due, or what the sink takes of it."""
        if line.sink not in self._lines:
            return
        while line.due:
            came_s, data = line.due[0]
            if not data:
                self._end(line)
                return
            try:
                done = line.sink.send(data)
            except BlockingIOError:
                break
            line.queued_bytes -= done
            line.held.note(done, time.monotonic() - came_s)
            line.due[0] = came_s, data[done:]
            if done == len(data):
                line.due.popleft()
        self._watch(line.sink)
        self._watch(line.source)

    def _watch(self, sock: socket.socket) -> None:
        """Wake for what this socket is wanted for, and for nothing else."""
        source_of, sink_of = self._lines[sock]
        events = (selectors.EVENT_READ if source_of.reads else 0) | (selectors.EVENT_WRITE if sink_of.due else 0)
        watched, self._watched[sock] = self._watched[sock], events
        if events == watched:
            return
        if not watched:
            self._selector.register(sock, events)
        elif not events:
            self._selector.unregister(sock)
        else:
            self._selector.modify(sock, events)

    def _end(self, line: _Line) -> None:
        line.due.clear()
        line.over = True
        line.sink.shutdown(socket.SHUT_WR)
        self._watch(line.sink)
        if all(each.over for each in self._lines[line.sink]):
            self._close(line)

    def _close(self, line: _Line) -> None:
        for sock in (line.source, line.sink):
            if self._lines.pop(sock, None) is not None:
                if self._watched.pop(sock):
                    self._selector.unregister(sock)
                sock.close()


@asynccontextmanager
async def delaying_proxy(
    target: Address,
    delay_ms: float,
    listen: Address = Address("127.0.0.1", 0),  # noqa: B008 - frozen
) -> AsyncIterator[ProxiedAddress]:
    """Serve connections to `target`, each direction `delay_ms` late (an RTT of twice that), while inside the block."""
    held = (Held(), Held())
    listener = socket.create_server((require_loopback(listen).host, listen.port))
    host, port = listener.getsockname()[:2]
    loop = DelayLoop(listener, target, delay_ms / 1000, held)
    thread = threading.Thread(target=loop.run, name="proxy", daemon=True)
    thread.start()
    try:
        yield ProxiedAddress(host, port, held)
    finally:
        loop.stop()
        thread.join()


async def measure_rtt_ms(delay_ms: float) -> float:
    """The median round trip of one byte through a proxy of this delay, in ms."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    echo_address = Address(*listener.socket.getsockname()[:2])
    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, _echo, [listener])
        async with (
            delaying_proxy(echo_address, delay_ms) as address,
            await trio.open_tcp_stream(address.host, address.port) as stream,
        ):
            times = [await _ping(stream) for _ in range(_PINGS)]
        nursery.cancel_scope.cancel()
    return statistics.median(times)


async def _echo(stream: trio.SocketStream) -> None:
    async for data in stream:
        await stream.send_all(data)


async def _ping(stream: trio.SocketStream) -> float:
    started = trio.current_time()
    await stream.send_all(b".")
    await stream.receive_some(1)
    return (trio.current_time() - started) * 1000


async def _run(target: Address, delay_ms: float, listen: Address) -> None:
    rtt_ms = await measure_rtt_ms(delay_ms)
    async with delaying_proxy(target, delay_ms, listen) as address:
        about = {"address": str(address), "target": str(target), "delay_ms": delay_ms, "measured_rtt_ms": rtt_ms}
        print(json.dumps(about), flush=True)
        await trio.sleep_forever()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Delay each direction of TCP connections to a target.")
    parser.add_argument("target", type=parse_address, help="HOST:PORT that connections go to")
    parser.add_argument("--delay-ms", type=float, default=10.0, help="one way; the RTT grows by twice this")
    parser.add_argument("--listen", type=parse_address, default=Address("127.0.0.1", 0), help="HOST:PORT to serve on")
    chosen = parser.parse_args(arguments)
    try:
        trio.run(_run, chosen.target, chosen.delay_ms, chosen.listen)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
