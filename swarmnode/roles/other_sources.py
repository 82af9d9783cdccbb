"""Where a peer gets files besides the coordinator: from other peers, and from the nodes that may coordinate and follow.

Each is dialled straight or not at all: by way of the coordinator its own copy is nearer.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from swarmnode.catalog.kept_blocks import keeps_blocks
from swarmnode.errors import FetchFailed, InvalidModel
from swarmnode.wire.address import parse_address
from swarmnode.wire.link import LinkOptions
from swarmnode.wire.routes import DIRECT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from swarmnode.catalog.manifest import FileEntry
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


def nobody_has(spec: LoadSpec, files: Sequence[FileEntry], why: str) -> InvalidModel:
    """The load's error where something of `files` is nowhere; `why`: what the coordinator answered."""
    named = files[0].path + (f" and {len(files) - 1} more" if len(files) > 1 else "")
    do = "start a machine that has, or import the model on the coordinator's"
    if all(keeps_blocks(file.path) for file in files):
        do = f"these blocks of its GGUF file are read by int4-fast alone: load it with another --quantization, {do}"
    return InvalidModel(
        f"{named}: neither the coordinator nor a peer or voter that is connected has what this load reads of it, for "
        f"{spec.model}; {do} (which answers: {why})"
    )
