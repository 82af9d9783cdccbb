"""The coordinator's end of polled links: streams whose bytes come and go in the requests of the API port."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from swarmnode.errors import Gone, InvalidRequest, LinkBroken, Overloaded, Unauthorized
from swarmnode.wire.deadlines import JOIN_S, PUSH_S
from swarmnode.wire.nursery import open_flat_nursery
from swarmnode.wire.poll_signature import MAX_SKEW_S
from swarmnode.wire.polled import POLL_S, PolledStream

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from swarmnode.ids import NodeId

MAX_LINKS = 512
MAX_LINKS_PER_NODE = 32
"""Control, requests, files, api, and three lanes of some rings."""
MAX_STRANGER_LINKS = 32
"""Of those: nodes that are no members yet, and come to join. Anybody can make a key and sign with it."""
MAX_KEPT_NAMES = 8192
"""Of links that are over; see `PolledLinks._over`. Members open some a minute when their ways are bad."""
SILENCE_S = 3 * POLL_S
"""A node that neither pushed nor polled for so long is gone, or its way is."""
LINK_NAME = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Asker:
    """Who signed a request, whether it is in the swarm, and the address it came from."""

    node: NodeId
    member: bool
    source: str


@dataclass(slots=True)
class _Polled:
    node: NodeId
    member: bool
    stream: PolledStream = field(default_factory=PolledStream)
    pushes: int = 0
    pops: int = 0
    heard_s: float = field(default_factory=trio.current_time)
    popping: bool = False
    pushing: bool = False
    """One is being put: it waits while too much is queued."""

    def check_number(self, what: str, number: int, expected: int) -> None:
        """One that was taken already changes nothing: somebody else may have sent it again. Raises Unauthorized for
        that, Gone for one that leaves a gap, which is the end of the link."""
        if number < expected:
            raise Unauthorized(f"{what} {number} of this link was taken already; a signed request counts once")
        if number > expected:
            self.stream.fail(f"{what} {number} came where {expected} was expected")
            raise Gone(f"a {what} was lost; the link is over")


class PolledLinks:
    """`run` it; `push` and `pop` serve the requests. A first push opens its link, which `serve` gets as a stream."""

    def __init__(self, serve: Callable[[trio.abc.Stream, str, str], Awaitable[None]]) -> None:
        """`serve(stream, source, signer)` treats the stream as an accepted connection, to its end; see
        `DirectTransport.accept`."""
        self._serve = serve
        self._links: dict[str, _Polled] = {}
        self._over: OrderedDict[str, float] = OrderedDict()
        """Since when links of these names are over, for as long as what opened them could be sent again."""
        self._nursery: trio.Nursery | None = None

    @property
    def count(self) -> int:
        """Links that are open."""
        return len(self._links)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with open_flat_nursery() as nursery:
            self._nursery = nursery
            try:
                task_status.started()
                while True:
                    await trio.sleep(POLL_S)
                    self._end_silent()
            finally:
                self._nursery = None

    def expect_push(self, asker: Asker, name: str, number: int) -> None:
        """Raise what `push` would, before the body is waited for."""
        link = self._links.get(name)
        if link is not None and link.node == asker.node:
            link.check_number("push", number, link.pushes)
            if link.pushing:  # each holds its body beside the queue, and who waits there has no order
                link.stream.fail("it was pushed to twice at once")
                raise Gone("another push waits; the link is over")
        elif number or link is not None:
            raise Gone("there is no such link of this node (any more)")
        else:
            self._check_opening(asker, name)

    async def push(self, asker: Asker, name: str, number: int, frames: int, body: bytes) -> None:
        """Take one body. Raises Gone once the link is over, or where its reader makes no room within PUSH_S: whoever
        forwards stops; Unauthorized for one that came before."""
        self.expect_push(asker, name, number)
        link = self._links.get(name) or self._open(asker, name)
        link.pushes += 1
        link.heard_s = trio.current_time()
        if not body:
            link.stream.inward.end()
            link.stream.outward.fail(LinkBroken("the other end has left"))  # it fetches nothing more
            return
        link.pushing = True
        try:
            with trio.fail_after(PUSH_S):
                await link.stream.inward.put(body, frames)
        except trio.TooSlowError:
            link.stream.fail(f"its reader made no room for {PUSH_S:g} s")
            raise Gone(f"nothing was read for {PUSH_S:g} s; the link is over") from None
        except LinkBroken as error:
            raise Gone(f"the link is over: {error.message}") from None
        finally:
            link.pushing = False

    async def pop(self, node: NodeId, name: str, number: int) -> tuple[bytes, int] | None:
        """Wait for what goes to the node; None: nothing yet, b"": the end. Raises as `push` does."""
        link = self._links.get(name)
        if link is None or link.node != node:
            raise Gone("there is no such link of this node (any more)")
        link.check_number("poll", number, link.pops)
        if link.popping:
            link.stream.fail("it was polled twice at once")
            raise Gone("another poll waits; the link is over")
        link.pops += 1
        link.popping, link.heard_s = True, trio.current_time()
        try:
            with trio.move_on_after(POLL_S):
                return await link.stream.outward.take()
            return None
        except LinkBroken as error:
            raise Gone(f"the link is over: {error.message}") from None
        finally:
            link.popping = False

    def _check_opening(self, asker: Asker, name: str) -> None:
        if self._nursery is None:
            raise LinkBroken("this node takes no polled links now")
        if not LINK_NAME.fullmatch(name):
            raise InvalidRequest("a link's name is 32 lower-case hex digits")
        if name in self._over:
            raise Unauthorized("a link of this name is over; a signed request counts once")
        of_node = sum(link.node == asker.node for link in self._links.values())
        if len(self._links) >= MAX_LINKS or of_node >= MAX_LINKS_PER_NODE:
            raise Overloaded(f"{of_node} polled links of this node are open, {len(self._links)} in all, and no more")
        strangers = sum(not link.member for link in self._links.values())
        if not asker.member and strangers >= MAX_STRANGER_LINKS:
            raise Overloaded(f"{strangers} nodes are joining over polled links at once, and no more; try again soon")

    def _open(self, asker: Asker, name: str) -> _Polled:
        assert self._nursery is not None
        link = self._links[name] = _Polled(asker.node, asker.member)
        self._nursery.start_soon(self._hold, name, link, asker)
        return link

    async def _hold(self, name: str, link: _Polled, asker: Asker) -> None:
        try:
            await self._serve(link.stream, asker.source, asker.node if asker.member else "")
            with trio.move_on_after(POLL_S if asker.member else JOIN_S):  # what was said last is still fetched
                await self._emptied(link)
        finally:
            link.stream.fail("the link has ended")
            del self._links[name]
            self._keep_name(name, trio.current_time())

    def _keep_name(self, name: str, now: float) -> None:
        self._over[name] = now
        while len(self._over) > MAX_KEPT_NAMES or next(iter(self._over.values())) < now - 2 * MAX_SKEW_S:
            self._over.popitem(last=False)

    async def _emptied(self, link: _Polled) -> None:
        while link.stream.outward.queued:
            await link.stream.outward.changed()

    def _end_silent(self) -> None:
        now = trio.current_time()
        for link in self._links.values():
            if now - link.heard_s > SILENCE_S:
                link.stream.fail(f"nothing was heard for {SILENCE_S:.0f} s")
