"""A peer and a coordinator that does not keep it: how often it comes back."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
import trio.testing
from contexts import node_context

from swarmnode.catalog.store import ShardStore
from swarmnode.cluster.local_health import LocalHealth
from swarmnode.cluster.membership import BEAT_INTERVAL_S, DEAD_S
from swarmnode.cluster.reconnecting import WAITS_S
from swarmnode.config import read_settings
from swarmnode.errors import Conflict, LinkBroken, SwarmError
from swarmnode.ids import BootId, NodeId, RingId
from swarmnode.roles.context import PeerResources
from swarmnode.roles.coordinator_watch import CoordinatorWatch
from swarmnode.roles.lane_ends import BETTER_S
from swarmnode.roles.peer import REFUSED_S, STEADY_S, Peer
from swarmnode.wire.address import Address
from swarmnode.wire.direct import DirectTransport
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import Identity
from swarmnode.wire.memory import MemoryNetwork

if TYPE_CHECKING:
    from pathlib import Path

    from swarmnode.wire.link import Channel, Hello

WATCHED_S = 120.0


class NoMembership:
    """A peer's membership on links that prove nothing."""

    incarnation = 1

    async def keep_certified(self, post: Any) -> None:
        await trio.sleep_forever()

    async def admit_term(self, term: int) -> None:
        assert term == 0

    def check_term(self, term: int) -> None:
        assert term == 0


class Watched:
    """A peer on virtual time whose coordinator keeps every connection for `keep_s`, and when it came."""

    def __init__(self, folder: Path, keep_s: float, end: type[SwarmError] = Conflict, *, hears: bool = True) -> None:
        """`hears`: it answers beats."""
        self._end = end
        self._hears = hears
        self.joined_s: list[float] = []
        self._folder = folder
        self._keep_s = keep_s

    async def _serve(self, kind: str, hello: Hello, channel: Channel) -> None:
        if kind == "requests":
            self.joined_s.append(trio.current_time())
            await trio.sleep(self._keep_s)
            raise self._end("this name is taken")
        async for frame in channel:
            if frame.kind == "beat" and self._hears:
                await channel.send(Frame("heard", {"seq": frame.header["seq"]}))

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


@pytest.mark.parametrize(
    ("end", "least_s", "most_s"), [(LinkBroken, WAITS_S[-1] / 2, WAITS_S[-1]), (Conflict, REFUSED_S, REFUSED_S + 0.01)]
)
async def test_a_peer_that_is_turned_away_again_and_again_comes_more_seldom(
    tmp_path: Path, autojump_clock: object, end: type[SwarmError], least_s: float, most_s: float
) -> None:
    """Most seldom where only people can help: its name is taken, or it is a copy."""
    watched = Watched(tmp_path, 0.0, end)
    await watched.watch()
    assert least_s <= watched.longest_pause_s <= most_s


async def test_a_peer_that_was_kept_for_long_is_back_at_once(tmp_path: Path, autojump_clock: object) -> None:
    watched = Watched(tmp_path, keep_s=20.0)
    await watched.watch()
    assert WAITS_S[0] / 2 <= watched.longest_pause_s <= WAITS_S[0]


async def test_fifty_peers_that_lost_a_coordinator_together_do_not_dial_it_together(
    tmp_path: Path, autojump_clock: object
) -> None:
    network, back_s, ended = MemoryNetwork(), list[float](), trio.Event()

    async def serve(kind: str, hello: Hello, channel: Channel) -> None:
        if ended.is_set():
            back_s.append(trio.current_time())
            await trio.sleep_forever()
        await ended.wait()
        raise LinkBroken("the machine restarts")

    async with trio.open_nursery() as nursery:
        address = await nursery.start(network.listen, Address("127.0.0.1", 0), serve, identity("house"))
        for number in range(50):
            folder = tmp_path / str(number)
            context = node_context(identity(f"peer{number}"), network, read_settings(folder, environ={}))
            resources = PeerResources(memory_bytes=1 << 30, device="cpu", threads=1)
            peer = Peer(context, [address], resources, ShardStore(folder), cast("Any", NoMembership()))
            nursery.start_soon(peer.run)
        await trio.sleep(2 * STEADY_S)
        ended.set()
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert len(back_s) >= 50
    most_at_once = max(sum(begin <= at < begin + 0.01 for at in back_s) for begin in back_s)
    assert most_at_once < len(back_s) / 3


async def test_a_coordinator_that_answers_no_beat_is_left(tmp_path: Path, autojump_clock: object) -> None:
    """It may be stopped, and its kernel goes on taking what is sent."""
    watched = Watched(tmp_path, keep_s=1000.0, hears=False)
    await watched.watch()
    apart = [later - earlier for earlier, later in pairwise(watched.joined_s)]
    assert apart
    assert min(apart) >= DEAD_S
    assert max(apart) <= DEAD_S + WAITS_S[0] + 0.01


@pytest.mark.parametrize("score", [0, 7])
async def test_a_coordinator_is_left_with_the_seconds_that_it_was_silent_for(
    autojump_clock: object, score: int
) -> None:
    """Where the member's own loop is late, they are more."""
    health = LocalHealth()
    health.score = score
    with pytest.raises(LinkBroken, match=f"answered no beat for {DEAD_S * (1 + score):g} s"):
        await CoordinatorWatch(health).run()


