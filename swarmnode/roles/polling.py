"""The coordinator's end of polled links: streams whose bytes come and go in the requests of the API port."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from swarmnode.errors import Gone, InvalidRequest, LinkBroken, Overloaded, ProtocolError
from swarmnode.wire.nursery import open_flat_nursery
from swarmnode.wire.polled import POLL_S, PolledStream

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from swarmnode.ids import NodeId

MAX_LINKS = 512
MAX_LINKS_PER_NODE = 32
"""Control, requests, files, api, and three lanes of some rings."""
SILENCE_S = 3 * POLL_S
"""A node that neither pushed nor polled for so long is gone, or its way is."""
LINK_NAME = re.compile(r"[0-9a-f]{32}")


@dataclass(slots=True)
class _Polled:
    node: NodeId
    stream: PolledStream = field(default_factory=PolledStream)
    pushes: int = 0
    pops: int = 0
    heard_s: float = field(default_factory=trio.current_time)
    popping: bool = False


class PolledLinks:
    """`run` it; `push` and `pop` serve the requests. A first push opens its link, which `serve` gets as a stream."""

    def __init__(self, serve: Callable[[trio.abc.Stream, str], Awaitable[None]]) -> None:
        """`serve(stream, source)` treats the stream as an accepted connection, to its end."""
        self._serve = serve
        self._links: dict[str, _Polled] = {}
        self._nursery: trio.Nursery | None = None

    @property
    def count(self) -> int:
        """Links that are open."""
        return len(self._links)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with open_flat_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            while True:
                await trio.sleep(POLL_S)
                self._end_silent()

    async def push(self, node: NodeId, name: str, number: int, frames: int, body: bytes, source: str) -> None:
        """Take one body. Raises Gone once the link is over: whoever forwards stops."""
        link = self._find(node, name) if number else self._open(node, name, source)
        if number != link.pushes:
            link.stream.fail(f"push {number} came where {link.pushes} was expected")
            raise Gone("a push was lost or came twice; the link is over")
        link.pushes += 1
        link.heard_s = trio.current_time()
        if not body:
            link.stream.inward.end()
            link.stream.outward.fail(LinkBroken("the other end has left"))  # it fetches nothing more
            return
        try:
            await link.stream.inward.put(body, frames)
        except LinkBroken as error:
            raise Gone(f"the link is over: {error.message}") from None

    async def pop(self, node: NodeId, name: str, number: int) -> tuple[bytes, int] | None:
        """Wait for what goes to the node; None: nothing yet, b"": the end. Raises Gone once the link is over."""
        link = self._find(node, name)
        if number != link.pops or link.popping:
            link.stream.fail(f"pop {number} came where {link.pops} was expected")
            raise Gone("an answer was lost; the link is over")
        link.popping, link.heard_s = True, trio.current_time()
        try:
            with trio.move_on_after(POLL_S):
                taken = await link.stream.outward.take()
                link.pops += 1
                return taken
            return None
        except LinkBroken as error:
            raise Gone(f"the link is over: {error.message}") from None
        finally:
            link.popping = False

    def _find(self, node: NodeId, name: str) -> _Polled:
        link = self._links.get(name)
        if link is None or link.node != node:
            raise Gone("there is no such link of this node (any more)")
        return link

    def _open(self, node: NodeId, name: str, source: str) -> _Polled:
        if self._nursery is None:
            raise LinkBroken("this node takes no polled links now")
        if not LINK_NAME.fullmatch(name):
            raise InvalidRequest("a link's name is 32 lower-case hex digits")
        if name in self._links:
            raise ProtocolError("a link of this name is open already")
        of_node = sum(link.node == node for link in self._links.values())
        if len(self._links) >= MAX_LINKS or of_node >= MAX_LINKS_PER_NODE:
            raise Overloaded(f"{of_node} polled links of this node are open, {len(self._links)} in all, and no more")
        link = self._links[name] = _Polled(node)
        self._nursery.start_soon(self._hold, name, link, source)
        return link

    async def _hold(self, name: str, link: _Polled, source: str) -> None:
        try:
            await self._serve(link.stream, source)
        finally:
            with trio.move_on_after(POLL_S):  # what was said last is still fetched
                await self._emptied(link)
            link.stream.fail("the link has ended")
            del self._links[name]

    async def _emptied(self, link: _Polled) -> None:
        while link.stream.outward.queued:
            await link.stream.outward.changed()

    def _end_silent(self) -> None:
        now = trio.current_time()
        for link in self._links.values():
            if now - link.heard_s > SILENCE_S:
                link.stream.fail(f"nothing was heard for {SILENCE_S:.0f} s")
