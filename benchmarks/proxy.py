"""A TCP proxy that delays each direction by a fixed time and does not limit bandwidth: a long link on one machine.

`python -m benchmarks.proxy HOST:PORT --delay-ms 10` runs one; benchmarks import `delaying_proxy`. Bytes wait in a
queue with a delivery task of its own, so a delay never slows the sender down. That the delay took effect is proved in
two ways: `measure_rtt_ms` sends an echo through a proxy of the same delay, and every proxy notes how long the bytes
of its real traffic stayed in it (`ProxiedAddress.held`).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from swarmnode.wire.address import Address, parse_address, require_loopback

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

READ_BYTES = 256 << 10
MAX_QUEUED_BYTES = 256 << 20
"""1 Gbit/s over two seconds of delay; a sender that fills it waits, so that a mistake cannot take all memory."""
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
    """One direction of one connection: a queue of (delivery time, bytes)."""

    def __init__(self, delay_s: float, held: Held) -> None:
        self._delay_s = delay_s
        self._held = held
        self._queue: deque[tuple[float, bytes | bytearray]] = deque()
        self._queued = 0
        self._ended = False
        self._changed = trio.Event()

    async def take(self, source: trio.SocketStream) -> None:
        """Read for as long as the source sends."""
        try:
            while data := await source.receive_some(READ_BYTES):
                self._queue.append((trio.current_time() + self._delay_s, data))
                self._queued += len(data)
                self._notify()
                while self._queued > MAX_QUEUED_BYTES:
                    await self._changed.wait()
        finally:
            self._ended = True
            self._notify()

    async def deliver(self, sink: trio.SocketStream) -> None:
        """Write everything when its time has come, then pass the end on."""
        while self._queue or not self._ended:
            if not self._queue:
                await self._changed.wait()
                continue
            due, data = self._queue[0]
            await trio.sleep_until(due)
            self._queue.popleft()
            await sink.send_all(data)
            self._queued -= len(data)
            self._held.note(len(data), trio.current_time() - due + self._delay_s)
            self._notify()
        await trio.sleep(self._delay_s)
        await sink.send_eof()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


@asynccontextmanager
async def delaying_proxy(
    target: Address,
    delay_ms: float,
    listen: Address = Address("127.0.0.1", 0),  # noqa: B008 - frozen
) -> AsyncIterator[ProxiedAddress]:
    """Serve connections to `target`, each direction `delay_ms` late (an RTT of twice that), while inside the block."""
    held = (Held(), Held())
    (listener,) = await trio.open_tcp_listeners(listen.port, host=require_loopback(listen).host)
    host, port = listener.socket.getsockname()[:2]

    async def serve(near: trio.SocketStream) -> None:
        try:
            far = await trio.open_tcp_stream(target.host, target.port)
        except OSError:
            await near.aclose()
            return
        await _join(near, far, delay_ms / 1000, held)

    async with trio.open_nursery() as nursery:
        await nursery.start(trio.serve_listeners, serve, [listener])
        yield ProxiedAddress(host, port, held)
        nursery.cancel_scope.cancel()


async def _join(near: trio.SocketStream, far: trio.SocketStream, delay_s: float, held: tuple[Held, Held]) -> None:
    async with near, far, trio.open_nursery() as nursery:
        for source, sink, noted in ((near, far, held[0]), (far, near, held[1])):
            line = _Line(delay_s, noted)
            nursery.start_soon(_until_broken, line.take, source, nursery.cancel_scope)
            nursery.start_soon(_until_broken, line.deliver, sink, nursery.cancel_scope)


async def _until_broken(
    job: Callable[[trio.SocketStream], Awaitable[None]], stream: trio.SocketStream, scope: trio.CancelScope
) -> None:
    try:
        await job(stream)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        scope.cancel()


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
