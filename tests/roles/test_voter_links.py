"""A voter's links to the others on virtual time: one that was cut is made anew long before a kernel gives it up."""

from __future__ import annotations

import math
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
from contexts import never_removed

from swarmnode.cluster.election import HEARTBEAT_S, QUORUM_S
from swarmnode.cluster.election_messages import Append, Appended, Part
from swarmnode.cluster.entry_parts import PART_BYTES
from swarmnode.errors import NodeRemoved
from swarmnode.ids import BootId, NodeId
from swarmnode.roles.vote_codec import to_frame
from swarmnode.roles.voter_links import ENTRY_BYTES_PER_S, LOOK_S, RETRY_MOST_S, Unanswered, VoterLinks
from swarmnode.wire.address import Address
from swarmnode.wire.dialing import Way
from swarmnode.wire.link import Identity
from swarmnode.wire.memory import MemoryNetwork
from swarmnode.wire.routes import DIRECT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from swarmnode.cluster.election_messages import VoterMessage
    from swarmnode.wire.link import Channel, Hello

A, B = NodeId("a" * 32), NodeId("b" * 32)
MARK = (1, 1)
HEARTBEAT = Append(1, MARK, MARK)
ANSWER = to_frame(Appended(1, MARK))


class Other:
    """The other voter: from `cut` on, what it is sent on the links of before vanishes. It answers after `late_s`."""

    def __init__(self) -> None:
        self.network = MemoryNetwork(latency_s=0.02)
        self.came_s: list[float] = []
        self.late_s = 0.0
        self.good_from = 0
        self.answered = 0
        self.links = VoterLinks(self._ways, self._take, never_removed)

    def cut(self) -> None:
        self.good_from = len(self.came_s)

    async def _serve(self, kind: str, hello: Hello, channel: Channel) -> None:
        number = len(self.came_s)
        self.came_s.append(trio.current_time())
        async for _ in channel:
            if number >= self.good_from:
                await trio.sleep(self.late_s)
                await channel.send(ANSWER)

    def _ways(self, node: NodeId, places: Sequence[str]) -> list[Way[Channel]]:
        me = Identity(A, BootId("b"), "a", ("coordinator", "peer"))
        return [Way(DIRECT, partial(self.network.dial, Address("127.0.0.1", 1), "votes", me), places[0])]

    async def _take(self, node: NodeId, message: VoterMessage) -> None:
        self.answered += 1

    async def run(self, nursery: trio.Nursery) -> None:
        identity = Identity(B, BootId("b"), "b", ("coordinator", "peer"))
        await nursery.start(self.network.listen, Address("127.0.0.1", 1), self._serve, identity)
        await nursery.start(self.links.run)
        self.links.follow({B: ("127.0.0.1:1",)})
        await trio.sleep(1)
        assert self.links.up == {B}

    async def beat(self, times: int) -> None:
        for _ in range(times):
            self.links.post(B, HEARTBEAT)
            await trio.sleep(HEARTBEAT_S)


@asynccontextmanager
async def _refused() -> AsyncIterator[Channel]:
    raise NodeRemoved("node a was removed")
    yield


async def test_a_voter_that_was_removed_hears_of_it(nursery: trio.Nursery, autojump_clock: object) -> None:
    told: list[NodeRemoved] = []
    other = Other()
    links = VoterLinks(lambda *_: [Way(DIRECT, _refused, "there")], other._take, told.append)
    await nursery.start(links.run)
    links.follow({B: ("127.0.0.1:1",)})
    await trio.sleep(60)
    assert {error.message for error in told} == {"node a was removed"}
    assert len(told) >= 60 / RETRY_MOST_S, "it goes on trying"
    nursery.cancel_scope.cancel()


@pytest.fixture
async def other(nursery: trio.Nursery) -> Other:
    other = Other()
    await other.run(nursery)
    return other


async def test_a_link_that_was_cut_is_made_anew(other: Other, nursery: trio.Nursery, autojump_clock: object) -> None:
    await other.beat(60)
    assert len(other.came_s) == 1, "one that is answered stays"
    answered, cut_s = other.answered, trio.current_time()
    other.cut()
    await other.beat(12)
    assert len(other.came_s) == 2
    assert other.came_s[1] - cut_s <= QUORUM_S + LOOK_S + RETRY_MOST_S
    assert other.answered > answered
    nursery.cancel_scope.cancel()


async def test_a_link_on_which_nothing_is_asked_is_left_alone(
    other: Other, nursery: trio.Nursery, autojump_clock: object
) -> None:
    other.cut()
    await trio.sleep(60)
    assert (len(other.came_s), other.links.up) == (1, {B})
    nursery.cancel_scope.cancel()


async def test_a_part_of_an_entry_may_take_as_long_as_a_slow_line_needs_for_it(
    other: Other, nursery: trio.Nursery, autojump_clock: object
) -> None:
    other.late_s = PART_BYTES / ENTRY_BYTES_PER_S
    assert other.late_s > QUORUM_S
    data = bytes(PART_BYTES)
    other.links.post(B, Append(1, MARK, (0, 0), Part((A, B), 0, 2 * len(data), data)))
    await trio.sleep(other.late_s + 1)
    assert (len(other.came_s), other.answered) == (1, 1)
    nursery.cancel_scope.cancel()


def test_only_questions_want_answers() -> None:
    """On the link of a node that moved, its answers travel with its own questions."""
    unanswered = Unanswered()
    unanswered.asked(Appended(1, MARK), 1.0)
    assert unanswered.ends_s == math.inf
    unanswered.asked(HEARTBEAT, 2.0)
    assert unanswered.ends_s == 2.0 + QUORUM_S
