"""The coordinator's side of a *files* channel: reads servable files in chunks for a peer that asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from swarmnode.errors import InvalidRequest, SwarmError
from swarmnode.wire.frames import Frame
from swarmnode.wire.limits import MAX_CHUNK_BYTES

if TYPE_CHECKING:
    from pathlib import Path

    from swarmnode.catalog.registry import Registry
    from swarmnode.wire.link import Channel


async def serve_files(registry: Registry, channel: Channel) -> None:
    """Answer `fetch` frames one after the other until the peer closes the channel."""
    async for frame in channel:
        try:
            path, offset = _locate(registry, frame)
        except SwarmError as error:
            await channel.send(Frame("error", {"code": error.code, "message": error.message}))
            continue
        await _send_file(channel, path, offset)


def _locate(registry: Registry, frame: Frame) -> tuple[Path, int]:
    """The file a `fetch` names; only files of a manifest, with the size and hash the manifest gives, are served."""
    if frame.kind != "fetch":
        raise InvalidRequest(f"a files channel takes fetch frames, not {frame.kind}")
    wanted = frame.header
    manifest = registry.get(wanted["model"])
    for entry in manifest.files:
        if entry.path == wanted["path"] and entry.sha256 == wanted["sha256"] and entry.size == wanted["size"]:
            if wanted["offset"] > entry.size:
                raise InvalidRequest(f"offset {wanted['offset']} is beyond the {entry.size} bytes of {entry.path}")
            return registry.file_path(manifest.model_id, entry), wanted["offset"]
    raise InvalidRequest(f"{wanted['model']} has no file {wanted['path']!r} with that size and sha256")


async def _send_file(channel: Channel, path: Path, offset: int) -> None:
    async with await trio.open_file(path, "rb") as file:
        await file.seek(offset)
        while chunk := await file.read(MAX_CHUNK_BYTES):
            await channel.send(Frame("data", {"offset": offset}, chunk))
            offset += len(chunk)
    await channel.send(Frame("fetched", {"size": offset}))
