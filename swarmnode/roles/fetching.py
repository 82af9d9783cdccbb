"""Bring what a stage needs of its model into the peer's store: small files whole, of each shard the stage's part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarmnode.catalog.chunks import chunk_lists
from swarmnode.roles.file_client import FetchProgress, fetch_whole
from swarmnode.roles.slice_client import Shard, fetch_slices

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarmnode.catalog.store import ShardStore
    from swarmnode.roles.context import NodeContext
    from swarmnode.roles.load_spec import LoadSpec


async def fetch_files(
    context: NodeContext, spec: LoadSpec, store: ShardStore, report: Callable[[str, int, int], None]
) -> frozenset[str]:
    """Bring what the store lacks of the files of `spec`; returns the paths of those of which it has the stage's part.

    Shards of older imports, which have no list of chunks, are brought whole. Raises FetchFailed, NoSpace or LinkBroken.
    """
    progress = FetchProgress(report)
    lists = chunk_lists(spec.files)
    sliced = {entry.path: entry for entry in spec.files if entry.path in lists and not store.have(entry)}
    whole = [entry for entry in spec.files if entry.path not in sliced]
    missing = store.missing(whole)
    if missing:
        needed = store.missing_bytes(whole)
        store.check_space(needed)
        progress.expect(needed)
        async with context.roads.to_coordinator("files") as dialed:
            await fetch_whole(dialed.up, spec.model, missing, store, progress)
    shards = {entry.sha256: Shard(entry, lists[path]) for path, entry in sliced.items()}
    if shards:
        await fetch_slices(context, spec, store, [shards[sha256] for sha256 in sorted(shards)], progress)
    return frozenset(sliced)
