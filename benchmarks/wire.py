"""One hop of the wire, worker → node → link → node → worker, in four processes, against a bare socket echo in two.

`python -m benchmarks.wire [--plain] [--json]`. Two fake workers speak frames on their pipes, two nodes route them by
header over a direct link; a hop is half a round trip. `added_ms` is what the hop costs over the bare socket's.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio
from rich.table import Table

from swarmnode.cli.output import console
from swarmnode.ids import BootId, NodeId, RingId
from swarmnode.ring.messages import Group, Piece, Row
from swarmnode.ring.work import Activation
from swarmnode.roles.enrolment import certify_self
from swarmnode.roles.identity import NodeIdentity, SwarmAuthority
from swarmnode.roles.outbox import Outbox
from swarmnode.wire.address import Address, parse_address
from swarmnode.wire.blocking import FrameReader, FrameWriter
from swarmnode.wire.bodies import pack_body, unpack_body
from swarmnode.wire.direct import DirectTransport
from swarmnode.wire.frames import Frame
from swarmnode.wire.lane import LaneReceiver, LaneSender
from swarmnode.wire.link import Channel, Hello, Identity
from swarmnode.wire.pipe import FramePipe
from swarmnode.wire.ring_codec import to_frame
from swarmnode.wire.tls import SwarmTls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

SIZES = {"1 KB": 1 << 10, "16 KB": 16 << 10, "2.6 MB": 256 * 5120 * 2}
"""A decode row of hidden size 512 and 8192, and a prompt piece of 256 positions of hidden size 5120, all bf16."""
_WARM_UP = 50
_BUDGET_BYTES = 400 << 20
"""Round trips of a size stop here, so that the large one does not take minutes."""


def rounds(size: int, asked: int) -> int:
    return max(20, min(asked, _BUDGET_BYTES // size))


def timed(step: Callable[[], object], n: int) -> list[float]:
    """Half of each round trip in ms."""
    for _ in range(min(_WARM_UP, n)):
        step()
    times = []
    for _ in range(n):
        started = time.perf_counter()
        step()
        times.append((time.perf_counter() - started) * 500)
    return times


def summary(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=100)
    return {"median_ms": statistics.median(times), "p95_ms": cuts[94]}


# -- the bare socket


def raw_echo(listener: socket.socket) -> None:
    """Child process: send back what comes, message by message."""
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with closing(connection):
        while length := connection.recv(4, socket.MSG_WAITALL):
            connection.sendall(length + connection.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL))


def measure_raw(asked: int) -> dict[str, dict[str, float]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.set_inheritable(True)
        child = start_part("raw", str(listener.fileno()), pass_fds=(listener.fileno(),))
        client = socket.create_connection(listener.getsockname())
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    results = {}
    with closing(client):
        for name, size in SIZES.items():
            message = size.to_bytes(4, "big") + bytes(size)

            def step(message: bytes = message) -> None:
                client.sendall(message)
                client.recv(len(message), socket.MSG_WAITALL)

            results[name] = summary(timed(step, rounds(size, asked)))
    child.wait()
    return results


# -- the workers


def hop_frame(size: int) -> Frame:
    if size <= 16 << 10:
        return to_frame(Group((Row(1, 0, 7),), Activation("bfloat16", (1, size // 2), bytes(size)), (1.5,)))  # type: ignore[arg-type]
    ids = tuple(range(256))
    return to_frame(Piece(1, 0, 0, ids, True, Activation("bfloat16", (256, size // 512), bytes(size))))  # type: ignore[arg-type]


def measuring_worker(asked: int) -> None:
    """Child process: round trips through everything; the results leave as one `stats` frame."""
    reader, writer = FrameReader(0), FrameWriter(1)
    results = {}
    for name, size in SIZES.items():
        frame = hop_frame(size)

        def step(frame: Frame = frame) -> None:
            writer.write(frame)
            back = reader.read()
            if back is None or len(back.body) != len(frame.body):
                raise SystemExit("the echo came back wrong")

        results[name] = summary(timed(step, rounds(size, asked)))
    writer.write(Frame("stats", {}, pack_body(results)))
    reader.read()


def echoing_worker() -> None:
    """Child process: a stage that computes nothing."""
    reader, writer = FrameReader(0), FrameWriter(1)
    while (frame := reader.read()) is not None:
        writer.write(frame)


# -- the nodes


def transport(folder: str) -> tuple[DirectTransport, Identity]:
    """One node certificate serves both ends; without a folder there is no TLS."""
    if not folder:
        return DirectTransport(None), Identity(NodeId("bench"), BootId("bench-1"), "bench")
    kept = NodeIdentity.open(Path(folder))
    return DirectTransport(SwarmTls(kept.files)), Identity(kept.node, BootId("bench-1"), "bench", ("peer",))


def make_credentials(folder: Path) -> None:
    kept = NodeIdentity.open(folder)
    certify_self(SwarmAuthority.open(kept, time.time()), kept, ("peer",), time.time())


class Route:
    """A node with one worker: frames of the worker to the link, frames of the link to the worker."""

    def __init__(self, worker: subprocess.Popen[bytes], out: str, back: str) -> None:
        assert worker.stdout is not None
        assert worker.stdin is not None
        self.pipe = FramePipe(os.dup(worker.stdout.fileno()), os.dup(worker.stdin.fileno()))
        worker.stdout.close()
        worker.stdin.close()
        sender = LaneSender(RingId("bench"), out, (1, 0))
        self._receiver = LaneReceiver(RingId("bench"), back, (1, 0))
        self._to_next, self._to_worker = Outbox(sender.stamp), Outbox()
        self.results: dict[str, Any] = {}

    async def run_until_measured(self, channel: Channel) -> None:
        async with self._joined(channel) as nursery:
            nursery.start_soon(self._read_link, channel)
            await self._read_worker()

    async def run_until_link_ends(self, channel: Channel) -> None:
        async with self._joined(channel) as nursery:
            nursery.start_soon(self._read_worker)
            await self._read_link(channel)

    @asynccontextmanager
    async def _joined(self, channel: Channel) -> AsyncIterator[trio.Nursery]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._to_next.run, channel)
            nursery.start_soon(self._to_worker.run, self.pipe)
            yield nursery
            nursery.cancel_scope.cancel()

    async def _read_worker(self) -> None:
        while frames := await self.pipe.receive():
            for frame in frames:
                if frame.kind == "stats":
                    self.results = unpack_body(frame.body)
                    return
                self._to_next.post(frame)

    async def _read_link(self, channel: Channel) -> None:
        async for frame in channel:
            accepted = self._receiver.accept(frame)
            if accepted is not None:
                self._to_worker.post(accepted)


async def far_node(credentials: str) -> None:
    """Child process: prints its address, serves one link, ends with it."""
    route = Route(start_part("echoing-worker", stdin=subprocess.PIPE), "tok", "act")
    served = trio.Event()
    direct, identity = transport(credentials)

    async def handler(kind: str, hello: Hello, channel: Channel) -> None:
        try:
            await route.run_until_link_ends(channel)
        finally:
            route.pipe.close()
            served.set()

    async with trio.open_nursery() as nursery:

        async def listen(*, task_status: trio.TaskStatus[Address]) -> None:
            await direct.listen(Address("127.0.0.1", 0), handler, identity, task_status=task_status)

        print(await nursery.start(listen), flush=True)
        await served.wait()
        nursery.cancel_scope.cancel()


async def near_node(far: Address, asked: int, credentials: str) -> None:
    """Child process: dials, lets its worker measure, prints what it measured."""
    route = Route(start_part("measuring-worker", str(asked), stdin=subprocess.PIPE), "act", "tok")
    direct, identity = transport(credentials)
    async with direct.dial(far, "steps", identity) as channel:
        await route.run_until_measured(channel)
    route.pipe.close()
    print(json.dumps(route.results), flush=True)


# -- the command


def start_part(*arguments: str, pass_fds: Sequence[int] = (), stdin: int | None = None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.wire", "--part", *arguments]
    return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, pass_fds=pass_fds)


def measure_hop(asked: int, credentials: str) -> dict[str, dict[str, float]]:
    """`credentials`: the folder of `make_credentials`; empty: without TLS."""
    far = start_part("far-node", credentials)
    assert far.stdout is not None
    address = far.stdout.readline().decode().strip()
    near = start_part("near-node", address, str(asked), credentials)
    output, _ = near.communicate()
    far.communicate()
    if near.returncode or far.returncode:
        raise SystemExit("a node of the benchmark failed; see above")
    results: dict[str, dict[str, float]] = json.loads(output)
    return results


def rows(hop: dict[str, dict[str, float]], raw: dict[str, dict[str, float]]) -> Iterator[dict[str, Any]]:
    for name, size in SIZES.items():
        hop_ms, raw_ms = hop[name]["median_ms"], raw[name]["median_ms"]
        yield {
            "size": name,
            "bytes": size,
            "hop_ms": round(hop_ms, 4),
            "hop_p95_ms": round(hop[name]["p95_ms"], 4),
            "raw_ms": round(raw_ms, 4),
            "added_ms": round(hop_ms - raw_ms, 4),
            "ratio": round(hop_ms / raw_ms, 2),
        }


def show(results: list[dict[str, Any]]) -> None:
    table = Table(title="One hop: worker → node → link → node → worker (medians)")
    for column in ("size", "hop ms", "p95 ms", "bare socket ms", "added ms", "ratio"):
        table.add_column(column, justify="right")
    for row in results:
        columns = ("size", "hop_ms", "hop_p95_ms", "raw_ms", "added_ms", "ratio")
        table.add_row(*(str(row[column]) for column in columns))
    console().print(table)


def run_part(name: str, arguments: list[str]) -> None:
    match name, arguments:
        case "raw", [fd]:
            raw_echo(socket.socket(fileno=int(fd)))
        case "measuring-worker", [asked]:
            measuring_worker(int(asked))
        case "echoing-worker", []:
            echoing_worker()
        case "far-node", [credentials]:
            trio.run(far_node, credentials)
        case "near-node", [address, asked, credentials]:
            trio.run(near_node, parse_address(address), int(asked), credentials)
        case _:
            raise SystemExit(f"unknown part {name} {arguments}")


def main() -> None:
    parser = argparse.ArgumentParser(description="What one hop of the wire costs.")
    parser.add_argument("--rounds", type=int, default=1000, help="round trips per size (fewer for the large one)")
    parser.add_argument("--plain", action="store_true", help="without TLS, to see what it costs")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.part:
        run_part(chosen.part[0], chosen.part[1:])
        return
    with tempfile.TemporaryDirectory() as folder:
        if not chosen.plain:
            make_credentials(Path(folder))
        hop = measure_hop(chosen.rounds, "" if chosen.plain else folder)
    results = list(rows(hop, measure_raw(chosen.rounds)))
    show(results)
    if chosen.json:
        print(json.dumps({"benchmark": "wire", "tls": not chosen.plain, "rounds": chosen.rounds, "sizes": results}))


if __name__ == "__main__":
    main()
