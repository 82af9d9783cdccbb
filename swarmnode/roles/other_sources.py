"""Where a peer gets files besides the coordinator: from other peers, and from the nodes that may coordinate and follow.

Each is dialled straight or not at all: by way of the coordinator its own copy is nearer.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from swarmnode.errors import FetchFailed
from swarmnode.wire.address import parse_address
from swarmnode.wire.link import LinkOptions
from swarmnode.wire.routes import DIRECT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from swarmnode.ids import NodeId
    from swarmnode.roles.context import NodeContext
    from swarmnode.roles.load_spec import LoadSpec
    from swarmnode.wire.dialing import Way
    from swarmnode.wire.link import Channel

_log = logging.getLogger(__name__)


def peers_with(context: NodeContext, spec: LoadSpec) -> Sequence[tuple[NodeId, str]]:
    """Those that keep some of the model's files or bring them now, each with its address."""
    return spec.sources if DIRECT in context.settings.link_routes else ()


@asynccontextmanager
async def at_peer(context: NodeContext, node: NodeId, address: str) -> AsyncIterator[Channel]:
    """A *shares* channel. Raises LinkBroken and what else a dial does."""
    options = LinkOptions(traffic=context.traffic, node=node)
    async with context.transport.dial(parse_address(address), "shares", context.identity, options) as channel:
        yield channel


def followers(context: NodeContext) -> Sequence[Way[Channel]]:
    """Ways to *files* channels of nodes that may coordinate while another one does."""
    return context.roads.to_followers("files", LinkOptions(traffic=context.traffic))


def leave(spec: LoadSpec, source: str, error: Exception) -> None:
    """Name in the log whom nothing more is asked of: people hear of one that gave something else than it said."""
    level = logging.WARNING if isinstance(error, FetchFailed) else logging.INFO
    _log.log(level, "%s: nothing more is fetched from %s: %s", spec.model, source, str(error) or "it is too slow")
