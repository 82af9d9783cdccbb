"""Bring what a stage needs of its model into the peer's store: small files whole, of each shard the stage's part."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import trio

from swarmnode.catalog.chunks import chunk_lists
from swarmnode.errors import FetchFailed, InvalidModel, NoSpace, SwarmError
from swarmnode.roles.file_client import FetchProgress, fetch_file, fetch_whole
from swarmnode.roles.other_sources import at_peer, followers, leave, nobody_has, peers_with
from swarmnode.roles.slice_client import Shard, fetch_slices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager

    from swarmnode.catalog.manifest import FileEntry
    from swarmnode.catalog.store import ShardStore
    from swarmnode.roles.context import NodeContext
    from swarmnode.roles.load_spec import LoadSpec
    from swarmnode.wire.link import Channel


async def fetch_files(
    context: NodeContext, spec: LoadSpec, store: ShardStore, report: Callable[[str, int, int], None]
) -> frozenset[str]:
    """Bring what the store lacks of the files of `spec`, or what was spoilt there; returns the paths of those of which
    it has the stage's part.

    Shards of older imports, which have no list of chunks, are brought whole. Raises FetchFailed, NoSpace, LinkBroken,
    or InvalidModel where neither the coordinator nor a peer or another voter has them.
    """
    progress = FetchProgress(report)
    await trio.to_thread.run_sync(store.check_again, spec.files, progress.hashed)
    lists = chunk_lists(spec.files)
    sliced = {entry.path: entry for entry in spec.files if entry.path in lists and not store.have(entry)}
    whole = [entry for entry in spec.files if entry.path not in sliced]
    missing = store.missing(whole)
    if missing:
        needed = store.missing_bytes(whole)
        store.check_space(needed)
        progress.expect(needed)
        try:
            async with context.roads.to_coordinator("files") as dialed:
                await fetch_whole(dialed.up, spec.model, missing, store, progress)
        except InvalidModel as error:  # it followed the coordinator that had them, or its copy is damaged
            await _fetch_shared(context, spec, whole, store, progress, error.message)
    shards = {entry.sha256: Shard(entry, lists[path]) for path, entry in sliced.items()}
    if shards:
        await fetch_slices(context, spec, store, [shards[sha256] for sha256 in sorted(shards)], progress)
    return frozenset(sliced)


async def _fetch_shared(
    context: NodeContext,
    spec: LoadSpec,
    files: Sequence[FileEntry],
    store: ShardStore,
    progress: FetchProgress,
    why: str,
) -> None:
    """Bring whole files from peers that have some of them, then from other nodes that may coordinate; whatever is wrong
    with one, the next is asked. Raises NoSpace of this disk, and InvalidModel where some are left; `why`: what the
    coordinator answered."""
    for source, dial in _others(context, spec):
        progress.add(0)
        try:
            async with dial() as channel:
                for _ in range(2):  # what an earlier source left of a file may be wrong: then it begins anew
                    for entry in store.missing(files):
                        with suppress(FetchFailed):  # it may have the next one
                            await fetch_file(channel, spec.model, entry, store, progress, source)
        except NoSpace:
            raise
        except (SwarmError, trio.TooSlowError) as error:
            leave(spec, source, error)
        if not store.missing(files):
            return
    raise nobody_has(spec, store.missing(files), why)


def _others(
    context: NodeContext, spec: LoadSpec
) -> Iterator[tuple[str, Callable[[], AbstractAsyncContextManager[Channel]]]]:
    """Whom to ask after the coordinator, and how each is dialled."""
    for node, address in peers_with(context, spec):
        yield node[:8], partial(at_peer, context, node, address)
    for way in followers(context):
        yield way.name, way.open