class Refuting(NoMembership):
    """Counts its incarnation in memory."""

    async def refute(self, above: int) -> None:
        self.incarnation = above + 1


async def test_a_peer_that_counts_as_dead_says_at_once_that_it_is_not(tmp_path: Path, autojump_clock: object) -> None:
    network, beats = MemoryNetwork(), list[tuple[float, int]]()

    async def serve(kind: str, hello: Hello, channel: Channel) -> None:
        async for frame in channel:
            beats.append((trio.current_time() - began_s, frame.header["incarnation"]))
            told = {"above": 6} if len(beats) == 1 else {}
            await channel.send(Frame("heard", {"seq": frame.header["seq"], **told}))

    context = node_context(identity("attic"), network, read_settings(tmp_path, environ={}))
    began_s, member = trio.current_time(), cast("Any", Refuting())
    with trio.move_on_after(5):
        async with trio.open_nursery() as nursery:
            listen = partial(network.listen, Address("127.0.0.1", 0), serve, identity("house"))
            address = await nursery.start(listen)
            resources = PeerResources(memory_bytes=1 << 30, device="cpu", threads=1)
            nursery.start_soon(Peer(context, [address], resources, ShardStore(tmp_path / "s"), member).run)
    (first_s, first), (second_s, second), (third_s, third) = beats[:3]
    assert (first, second, third) == (1, 7, 7)
    assert second_s - first_s < 0.1
    assert third_s - second_s == pytest.approx(BEAT_INTERVAL_S, abs=0.01)


class Roads:
    """A coordinator that is polled; `open` says whether its swarm port is reached, too."""

    def __init__(self) -> None:
        self.open = False
        self.asked = 0

    async def better_to_coordinator(self, places: object, route: str) -> bool:
        assert (places, route) == ((SWARM_PORT,), "polled")
        self.asked += 1
        await trio.sleep(0.1)
        return self.open


SWARM_PORT = Address("127.0.0.1", 7700)


async def test_a_polled_peer_changes_to_a_better_road_while_it_holds_nothing(
    tmp_path: Path, autojump_clock: object
) -> None:
    context, roads = node_context(identity("attic"), MemoryNetwork(), read_settings(tmp_path, environ={})), Roads()
    context = replace(context, roads=cast("Any", roads))
    member: Any = NoMembership()
    peer = Peer(context, [SWARM_PORT], PeerResources(1 << 30, "cpu", 1), ShardStore(tmp_path / "store"), member)
    changed_s: list[float] = []

    async def look() -> None:
        with pytest.raises(LinkBroken, match="a better road"):
            await peer._look_for_better("polled")
        changed_s.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        await trio.sleep(3.5 * BETTER_S)
        assert roads.asked == 3
        roads.open = True
        peer._hosts[RingId("r1")] = cast("Any", object())
        await trio.sleep(2 * BETTER_S)
        assert (roads.asked, changed_s) == (3, []), "what is held would end with the connection"
        peer._hosts.clear()
        await trio.sleep(BETTER_S)
    assert len(changed_s) == 1


async def test_a_peer_that_is_connected_directly_looks_for_nothing_better(tmp_path: Path) -> None:
    member: Any = NoMembership()
    context = node_context(identity("attic"), MemoryNetwork(), read_settings(tmp_path, environ={}))
    peer = Peer(context, [SWARM_PORT], PeerResources(1 << 30, "cpu", 1), ShardStore(tmp_path / "store"), member)
    await peer._look_for_better("direct")


@pytest.mark.parametrize(("house", "said"), [("house", ["the node was stopped"]), ("attic", [])])
async def test_a_peer_that_is_stopped_says_so_to_a_coordinator_on_another_node(
    tmp_path: Path, nursery: trio.Nursery, house: str, said: list[str]
) -> None:
    """Over TCP, and as its connections end; where they end for another reason it is back soon."""
    heard, beaten, ended = list[str](), trio.Event(), trio.Event()
    scopes: list[trio.CancelScope] = []

    async def serve(kind: str, hello: Hello, channel: Channel) -> None:
        if kind == "requests":
            with trio.CancelScope() as scope:
                scopes.append(scope)
                await trio.sleep_forever()
            return
        with suppress(LinkBroken):
            async for frame in channel:
                if frame.kind == "bye":
                    heard.append(frame.header["reason"])
                elif len(scopes) > 1:
                    beaten.set()
        if beaten.is_set():
            ended.set()

    transport = DirectTransport(None)
    address = await nursery.start(transport.listen, Address("127.0.0.1", 0), serve, identity(house))
    context = node_context(identity("attic"), transport, read_settings(tmp_path, environ={}))
    resources = PeerResources(memory_bytes=1 << 30, device="cpu", threads=1)
    peer = Peer(context, [address], resources, ShardStore(tmp_path / "s"), cast("Any", NoMembership()))
    with trio.fail_after(10):
        async with trio.open_nursery() as node:
            node.start_soon(peer.run)
            while not scopes:  # noqa: ASYNC110 - the listener's own task
                await trio.sleep(0.01)
            scopes[0].cancel()
            await beaten.wait()
            await trio.testing.wait_all_tasks_blocked(0.05)  # a writer that is at work takes nothing at once
            assert heard == []
            peer.say_goodbye()
            node.cancel_scope.cancel()
        await ended.wait()
    assert heard == said
