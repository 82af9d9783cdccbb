"""The serving side of files: *files* channels from a voter's models, *shares* channels from a peer's store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio
from pydantic import ValidationError

from swarmnode.catalog.chunks import LIST_SUFFIX
from swarmnode.catalog.manifest import FileEntry
from swarmnode.errors import FetchFailed, InvalidRequest, SwarmError
from swarmnode.wire.frames import Frame
from swarmnode.wire.limits import MAX_CHUNK_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

    from swarmnode.catalog.registry import Registry
    from swarmnode.catalog.store import ShardStore
    from swarmnode.wire.link import Channel


async def serve_files(registry: Registry, channel: Channel) -> None:
    """Answer `fetch` frames one after the other until the peer closes the channel."""
    async for frame in channel:
        try:
            path, offset, end = _locate(registry, frame)
        except SwarmError as error:
            await _refuse(channel, error)
            continue
        await _send_range(channel, path, offset, end)


async def serve_shares(store: ShardStore, channel: Channel) -> None:
    """Answer `ask` and `fetch` frames from what the store has checked, until the other peer closes the channel."""
    async for frame in channel:
        try:
            if frame.kind == "ask":
                await _tell_chunks(store, channel, frame)
                continue
            path, offset, end = await trio.to_thread.run_sync(_locate_share, store, frame)
        except SwarmError as error:
            await _refuse(channel, error)
            continue
        await _send_range(channel, path, offset, end)


async def _refuse(channel: Channel, error: SwarmError) -> None:
    await channel.send(Frame("error", {"code": error.code, "message": error.message}))


def _locate(registry: Registry, frame: Frame) -> tuple[Path, int, int]:
    """The range a `fetch` names; only files of a manifest, with the size and hash the manifest gives, are served."""
    if frame.kind != "fetch":
        raise InvalidRequest(f"a files channel takes fetch frames, not {frame.kind}")
    wanted = frame.header
    manifest = registry.get(wanted["model"])
    for entry in manifest.files:
        if entry.path == wanted["path"] and entry.sha256 == wanted["sha256"] and entry.size == wanted["size"]:
            offset, end = _range(wanted, entry)
            return registry.file_path(manifest.model_id, entry), offset, end
    raise InvalidRequest(f"{wanted['model']} has no file {wanted['path']!r} with that size and sha256")


def _locate_share(store: ShardStore, frame: Frame) -> tuple[Path, int, int]:
    """The range a `fetch` names, by the content alone: whoever knows its sha256 was told to load it. Without the list
    of its chunks it is a file that is here as a whole."""
    if frame.kind != "fetch":
        raise InvalidRequest(f"a shares channel takes ask and fetch frames, not {frame.kind}")
    header = frame.header
    if "list" not in header or "list_size" not in header:
        entry = _entry(header["path"], header["size"], header["sha256"])
        return store.whole(entry), *_range(header, entry)
    entry, chunk_list = _named(header)
    offset, end = _range(header, entry)
    return store.source_of(entry, chunk_list, offset, end), offset, end


async def _tell_chunks(store: ShardStore, channel: Channel, frame: Frame) -> None:
    entry, chunk_list = _named(frame.header)
    marks = await trio.to_thread.run_sync(store.marks, entry, chunk_list)
    await channel.send(Frame("have", {"sha256": entry.sha256}, marks[:MAX_CHUNK_BYTES]))


def _named(header: Mapping[str, Any]) -> tuple[FileEntry, FileEntry]:
    """The file and its list as a frame names them; raises InvalidRequest where a digest or a path is none."""
    path = header["path"]
    entry = _entry(path, header["size"], header["sha256"])
    return entry, _entry(path + LIST_SUFFIX, header["list_size"], header["list"])


def _entry(path: str, size: int, sha256: str) -> FileEntry:
    try:
        return FileEntry(path=path, size=size, sha256=sha256)
    except ValidationError as error:
        raise InvalidRequest(f"no file of a servable: {error.errors()[0]['msg']:.200}") from error


def _range(wanted: Mapping[str, Any], entry: FileEntry) -> tuple[int, int]:
    offset, end = wanted["offset"], wanted.get("end", entry.size)
    if not offset <= end <= entry.size:
        raise InvalidRequest(f"bytes {offset} to {end} are beyond the {entry.size} bytes of {entry.path}")
    return offset, end


async def _send_range(channel: Channel, path: Path, offset: int, end: int) -> None:
    async with await trio.open_file(path, "rb") as file:
        await file.seek(offset)
        while offset < end:
            chunk = await file.read(min(MAX_CHUNK_BYTES, end - offset))
            if not chunk:
                raise FetchFailed(f"{path.name} ended at byte {offset}; was it changed while it was read?")
            await channel.send(Frame("data", {"offset": offset}, chunk))
            offset += len(chunk)
    await channel.send(Frame("fetched", {"size": offset}))
