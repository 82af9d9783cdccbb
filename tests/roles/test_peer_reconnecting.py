"""A peer and a coordinator that does not keep it: how often it comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import trio
from contexts import node_context

from swarmnode.catalog.store import ShardStore
from swarmnode.config import read_settings
from swarmnode.errors import Conflict
from swarmnode.ids import BootId, NodeId
from swarmnode.roles.context import PeerResources
from swarmnode.roles.peer import RECONNECT_S, Peer
from swarmnode.wire.address import Address
from swarmnode.wire.link import Identity
from swarmnode.wire.memory import MemoryNetwork

if TYPE_CHECKING:
    from pathlib import Path

    from swarmnode.wire.link import Channel, Hello

WATCHED_S = 120.0


class NoMembership:
    """A peer's membership on links that prove nothing."""

    async def keep_certified(self, post: Any) -> None:
        await trio.sleep_forever()


class Watched:
    """A peer on virtual time whose coordinator keeps every connection for `keep_s`, and when it came."""

    def __init__(self, folder: Path, keep_s: float) -> None:
        self.joined_s: list[float] = []
        self._folder = folder
        self._keep_s = keep_s

    async def _serve(self, kind: str, hello: Hello, channel: Channel) -> None:
        if kind == "requests":
            self.joined_s.append(trio.current_time())
            await trio.sleep(self._keep_s)
            raise Conflict("this name is taken")
        async for _ in channel:
            pass

    async def watch(self) -> None:
        network = MemoryNetwork()

        async def listen(*, task_status: trio.TaskStatus[Address]) -> None:
            await network.listen(Address("127.0.0.1", 0), self._serve, identity("house"), task_status=task_status)

        settings = read_settings(self._folder, environ={})
        context = node_context(identity("attic"), network, settings)
        resources = PeerResources(memory_bytes=1 << 30, device="cpu", threads=1)
        with trio.move_on_after(WATCHED_S):
            async with trio.open_nursery() as nursery:
                address = await nursery.start(listen)
                member: Any = NoMembership()
                peer = Peer(context, [address], resources, ShardStore(self._folder / "store"), member)
                nursery.start_soon(peer.run)

    @property
    def longest_pause_s(self) -> float:
        pairs = zip(self.joined_s[1:], self.joined_s, strict=False)
        return max(after - before for after, before in pairs) - self._keep_s


def identity(name: str) -> Identity:
    return Identity(NodeId(name), BootId(name), name, listen=("127.0.0.1:1",))


async def test_a_peer_that_is_turned_away_again_and_again_comes_more_seldom(
    tmp_path: Path, autojump_clock: object
) -> None:
    watched = Watched(tmp_path, keep_s=0.0)
    await watched.watch()
    assert watched.longest_pause_s == pytest.approx(RECONNECT_S[-1])


async def test_a_peer_that_was_kept_for_long_is_back_at_once(tmp_path: Path, autojump_clock: object) -> None:
    watched = Watched(tmp_path, keep_s=20.0)
    await watched.watch()
    assert watched.longest_pause_s == pytest.approx(RECONNECT_S[0])
