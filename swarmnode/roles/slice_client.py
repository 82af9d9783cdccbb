"""Fetch a stage's part of its shards by chunks: from every peer that has some of them, and from the coordinator.

The coordinator gives what no peer has, and takes over what a peer is too slow for. A source that lies, stalls or leaves
is not asked again, and what was asked of it is asked of others; only the coordinator's failure is the load's, unless it
answers InvalidModel: it has not got the files, or what it has is damaged; or a chunk of it has another digest than the
list says. Then the peers have to have what is missing, or the other nodes that may coordinate, and where they have not,
the file's name with the coordinator's answer, or the chunk's name, is the load's error.
"""

from __future__ import annotations

import logging
import math
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import trio

from swarmnode.catalog.adapter import SCALES_PATH
from swarmnode.catalog.chunk_pool import ChunkPool
from swarmnode.catalog.chunks import header_of
from swarmnode.catalog.kept_blocks import reads_blocks
from swarmnode.catalog.slices import slice_tensors
from swarmnode.errors import Conflict, FetchFailed, InvalidModel, NoSpace, ProtocolError, SwarmError
from swarmnode.roles.file_client import COORDINATOR, PEER_SILENCE_S, SHARED_WAIT_S, next_frame
from swarmnode.roles.other_sources import at_peer, followers, leave, nobody_has, peers_with
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import LinkOptions
from swarmnode.wire.nursery import open_flat_nursery

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from swarmnode.catalog.chunk_pool import Batch
    from swarmnode.catalog.manifest import FileEntry
    from swarmnode.catalog.sliced_file import SlicedFile
    from swarmnode.catalog.store import ShardStore
    from swarmnode.ids import NodeId
    from swarmnode.roles.context import NodeContext
    from swarmnode.roles.file_client import FetchProgress
    from swarmnode.roles.load_spec import LoadSpec
    from swarmnode.wire.dialing import Way
    from swarmnode.wire.link import Channel

_log = logging.getLogger(__name__)

FIRST_ANSWERS_S = 3.0
"""The coordinator is asked for nothing until the peers have said what they have, or for this long."""
ASK_AGAIN_S = 1.0
"""Another peer that loads now has more every second."""
PATIENCE_S = 5.0
"""The coordinator, with nothing else to give, waits so long before it gives what a peer was to give."""
FOLLOWER_AFTER_S = 1.0
"""How much later than the peers, and than the one before it, a node that may coordinate is asked; at once where there
is nobody to wait for."""
BATCH_S = 60.0
"""For one batch of a peer: 16 MiB at 2 Mbit/s, slower than any uplink worth waiting for."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard and the list of its chunks, which is in the store."""

    entry: FileEntry
    chunk_list: FileEntry


async def fetch_slices(
    context: NodeContext, spec: LoadSpec, store: ShardStore, shards: Sequence[Shard], progress: FetchProgress
) -> None:
    """Bring the part of `shards` that the stage of `spec` reads; `shards` in the order in which all loads lock them.

    Raises FetchFailed, NoSpace or LinkBroken, and InvalidModel where nobody has something of it.
    """
    async with _opened(store, shards, progress) as files:
        fetch = _SliceFetch(context, spec, shards, files, progress)
        await fetch.run(store)


@asynccontextmanager
async def _opened(
    store: ShardStore, shards: Sequence[Shard], progress: FetchProgress
) -> AsyncIterator[list[SlicedFile]]:
    files: list[SlicedFile] = []
    try:
        for shard in shards:
            files += [await _open(store, shard, progress)]
        yield files
    finally:
        with trio.CancelScope(shield=True):  # ends with the disk's last few MiB; what they hold is not fetched again
            for file in files:
                await trio.to_thread.run_sync(file.close)


async def _open(store: ShardStore, shard: Shard, progress: FetchProgress) -> SlicedFile:
    """Own the shard; while another load of this store fetches from it, wait for that one."""
    while True:
        try:
            return await trio.to_thread.run_sync(store.open_slice, shard.entry, shard.chunk_list, progress.hashed)
        except Conflict:
            progress.add(0)
            await trio.sleep(SHARED_WAIT_S)


