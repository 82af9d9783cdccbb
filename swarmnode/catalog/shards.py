"""Cut a checkpoint into the shards of its stages and write them, one byte range at a time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmnode.catalog.checkpoint import EMBEDDING, FINAL_NORM, HEAD, SINGLE_FILE, Checkpoint, SourceTensor
from swarmnode.catalog.chunks import LIST_SUFFIX, encode_chunks
from swarmnode.catalog.kept_blocks import BLOCKS_FILE
from swarmnode.catalog.manifest import FileEntry
from swarmnode.catalog.safetensors_header import DTYPE_BYTES, encode_header
from swarmnode.cluster.partition import balanced_boundaries
from swarmnode.errors import InvalidModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

COPY_BYTES = 4 << 20
"""Large enough that the system calls cost nothing beside the hash, small beside any machine's memory. A chunk of a
shard has as many: half a second of a home's uplink is the most that a wrong one costs."""

Advance = Callable[[int, str], None]
"""Called with the bytes just written and the file's path in the servable."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The tensors of one stage, by full name."""

    path: str
    tensors: Mapping[str, SourceTensor]

    @property
    def size_bytes(self) -> int:
        return sum(tensor.entry.size_bytes for tensor in self.tensors.values())


def default_boundaries(checkpoint: Checkpoint, stages: int) -> tuple[int, ...]:
    """The cut into `stages` that balances bytes, the embedding counted on the first and the head on the last."""
    count = len(checkpoint.layers)
    if not 1 <= stages <= count:
        raise InvalidModel(f"cannot cut {count} layers into {stages} stages: choose 1 to {count}")
    costs = [sum(tensor.entry.size_bytes for tensor in layer.values()) for layer in checkpoint.layers]
    last = checkpoint.final_norm.entry.size_bytes + checkpoint.head.entry.size_bytes
    return balanced_boundaries(costs, checkpoint.embedding.entry.size_bytes, last, stages)


def cut(checkpoint: Checkpoint, boundaries: Sequence[int]) -> tuple[Shard, ...]:
    """The shards between the boundaries, and with each the one of its matrices' blocks where the checkpoint has some; a
    tied head is written out on the last one, so no stage needs another's."""
    begins, ends = (0, *boundaries), (*boundaries, len(checkpoint.layers))
    shards = []
    for stage, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        tensors: dict[str, SourceTensor] = {EMBEDDING: checkpoint.embedding} if begin == 0 else {}
        for layer in checkpoint.layers[begin:end]:
            tensors |= layer
        if end == len(checkpoint.layers):
            tensors |= {FINAL_NORM: checkpoint.final_norm, HEAD: checkpoint.head}
        shards.append(Shard(f"shards/stage-{stage}/{SINGLE_FILE}", tensors))
        blocks = {name: tensor for layer in checkpoint.blocks[begin:end] for name, tensor in layer.items()}
        if blocks:
            shards.append(Shard(f"shards/stage-{stage}/{BLOCKS_FILE}", blocks))
    return tuple(shards)


def write_shard(shard: Shard, root: Path, advance: Advance) -> tuple[FileEntry, FileEntry]:
    """Write a shard as a safetensors file under `root`, and the list of its chunks beside it.

    Wider dtypes first, so that every tensor stays aligned, then by name, so that the same weights give the same bytes.
    """
    ordered = sorted(shard.tensors.items(), key=lambda item: (-DTYPE_BYTES[item[1].entry.dtype], item[0]))
    header = encode_header((name, tensor.entry.dtype, tensor.entry.shape) for name, tensor in ordered)

    digests: list[tuple[int, bytes]] = []

    def chunks() -> Iterator[bytes]:
        yield header
        for _, tensor in ordered:
            yield from _byte_range(tensor.path, tensor.entry.begin, tensor.entry.end)

    def noted() -> Iterator[bytes]:
        for chunk in chunks():
            digests.append((len(chunk), hashlib.sha256(chunk).digest()))
            yield chunk

    written = _write(root, shard.path, noted(), advance)
    return written, _write(root, shard.path + LIST_SUFFIX, iter((encode_chunks(digests),)), advance)


def write_copy(source: Path, root: Path, path: str, advance: Advance) -> FileEntry:
    """Copy a whole file into the servable under `root`."""
    return _write(root, path, _byte_range(source, 0, source.stat().st_size), advance)


def _write(root: Path, path: str, chunks: Iterator[bytes], advance: Advance) -> FileEntry:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    with target.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
            digest.update(chunk)
            size += len(chunk)
            advance(len(chunk), path)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(path=path, size=size, sha256=digest.hexdigest())


def _byte_range(path: Path, begin: int, end: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(begin)
        while begin < end:
            chunk = file.read(min(COPY_BYTES, end - begin))
            if not chunk:
                raise InvalidModel(f"{path.name}: ended at byte {begin} while it was read; did something change it?")
            begin += len(chunk)
            yield chunk
