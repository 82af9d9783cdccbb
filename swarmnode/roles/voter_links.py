"""A voter's ways to the others: one connection to each, kept up while the document names it."""

from __future__ import annotations

import logging
import math
import random
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from swarmnode.cluster.election import QUORUM_S
from swarmnode.cluster.election_messages import Append, AskVote
from swarmnode.cluster.reconnecting import wait_s
from swarmnode.errors import LinkBroken, NodeRemoved, SwarmError
from swarmnode.roles.vote_codec import from_frame, to_frame
from swarmnode.wire.dialing import Way, dial_best
from swarmnode.wire.nursery import open_flat_nursery

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from swarmnode.cluster.election_messages import VoterMessage
    from swarmnode.ids import NodeId
    from swarmnode.wire.link import Channel

MAX_QUEUED = 8
"""Messages for a node that reads slowly; the election sends again whatever matters."""
RETRY_MOST_S = 2.0
"""A voter is tried more often than a coordinator: a majority may wait for this very link."""

LOOK_S = 0.5
ENTRY_BYTES_PER_S = 16 << 10
"""A line slower than this serves no model: a part of an entry is not given up while it may still be on its way."""

_log = logging.getLogger(__name__)


class VoterLinks:
    """`run` it; `follow` says whom to keep a link to, `post` sends. Answers come back on the link of the question.

    A node that dialled this one, and is not reached where it was (it moved), is asked on its own link.
    """

    def __init__(
        self,
        ways: Callable[[NodeId, Sequence[str]], Sequence[Way[Channel]]],
        take: Callable[[NodeId, VoterMessage], Awaitable[None]],
        removed: Callable[[NodeRemoved], None],
    ) -> None:
        """`ways` are those that lead to a node's places; `take` gets what comes from it. `removed` is called where one
        refuses this node for good."""
        self._ways = ways
        self._take = take
        self._removed = removed
        self._dialed: dict[NodeId, _Dialed] = {}
        self._answering: dict[NodeId, trio.MemorySendChannel[VoterMessage]] = {}
        """By node that dialled this one: what goes back to it."""
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with open_flat_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    def follow(self, places: Mapping[NodeId, tuple[str, ...]]) -> None:
        """Keep links to these nodes, at their places, and to no others."""
        for node in [node for node, dialed in self._dialed.items() if places.get(node) != dialed.places]:
            self._dialed.pop(node).scope.cancel()
        for node in places:
            if node not in self._dialed and self._nursery is not None:
                dialed = self._dialed[node] = _Dialed(places[node])
                self._nursery.start_soon(self._keep, node, dialed)

    @property
    def up(self) -> frozenset[NodeId]:
        """The nodes that the dialled link leads to now."""
        return frozenset(node for node, dialed in self._dialed.items() if dialed.up)

    def post(self, node: NodeId, message: VoterMessage) -> None:
        """Send a question or a heartbeat; dropped where there is no link, or one that is not read."""
        if node in self.up or node not in self._answering:
            self._put_dialed(node, message)
        elif node in self._dialed:
            _put(self._answering[node], message)

    def answer(self, node: NodeId, message: VoterMessage) -> None:
        """Send back to who dialled, or asked on the link that this node dialled; dropped where it hung up."""
        if node in self._answering:
            _put(self._answering[node], message)
        else:
            self._put_dialed(node, message)

    def _put_dialed(self, node: NodeId, message: VoterMessage) -> None:
        if node in self._dialed:
            _put(self._dialed[node].queue, message)

    async def serve(self, node: NodeId, channel: Channel) -> None:
        """A `votes` channel that another node opened, to its end."""
        queue, answers = trio.open_memory_channel["VoterMessage"](MAX_QUEUED)
        self._answering[node] = queue
        try:
            await self._exchange(node, channel, answers)
        finally:
            if self._answering.get(node) is queue:
                del self._answering[node]

    async def _keep(self, node: NodeId, dialed: _Dialed) -> None:
        attempt = 0
        with dialed.scope:
            while True:
                try:
                    async with dial_best(self._ways(node, dialed.places)) as link:
                        attempt, dialed.up = 0, True
                        await self._exchange(node, link.up, dialed.waiting, Unanswered())
                except NodeRemoved as error:
                    self._removed(error)
                except SwarmError as error:
                    _log.debug("the link to voter %s: %s", node[:8], error)
                finally:
                    dialed.up = False
                await trio.sleep(wait_s(attempt, random.random, RETRY_MOST_S))
                attempt += 1
                dialed.drop_waiting()

    async def _exchange(
        self,
        node: NodeId,
        channel: Channel,
        waiting: trio.MemoryReceiveChannel[VoterMessage],
        unanswered: Unanswered | None = None,
    ) -> None:
        """`unanswered`: what is sent are questions, but for answers to one that is not reached itself."""
        async with open_flat_nursery() as nursery:
            nursery.start_soon(_send_all, channel, waiting, unanswered)
            if unanswered is not None:
                nursery.start_soon(_break_when_silent, channel, unanswered)
            async for frame in channel:
                await self._take(node, from_frame(frame))
            raise LinkBroken("the other voter hung up")


class Unanswered:
    """How long one link's other end may take to say anything: about as long as a coordinator does without a majority,
    and what a part of an entry needs to get there. The kernel takes six times that to give up a link that was cut."""

    def __init__(self) -> None:
        self.ends_s = math.inf

    def asked(self, message: VoterMessage, now: float) -> None:
        """Of several the first counts, and no answer."""
        if not isinstance(message, Append | AskVote):
            return
        if self.ends_s == math.inf:
            self.ends_s = now + QUORUM_S
        if isinstance(message, Append) and message.part is not None:
            self.ends_s += len(message.part.data) / ENTRY_BYTES_PER_S

    def heard(self) -> None:
        self.ends_s = math.inf


class _Dialed:
    """One node that is kept a link to."""

    def __init__(self, places: tuple[str, ...]) -> None:
        self.places = places
        self.up = False
        self.scope = trio.CancelScope()
        self.queue, self.waiting = trio.open_memory_channel["VoterMessage"](MAX_QUEUED)

    def drop_waiting(self) -> None:
        """What was meant for an earlier moment."""
        with suppress(trio.WouldBlock):
            while True:
                self.waiting.receive_nowait()


def _put(queue: trio.MemorySendChannel[VoterMessage], message: VoterMessage) -> None:
    with suppress(trio.WouldBlock):
        queue.send_nowait(message)


async def _send_all(
    channel: Channel, waiting: trio.MemoryReceiveChannel[VoterMessage], unanswered: Unanswered | None
) -> None:
    while True:
        message = await waiting.receive()
        if unanswered is not None:
            unanswered.asked(message, trio.current_time())
        await channel.send(to_frame(message))


async def _break_when_silent(channel: Channel, unanswered: Unanswered) -> None:
    """Raises LinkBroken where a question got no answer in time."""
    heard_bytes = channel.heard_bytes
    while trio.current_time() < unanswered.ends_s:
        await trio.sleep(LOOK_S)
        if channel.heard_bytes != heard_bytes:
            heard_bytes = channel.heard_bytes
            unanswered.heard()
    raise LinkBroken("the other voter answers nothing")
