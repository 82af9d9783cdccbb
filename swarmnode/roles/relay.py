"""The coordinator's relay: joins two nodes that cannot reach each other, and reads nothing of what they say.

Inside a tunnel runs the TLS of its two ends, so all that is seen here is ciphertext. Each tunnel is a channel on a
connection of its own to either side: a reader that stalls holds up his own lane only, and no more waits for him than
one channel holds.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from swarmnode.errors import LinkBroken, Overloaded, ProtocolError
from swarmnode.ids import NodeId
from swarmnode.wire.deadlines import CHANNEL_CLOSE_S, RELAY_ANSWER_S
from swarmnode.wire.frames import Frame
from swarmnode.wire.nursery import open_flat_nursery
from swarmnode.wire.routes import RELAYED
from swarmnode.wire.traffic import Counts, Route

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarmnode.wire.link import Channel, Hello
    from swarmnode.wire.traffic import Traffic

MAX_TUNNELS = 1024
"""At once: three lanes each for some hundred rings."""
MAX_TUNNELS_PER_NODE = 96


@dataclass(slots=True)
class _Call:
    """One node calls another; the relay waits for both ends."""

    caller: NodeId
    callee: NodeId
    answer: Channel | None = None
    answered: trio.Event = field(default_factory=trio.Event)
    over: trio.Event = field(default_factory=trio.Event)


class Relay:
    """`serve` gets every `relay` channel; `tell` posts a frame on a node's control channel, False: it is not there."""

    def __init__(self, tell: Callable[[NodeId, Frame], bool], traffic: Traffic) -> None:
        self._tell = tell
        self._traffic = traffic
        self._calls: dict[str, _Call] = {}

    @property
    def count(self) -> int:
        """Tunnels that are open, or waited for."""
        return len(self._calls)

    async def serve(self, hello: Hello, channel: Channel) -> None:
        """Its first frame says whether this end calls, or answers a call."""
        node = hello.identity.node
        try:
            first = await channel.receive()
        except trio.EndOfChannel:
            return  # it only looked whether this coordinator answers
        if first.kind == "relay_call":
            await self._call(hello, channel, NodeId(first.header["to"]))
        elif first.kind == "relay_answer":
            await self._answer(node, channel, first.header["call"])
        else:
            raise ProtocolError(f"a relay channel begins with relay_call or relay_answer, not {first.kind}")

    async def _call(self, hello: Hello, channel: Channel, callee: NodeId) -> None:
        caller = hello.identity.node
        self._check_room(caller)
        number, call = secrets.token_hex(16), _Call(caller, callee)
        self._calls[number] = call
        try:
            if not self._tell(callee, Frame("relay_offer", {"call": number, "source": caller})):
                raise LinkBroken(f"node {callee[:8]} is not connected to the coordinator")
            with trio.move_on_after(RELAY_ANSWER_S):
                await call.answered.wait()
            if call.answer is None:
                raise LinkBroken(f"node {callee[:8]} did not answer through the relay within {RELAY_ANSWER_S:g} s")
            there = Route(RELAYED, callee, hello.parameters.ring or "", hello.parameters.lane or "")
            await _join(channel, call.answer, self._traffic.counts(there))
        finally:
            del self._calls[number]
            call.over.set()

    async def _answer(self, node: NodeId, channel: Channel, number: str) -> None:
        call = self._calls.get(number)
        if call is None or call.callee != node or call.answer is not None:
            raise ProtocolError("nobody waits for this answer; the call may have ended meanwhile")
        call.answer = channel
        call.answered.set()
        await call.over.wait()

    def _check_room(self, caller: NodeId) -> None:
        of_caller = sum(caller == call.caller for call in self._calls.values())
        if len(self._calls) >= MAX_TUNNELS or of_caller >= MAX_TUNNELS_PER_NODE:
            raise Overloaded(
                f"the relay holds {of_caller} tunnels of this node, {len(self._calls)} in all, and no more"
            )


async def _join(caller: Channel, callee: Channel, counts: Counts) -> None:
    """Hand on what comes, both ways, until both ends have ended or one broke."""
    async with open_flat_nursery() as nursery:
        nursery.start_soon(_hand_on, caller, callee, counts.gave, nursery)
        nursery.start_soon(_hand_on, callee, caller, counts.took, nursery)


async def _hand_on(source: Channel, target: Channel, count: Callable[[int, int], None], both: trio.Nursery) -> None:
    async for frame in source:
        if frame.kind != "tunnel":
            raise ProtocolError(f"a tunnel brought {frame.kind}")
        await target.send(frame)
        count(len(frame.body), frame.header["n"])
    target.end_sending()
    both.cancel_scope.deadline = min(both.cancel_scope.deadline, trio.current_time() + CHANNEL_CLOSE_S)
