"""A forwarding node's connections to its coordinator: made when a call needs one, ended when none did for a while."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio

from swarmnode.errors import LinkBroken, Overloaded, SwarmError
from swarmnode.wire import limits
from swarmnode.wire.link import LinkOptions
from swarmnode.wire.nursery import open_flat_nursery

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from swarmnode.roles.context import NodeContext
    from swarmnode.wire.link import Channel, Link

MAX_LINKS = 4
"""Of MAX_CHANNELS calls each: as many as a coordinator's whole waiting room and a web page or two."""
IDLE_S = 60.0
"""Home routers forget a silent connection, the more thorough ones after a few minutes; a new one takes three round
trips."""


class CoordinatorLinks:
    """`run` it while a coordinator is known; `open` gives a call its channel."""

    def __init__(self, context: NodeContext) -> None:
        self._context = context
        self._links: list[Link] = []
        self._making = trio.Lock()
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Until cancelled; that ends every call."""
        async with open_flat_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Channel]:
        """An `api` channel. Raises Overloaded beyond MAX_LINKS, LinkBroken where the coordinator does not answer."""
        link = await self._with_room()
        async with link.open("api") as channel:
            yield channel

    async def _with_room(self) -> Link:
        async with self._making:  # calls that come together share one connection
            for link in self._links:
                if link.channels < limits.MAX_CHANNELS and not link.over:
                    return link
            if len(self._links) >= MAX_LINKS:
                most = MAX_LINKS * limits.MAX_CHANNELS
                raise Overloaded(f"this node forwards {most} calls already, and no more at once")
            if self._nursery is None:
                raise LinkBroken("the coordinator is not connected")
            made: Link = await self._nursery.start(self._keep)
            return made

    async def _keep(self, *, task_status: trio.TaskStatus[Link]) -> None:
        """Hold one connection until it breaks or nothing used it for IDLE_S; raises only before it is up."""
        options = LinkOptions(traffic=self._context.traffic, window_bytes=limits.API_WINDOW_BYTES)
        made = False
        try:
            async with self._context.roads.link_to_coordinator(options) as link:
                self._links.append(link)
                try:
                    made = True
                    task_status.started(link)
                    await _until_idle(link)
                finally:
                    self._links.remove(link)
        except SwarmError:
            if not made:
                raise


async def _until_idle(link: Link) -> None:
    while True:
        with trio.move_on_after(IDLE_S):
            await link.wait_over()
            return
        if not link.channels:
            return
