"""What one member may make another node hold: no more than the bound, on however many channels and connections."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
from channel_handlers import echo
from credentials import Node, Swarm

from swarmnode.errors import LinkBroken, ProtocolError, SwarmError
from swarmnode.wire import limits
from swarmnode.wire.address import Address
from swarmnode.wire.direct import DirectTransport
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import CHANNEL_KINDS, JOIN_KIND
from swarmnode.wire.unread import LONGEST_FRAME_BYTES, NodeUnread, Share

if TYPE_CHECKING:
    from pathlib import Path

    from swarmnode.wire.direct import DirectLink
    from swarmnode.wire.link import Channel

END_S = 20.0
SPARE_BYTES = 96 << 20
"""Beside what is held: one read of each connection, TLS, h2, and what the allocator keeps."""
SENT_BYTES = 15 << 20
"""On each channel, or as much as the listener's windows take."""
LISTENER = """
import sys, trio
from functools import partial
from pathlib import Path
from swarmnode.ids import BootId, NodeId
from swarmnode.wire.address import Address
from swarmnode.wire.direct import DirectTransport
from swarmnode.wire.link import Identity
from swarmnode.wire.tls import CredentialFiles, SwarmTls

def resident():
    line = next(line for line in open("/proc/self/status") if line.startswith("VmRSS"))
    return int(line.split()[1]) << 10

async def handler(kind, hello, channel):
    if kind == "files":
        await trio.sleep_forever()
    async for frame in channel:
        pass

async def main():
    folder, node = Path(sys.argv[1]), NodeId(sys.argv[2])
    transport = DirectTransport(SwarmTls(CredentialFiles(*(folder / f"{n}.pem" for n in ("key", "certificate", "ca")))))
    me = Identity(node, BootId("boot"), "house", ("coordinator", "peer"))
    async with trio.open_nursery() as nursery:
        address = await nursery.start(partial(transport.listen, Address("127.0.0.1", 0), handler, me))
        print(address.port, resident(), flush=True)
        while await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            print(resident(), flush=True)
        nursery.cancel_scope.cancel()

trio.run(main)
"""


def test_every_kind_of_channel_has_its_longest_frame() -> None:
    assert set(LONGEST_FRAME_BYTES) >= {*CHANNEL_KINDS, JOIN_KIND}
    assert {kind for kind, most in LONGEST_FRAME_BYTES.items() if most == limits.MAX_FRAME_BYTES} == {
        "steps",
        "prompts",
    }


def test_accounts_count_what_is_held_and_no_more() -> None:
    node = NodeUnread(10, 20)
    beat, tunnel = Share(node.of("control")), Share(node.of("relay"))
    assert beat.add(8)
    assert not Share(node.of("requests")).add(3)
    assert tunnel.add(20)
    assert node.held_bytes == 28
    beat.remove(5)
    assert Share(node.of("api")).add(7)
    beat.end()
    assert node.held_bytes == 27


@pytest.mark.parametrize("kind", ["control", "requests", "files", "api", "relay"])
async def test_a_frame_longer_than_its_channel_needs_is_refused_when_announced(
    tmp_path: Path, nursery: trio.Nursery, kind: str
) -> None:
    swarm = Swarm(tmp_path / "swarm")
    house, greedy = swarm.node("house", ("coordinator", "peer")), swarm.node("greedy")
    transport = DirectTransport(house.tls())
    address = await nursery.start(partial(transport.listen, Address("127.0.0.1", 0), echo, house.identity))
    async with DirectTransport(greedy.tls()).dial(address, kind, greedy.identity) as channel:
        _write(channel, (LONGEST_FRAME_BYTES[kind] + 1).to_bytes(4, "big"))
        with trio.fail_after(END_S), pytest.raises(ProtocolError, match="a frame declares"):
            await channel.receive()
        channel.abort()
    nursery.cancel_scope.cancel()


