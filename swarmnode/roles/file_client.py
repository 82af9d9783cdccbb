"""A peer's side of a *files* channel: brings whole files, checked and resumable, into its own store."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import trio

from swarmnode.errors import Conflict, FetchFailed, LinkBroken, ProtocolError, from_wire
from swarmnode.wire.frames import Frame

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from swarmnode.catalog.manifest import FileEntry
    from swarmnode.catalog.store import PartialFile, ShardStore
    from swarmnode.ids import ModelId
    from swarmnode.wire.link import Channel

COORDINATOR = "the coordinator"
FETCH_PROGRESS_S = 60.0
"""No bytes for this long: the coordinator's disk or the link is stuck, and the load fails rather than waits."""
PEER_SILENCE_S = 10.0
"""The same for another peer: there are others to ask."""
PEER_BYTES_PER_S = 256 << 10
"""2 Mbit/s: another peer that brings a file more slowly is left, however regularly it sends."""
SHARED_WAIT_S = 0.25
"""Between looks at a file that another load of this peer is fetching."""
REPORT_S = 0.25
"""Progress is reported at most this often."""


class FetchProgress:
    """Reports bytes that came, of those that are known to be missing."""

    def __init__(self, report: Callable[[str, int, int], None]) -> None:
        self._report = report
        self._done = self._total = 0
        self._reported_s = 0.0

    def expect(self, n_bytes: int) -> None:
        """So many more are to come."""
        self._total += n_bytes

    def add(self, n_bytes: int) -> None:
        """Count what came; 0 for work that is none of the bytes to come, so that nobody takes it for silence."""
        self._done += n_bytes
        now = trio.current_time()
        if now - self._reported_s >= REPORT_S or self._done == self._total:
            self._reported_s = now
            self._report("fetching", self._done, self._total)

    def hashed(self, _: int) -> None:
        """The same as `add(0)`, from a thread that hashes what is here; there, it raises when the load is cancelled."""
        trio.from_thread.run_sync(self.add, 0)


async def fetch_whole(
    channel: Channel, model: ModelId, missing: Iterable[FileEntry], store: ShardStore, progress: FetchProgress
) -> None:
    """Bring whole files over a *files* channel. Raises FetchFailed, NoSpace or LinkBroken, and InvalidModel where the
    coordinator has not got them."""
    for entry in missing:
        await fetch_file(channel, model, entry, store, progress)


async def fetch_file(
    channel: Channel,
    model: ModelId,
    entry: FileEntry,
    store: ShardStore,
    progress: FetchProgress,
    source: str = COORDINATOR,
) -> None:
    """Bring one whole file over a *files* channel, or over a *shares* channel from another peer.

    Raises as `next_frame`, NoSpace, FetchFailed for what is not the file, and trio.TooSlowError for a peer that takes
    longer than a slow uplink would.
    """
    partial = await _begin(store, entry, progress)
    if partial is None:
        return
    rest_s = (entry.size - partial.length) / PEER_BYTES_PER_S
    with partial, trio.fail_after(math.inf if source == COORDINATOR else PEER_SILENCE_S + rest_s):
        wanted = {"model": model, "path": entry.path, "size": entry.size, "sha256": entry.sha256}
        await channel.send(Frame("fetch", {**wanted, "offset": partial.length}))
        while (frame := await next_frame(channel, entry, source)).kind == "data":
            if frame.header["offset"] != partial.length:
                raise FetchFailed(f"{entry.path}: got offset {frame.header['offset']}, expected {partial.length}")
            await trio.to_thread.run_sync(partial.write, frame.body)
            progress.add(len(frame.body))
        await trio.to_thread.run_sync(partial.finish)


async def _begin(store: ShardStore, entry: FileEntry, progress: FetchProgress) -> PartialFile | None:
    """Own the file's download; while another load of this store fetches it, wait for that one."""
    while True:
        try:
            return await trio.to_thread.run_sync(store.begin, entry, progress.hashed)
        except Conflict:
            progress.add(0)
            await trio.sleep(SHARED_WAIT_S)


async def next_frame(channel: Channel, entry: FileEntry, source: str = COORDINATOR) -> Frame:
    """The next `data` or `fetched` of a transfer. Raises the error that the coordinator answered, and FetchFailed for a
    peer's, after which the channel goes on; FetchFailed or, of a peer, LinkBroken where nothing came in time;
    ProtocolError for a frame that brings nothing."""
    patience_s = FETCH_PROGRESS_S if source == COORDINATOR else PEER_SILENCE_S
    try:
        with trio.fail_after(patience_s):
            frame = await channel.receive()
    except trio.TooSlowError:
        silent = f"{entry.path}: no bytes from {source} for {patience_s:.0f} s"
        raise (FetchFailed if source == COORDINATOR else LinkBroken)(silent) from None
    except trio.EndOfChannel:
        raise FetchFailed(f"{entry.path}: {source} ended the transfer") from None
    if frame.kind == "error":
        error = from_wire(frame.header["code"], frame.header["message"])
        raise error if source == COORDINATOR else FetchFailed(f"{entry.path}: {source} answered {error.message}")
    if frame.kind not in ("data", "fetched"):
        raise ProtocolError(f"a files channel brought {frame.kind}")
    if frame.kind == "data" and not frame.body:
        raise ProtocolError(f"{entry.path}: {source} sent data without a byte")
    return frame
