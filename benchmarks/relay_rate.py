"""How many frames one core of the coordinator relays: the relay in one process, both ends of a lane in another.

`python -m benchmarks.relay_rate [--json]`. The relay is the node's own, with TLS on both legs and inside the tunnel.
What counts is frames per second of the relay's CPU time: by the clock it shares its cores with the two ends. Frames are
sent as fast as it goes, when many travel together, and one by one, when each waits for the last one to arrive.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from swarmnode.ids import BootId, NodeId, RingId
from swarmnode.roles.relay import Relay
from swarmnode.roles.roads import Roads
from swarmnode.wire import certificates as certs
from swarmnode.wire.address import Address, parse_address
from swarmnode.wire.direct import DirectTransport
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import Identity, LinkOptions, Parameters
from swarmnode.wire.routes import DIRECT, RELAYED
from swarmnode.wire.tls import CredentialFiles, SwarmTls
from swarmnode.wire.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarmnode.wire.link import Channel, Hello

ANYWHERE = Address("127.0.0.1", 0)
LANE = Parameters(RingId("bench"), (1, 0), "act", 0)
NODES = {"coordinator": ("coordinator",), "attic": ("peer",), "cellar": ("peer",)}
WARM_UP_FRAMES = 200


@dataclass(frozen=True, slots=True)
class RelayRate:
    """`cpu_ms_per_frame` is the relay's process alone; the aim is 1,000 frames a second of one core."""

    together: bool
    """As fast as it goes; else one by one."""
    frames: int
    frame_bytes: int
    frames_per_cpu_s: float
    frames_per_s: float
    cpu_ms_per_frame: float


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def make_credentials(folder: Path) -> None:
    """A swarm's CA, and a certificate for each of NODES."""
    ca_key = certs.new_key()
    ca = certs.new_ca(ca_key, time.time())
    for name, roles in NODES.items():
        key = certs.new_key()
        files = files_of(folder, name)
        files.key.parent.mkdir()
        files.key.write_bytes(certs.key_to_pem(key))
        files.certificate.write_bytes(certs.to_pem(certs.issue(ca, ca_key, key.public_key(), roles, time.time())))
        files.ca.write_bytes(certs.to_pem(ca))


def files_of(folder: Path, name: str) -> CredentialFiles:
    return CredentialFiles(*(folder / name / f"{part}.pem" for part in ("key", "certificate", "ca")))


class End:
    """One of NODES, as its process needs it."""

    def __init__(self, folder: Path, name: str) -> None:
        files = files_of(folder, name)
        self.key = certs.key_from_pem(files.key.read_bytes())
        node = certs.node_id(self.key.public_key())
        self.identity = Identity(node, BootId(name), name, NODES[name])
        self.transport = DirectTransport(SwarmTls(files, enrolment=False))


async def run_relay(folder: Path) -> None:
    """Child process: prints its address; ends when its input does."""
    end, controls = End(folder, "coordinator"), dict[NodeId, "Channel"]()

    def tell(node: NodeId, frame: Frame) -> bool:
        controls[node].send_nowait(frame)
        return True

    relay = Relay(tell, Traffic())

    async def serve(kind: str, hello: Hello, channel: Channel) -> None:
        if kind == "relay":
            await relay.serve(hello, channel)
            return
        controls[hello.identity.node] = channel
        async for _ in channel:
            pass

    async with trio.open_nursery() as nursery:
        print(await nursery.start(end.transport.listen, ANYWHERE, serve, end.identity), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()


async def measure(
    folder: Path, relay: Address, relay_pid: int, frames: int, frame_bytes: int, *, together: bool
) -> RelayRate:
    """Send through the relay, and count at the other end."""
    attic, cellar, came = End(folder, "attic"), End(folder, "cellar"), trio.Semaphore(0)
    began: tuple[float, float] = (0.0, 0.0)
    ended = began

    async def count(_kind: str, _hello: Hello, channel: Channel) -> None:
        nonlocal began, ended
        for number in range(WARM_UP_FRAMES + frames):
            if number == WARM_UP_FRAMES:
                began = trio.current_time(), cpu_s(relay_pid)
            await channel.receive()
            came.release()
        ended = trio.current_time(), cpu_s(relay_pid)
        came.release()

    straight = Roads(cellar.transport, cellar.identity, cellar.key, (DIRECT,), (relay,))
    through = Roads(attic.transport, attic.identity, attic.key, (DIRECT, RELAYED), (relay,))
    options = LinkOptions(LANE, node=cellar.identity.node)
    async with trio.open_nursery() as nursery:
        await nursery.start(cellar.transport.listen, ANYWHERE, count, cellar.identity)
        await nursery.start(_answer, straight, nursery)
        async with through.to_peer(cellar.identity.node, [], "steps", options) as dialed:
            body = os.urandom(frame_bytes)
            for _ in range(WARM_UP_FRAMES + frames):
                await dialed.up.send(Frame("data", {"offset": 0}, body))
                if not together:
                    await came.acquire()
            for _ in range(WARM_UP_FRAMES + frames if together else 0):
                await came.acquire()
            await came.acquire()
        nursery.cancel_scope.cancel()
    wall_s, used_s = ended[0] - began[0], max(ended[1] - began[1], 1e-9)
    return RelayRate(
        together,
        frames,
        frame_bytes,
        round(frames / used_s, 1),
        round(frames / wall_s, 1),
        round(used_s * 1e3 / frames, 4),
    )


async def _answer(
    roads: Roads, nursery: trio.Nursery, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    async with roads.to_coordinator("control") as control:
        task_status.started()
        async for frame in control.up:
            if frame.kind == "relay_offer":
                nursery.start_soon(roads.answer_relay, frame.header["call"])


def measure_relay(frames: int, frame_bytes: int, *, together: bool) -> RelayRate:
    """Start the relay's process, measure, and end it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_credentials(folder)
        command = [sys.executable, "-m", "benchmarks.relay_rate", "--part", str(folder)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            try:
                address = parse_address(child.stdout.readline().strip())
                return trio.run(partial(measure, folder, address, child.pid, frames, frame_bytes, together=together))
            finally:
                child.kill()


def sentence(rate: RelayRate) -> str:
    how = "together" if rate.together else "one by one"
    return (
        f"{rate.frames_per_cpu_s:,.0f} frames of {rate.frame_bytes:,} bytes per CPU second of the relay, {how} "
        f"({rate.frames_per_s:,.0f} a second by the clock)"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Frames a second that one core of the coordinator relays.")
    parser.add_argument("--frames", type=int, default=5000)
    parser.add_argument("--frame-bytes", type=int, default=16 << 10, help="a decode row of hidden size 8192 in bf16")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.part is not None:
        trio.run(run_relay, chosen.part)
        return
    rates = [measure_relay(chosen.frames, chosen.frame_bytes, together=together) for together in (True, False)]
    for rate in rates:
        print(sentence(rate))
    if chosen.json:
        print(json.dumps({"benchmark": "relay_rate", "rates": [asdict(rate) for rate in rates]}))


if __name__ == "__main__":
    main()