async def test_hello_is_short_on_every_channel(tmp_path: Path, nursery: trio.Nursery) -> None:
    """A coordinator that holds no stages refuses a lane, but only once it has read who opens it."""
    swarm = Swarm(tmp_path / "swarm")
    house, greedy = swarm.node("house", ("coordinator",)), swarm.node("greedy")
    transport = DirectTransport(house.tls())
    address = await nursery.start(partial(transport.listen, Address("127.0.0.1", 0), echo, house.identity))
    async with DirectTransport(greedy.tls()).connect(address, greedy.identity) as link:
        channel = link._connection.open_channel("steps")
        _write(channel, (limits.MAX_HELLO_FRAME_BYTES + 1).to_bytes(4, "big"))
        with trio.fail_after(END_S), pytest.raises(ProtocolError, match="a frame declares"):
            await channel.receive()
        channel.abort()
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("kind", ["requests", "files"])
async def test_a_member_cannot_make_a_node_hold_more_than_its_bound(
    tmp_path: Path, nursery: trio.Nursery, kind: str
) -> None:
    """Frames that never end, and bytes that nobody reads, on sixty channels of two connections."""
    swarm = Swarm(tmp_path / "swarm")
    house, greedy = swarm.node("house", ("coordinator", "peer")), swarm.node("greedy")
    command = [sys.executable, "-c", LISTENER, str(house.files.key.parent), house.node]
    with _start(command) as listener:
        assert listener.stdin is not None
        assert listener.stdout is not None
        line = await trio.to_thread.run_sync(listener.stdout.readline)
        port, before = map(int, line.split())
        for _ in range(2):
            nursery.start_soon(_begin_frames, greedy, Address("127.0.0.1", port), kind)
        highest = before
        for _ in range(12):
            await trio.sleep(0.15)
            listener.stdin.write("\n")
            listener.stdin.flush()
            highest = max(highest, int(await trio.to_thread.run_sync(listener.stdout.readline)))
        nursery.cancel_scope.cancel()
        listener.stdin.close()
    assert highest - before < limits.MAX_UNREAD_BYTES + SPARE_BYTES


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


async def _begin_frames(greedy: Node, address: Address, kind: str) -> None:
    with suppress(SwarmError):
        async with (
            DirectTransport(greedy.tls()).connect(address, greedy.identity) as link,
            trio.open_nursery() as nursery,
        ):
            for _ in range(30):
                nursery.start_soon(_begin_frame, link, kind)


async def _begin_frame(link: DirectLink, kind: str) -> None:
    with suppress(LinkBroken):
        async with link.open(kind) as channel:
            block = bytes(1 << 18)
            _write(channel, (LONGEST_FRAME_BYTES[kind] - 1).to_bytes(4, "big"))
            for _ in range(SENT_BYTES // len(block)):
                _write(channel, block)
                await channel.flush()
            await trio.sleep_forever()


def _write(channel: Channel, data: bytes) -> None:
    """Bytes that are no whole frame."""
    channel._connection.session.send(channel._id, data)  # type: ignore[attr-defined]
    channel._connection.wake_writer()  # type: ignore[attr-defined]


async def test_a_node_that_keeps_within_it_is_never_cut(tmp_path: Path, nursery: trio.Nursery) -> None:
    """Long frames one after the other on many channels count only while they are not whole."""
    swarm = Swarm(tmp_path / "swarm")
    house, friend = swarm.node("house", ("coordinator", "peer")), swarm.node("friend")
    transport = DirectTransport(house.tls())
    address = await nursery.start(partial(transport.listen, Address("127.0.0.1", 0), echo, house.identity))
    body = bytes(limits.MAX_MAP_BODY_BYTES // 4)
    async with DirectTransport(friend.tls()).connect(address, friend.identity) as link:
        for _ in range(4):
            async with link.open("requests") as one, link.open("requests") as other:
                for channel in (one, other) * 3:
                    await channel.send(Frame("init", {}, body))
                    assert len((await channel.receive()).body) == len(body)
                account = transport._crowds.unread(friend.node)
        assert account.held_bytes == 0
    nursery.cancel_scope.cancel()