class _SliceFetch:
    def __init__(
        self,
        context: NodeContext,
        spec: LoadSpec,
        shards: Sequence[Shard],
        files: Sequence[SlicedFile],
        progress: FetchProgress,
    ) -> None:
        self._context, self._spec, self._progress = context, spec, progress
        self._shards, self._files = shards, files
        self._lists = [file.chunks for file in files]
        self._pool = ChunkPool({}, self._lists)
        self._sources = peers_with(context, spec)
        self._silent = {node for node, _ in self._sources}
        """Peers that have not said yet what they have."""
        self._helping: set[NodeId] = set()
        """Peers that are being asked."""
        self._changed = trio.Event()
        self._came: dict[str, int] = {}
        self._altered: dict[tuple[int, int], FetchFailed] = {}
        """By file and chunk what was wrong with the coordinator's copy."""

    async def run(self, store: ShardStore) -> None:
        headers = {index: [0] for index, file in enumerate(self._files) if file.missing([0])}
        missing = None if headers else self._missing()
        if missing is not None and not any(missing.values()):
            return
        options = LinkOptions(traffic=self._context.traffic)
        async with self._context.roads.to_coordinator("files", options) as dialed:
            if missing is None:
                self._expect(store, headers)
                self._pool = ChunkPool(headers, self._lists)
                with suppress(InvalidModel):
                    await self._bring_rest(dialed.up, COORDINATOR)
                if not self._pool.over:
                    await self._fetch(dialed.up, headers)
                missing = self._missing()
            self._expect(store, missing)
            await self._fetch(dialed.up, missing)
        self._context.emit("fetched", {"model": self._spec.model, "stage": self._spec.stage, "bytes": self._came})

    def _expect(self, store: ShardStore, missing: dict[int, list[int]]) -> None:
        needed = sum(self._lists[file].size(index) for file, indices in missing.items() for index in indices)
        store.check_space(needed)
        self._progress.expect(needed)

    def _missing(self) -> dict[int, list[int]]:
        """By shard, the chunks that the stage reads and that are not here; the headers are."""
        spec = self._spec
        headers = [header_of(file.read(0), file.entry) for file in self._files]
        blocks = reads_blocks(spec.quantization, adapted=any(file.path == SCALES_PATH for file in spec.files))
        tensors = slice_tensors(headers, spec.first_layer, spec.end_layer, spec.num_layers, from_blocks=blocks)
        found = {}
        for shard, (file, chosen) in enumerate(zip(self._files, tensors, strict=True)):
            spans = [file.chunks.covering(entry.begin, entry.end) for entry in chosen.values()]
            found[shard] = file.missing(sorted({index for span in spans for index in span}))
        return found

    async def _fetch(self, coordinator: Channel, missing: dict[int, list[int]]) -> None:
        self._pool = ChunkPool(missing, self._lists, seed=self._context.identity.node)
        async with open_flat_nursery() as nursery:
            for node, address in self._sources if not self._pool.over else ():
                self._helping.add(node)
                nursery.start_soon(self._from_peer, node, address)
            with trio.move_on_after(FIRST_ANSWERS_S):
                while self._silent and not self._pool.over:
                    await self._changed.wait()
            why: SwarmError | None = None
            try:
                await self._bring_rest(coordinator, COORDINATOR)
            except InvalidModel as error:  # it followed the one that had them
                why = error
            await self._from_others()
            if not self._pool.over:
                raise next(iter(self._altered.values())) if why is None else self._nobody_has(why)
            nursery.cancel_scope.cancel()

    def _nobody_has(self, why: SwarmError) -> SwarmError:
        left = [self._shards[file].entry for file in self._pool.left_files]
        return nobody_has(self._spec, left, why.message)

    async def _bring_rest(self, channel: Channel, source: str, batch_s: float = math.inf) -> None:
        """Until all is here but what is wrong there: what no peer has, and after a while what peers were to give."""
        wrong = self._altered if source == COORDINATOR else {}
        waited = False
        while not self._pool.waits_only_for(wrong.keys()):
            batch = self._pool.take_rest(anything=waited, but=wrong)
            if batch is not None:
                with trio.fail_after(batch_s):
                    await self._bring(channel, batch, source)
                waited = False
                continue
            with trio.move_on_after(PATIENCE_S) as patience:
                await self._changed.wait()
            waited = patience.cancelled_caught
            self._progress.add(0)

    async def _from_others(self) -> None:
        """What the coordinator has not got: the peers go on, and the other nodes that may coordinate join them."""
        async with open_flat_nursery() as nursery:
            nursery.start_soon(self._from_followers, nursery.cancel_scope.cancel)
            await self._from_peers_alone()
            if self._pool.over:
                nursery.cancel_scope.cancel()

    async def _from_peers_alone(self) -> None:
        """Until all is here, or for a while none of them has had any of the rest."""
        while self._helping and not self._pool.over:
            with trio.move_on_after(PEER_SILENCE_S) as silence:
                while self._helping and not self._pool.over and not self._pool.promising:
                    await self._changed.wait()
            if silence.cancelled_caught:
                return
            if not self._pool.over:
                await self._changed.wait()  # every peer's batch and question has its own deadline

    async def _from_followers(self, over: Callable[[], None]) -> None:
        """One after the other joins in, whatever is wrong with one: one that hangs costs no more than a moment."""
        async with open_flat_nursery() as nursery:
            gone = trio.Event()
            if not self._helping:
                gone.set()
            for way in followers(self._context):
                with trio.move_on_after(FOLLOWER_AFTER_S):
                    await gone.wait()
                gone = trio.Event()
                nursery.start_soon(self._from_follower, way, gone, over)

    async def _from_follower(self, way: Way[Channel], gone: trio.Event, over: Callable[[], None]) -> None:
        try:
            async with way.open() as channel:
                name = channel.welcome.identity.name if channel.welcome is not None else way.name
                await self._bring_rest(channel, name, BATCH_S)
                over()
        except NoSpace:
            raise
        except (SwarmError, trio.TooSlowError) as error:
            leave(self._spec, way.name, error)
        finally:
            gone.set()

    async def _from_peer(self, node: NodeId, address: str) -> None:
        """Ask a peer for what it has until all is here; one that fails is left out and named in the log."""
        try:
            async with at_peer(self._context, node, address) as channel:
                name = channel.welcome.identity.name if channel.welcome is not None else node
                while not self._pool.over:
                    await self._ask(channel, node)
                    while (batch := self._pool.take(node)) is not None:
                        with trio.fail_after(BATCH_S):
                            await self._bring(channel, batch, name)
                    await trio.sleep(ASK_AGAIN_S)
        except (SwarmError, trio.TooSlowError) as error:
            leave(self._spec, node[:8], error)
        finally:
            self._helping.discard(node)
            self._pool.drop(node)
            self._heard(node)

    async def _ask(self, channel: Channel, node: NodeId) -> None:
        marks = {}
        for index, shard in enumerate(self._shards):
            await channel.send(Frame("ask", _named(shard)))
            with trio.fail_after(FIRST_ANSWERS_S):
                frame = await channel.receive()
            if frame.kind != "have" or frame.header["sha256"] != shard.entry.sha256:
                raise ProtocolError(f"a shares channel answered ask with {frame.kind}")
            marks[index] = frame.body
        self._pool.offer(node, {index: bytes(body) for index, body in marks.items()})
        self._heard(node)

    def _heard(self, node: NodeId) -> None:
        self._silent.discard(node)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _bring(self, channel: Channel, batch: Batch, source: str) -> None:
        """One range, each chunk checked as it is complete; what did not come is free for others again."""
        file = self._files[batch.file]
        try:
            await self._receive(channel, batch, source)
        finally:
            self._pool.give_back(batch)
            with trio.CancelScope(shield=True):  # as long as the disk takes for a batch
                await trio.to_thread.run_sync(file.flush)
            self._wake()

    async def _receive(self, channel: Channel, batch: Batch, source: str) -> None:
        file, shard = self._files[batch.file], self._shards[batch.file]
        at, end, index = file.chunks.begin(batch.first), file.chunks.ends[batch.end - 1], batch.first
        await channel.send(Frame("fetch", {**_named(shard), "model": self._spec.model, "offset": at, "end": end}))
        arrived = bytearray()
        while (frame := await next_frame(channel, shard.entry, source)).kind == "data":
            if frame.header["offset"] != at or at + len(frame.body) > end:
                raise FetchFailed(
                    f"{shard.entry.path}: {source} sent offset {frame.header['offset']}, expected is {at}"
                )
            at += len(frame.body)
            arrived += frame.body
            self._progress.add(0)
            while index < batch.end and len(arrived) >= (size := file.chunks.size(index)):
                await self._keep((batch.file, index), bytes(arrived[:size]), source)
                del arrived[:size]
                index += 1
        if index != batch.end:
            raise FetchFailed(f"{shard.entry.path}: {source} sent {at} of the first {end} bytes")

    async def _keep(self, piece: tuple[int, int], data: bytes, source: str) -> None:
        """A chunk that came; a wrong one of the coordinator's is others' to give, a wrong one of theirs raises."""
        file, index = piece
        try:
            await trio.to_thread.run_sync(self._files[file].write, index, data)
        except FetchFailed as error:
            if source != COORDINATOR:
                raise
            if not self._altered:
                _log.warning("%s: the coordinator's copy is altered: %s", self._spec.model, error.message)
            self._altered[piece] = error
            return
        self._pool.done(file, index)
        self._came[source] = self._came.get(source, 0) + len(data)
        self._progress.add(len(data))


def _named(shard: Shard) -> dict[str, Any]:
    """How frames name a shard."""
    entry, chunk_list = shard.entry, shard.chunk_list
    content = {"path": entry.path, "size": entry.size, "sha256": entry.sha256}
    return {**content, "list": chunk_list.sha256, "list_size": chunk_list.size}
