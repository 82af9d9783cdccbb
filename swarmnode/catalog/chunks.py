"""The chunks of a file, each with its sha256, so that any part of the file can be fetched from anybody and checked.

A list of them lies beside the file as NAME.chunks: a record of length and digest for every chunk, in file order. The
manifest holds the list's own sha256, so a list can come from anybody, too. In a shard the first chunk is the header and
every other one lies within a tensor: a slice takes the bytes of its tensors and no others.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from swarmnode.catalog.safetensors_header import LENGTH_BYTES, MAX_HEADER_BYTES, parse_header
from swarmnode.errors import InvalidModel

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from swarmnode.catalog.manifest import FileEntry
    from swarmnode.catalog.safetensors_header import TensorEntry

LIST_SUFFIX = ".chunks"
MAX_CHUNK_BYTES = 32 << 20
"""What a peer holds in memory of a chunk that is not checked yet; a header is one chunk and may have 25 MB."""
MAX_LIST_BYTES = 36 << 20
"""A million chunks, which cut a model of 4 TB."""
_RECORD = struct.Struct("<I32s")


@dataclass(frozen=True, slots=True)
class ChunkList:
    """Chunk i is the bytes `ends[i-1]` (0 for the first) … `ends[i]`-1 of the file and hashes to `digests[i]`."""

    ends: tuple[int, ...]
    digests: tuple[bytes, ...]

    def __len__(self) -> int:
        return len(self.ends)

    def begin(self, index: int) -> int:
        return self.ends[index - 1] if index else 0

    def size(self, index: int) -> int:
        return self.ends[index] - self.begin(index)

    def covering(self, begin: int, end: int) -> range:
        """The chunks that hold bytes begin … end-1."""
        if begin >= end:
            return range(0)
        return range(bisect_right(self.ends, begin), bisect_right(self.ends, end - 1) + 1)


def encode_chunks(chunks: Iterable[tuple[int, bytes]]) -> bytes:
    """The list of chunks of these lengths and sha256 digests."""
    return b"".join(_RECORD.pack(length, digest) for length, digest in chunks)


def parse_chunks(raw: bytes, entry: FileEntry) -> ChunkList:
    """The chunks of `entry`; raises InvalidModel unless they are its bytes from first to last."""
    where = f"{entry.path}{LIST_SUFFIX}"
    if len(raw) > MAX_LIST_BYTES or len(raw) % _RECORD.size:
        raise InvalidModel(f"{where}: {len(raw)} bytes are no list of chunks; import the model again")
    records = list(_RECORD.iter_unpack(raw))
    bad = next((length for length, _ in records if not 0 < length <= MAX_CHUNK_BYTES), None)
    if bad is not None:
        raise InvalidModel(f"{where}: lists a chunk of {bad} bytes, allowed are 1 to {MAX_CHUNK_BYTES}")
    ends = tuple(accumulate(length for length, _ in records))
    if (ends[-1] if ends else 0) != entry.size:
        raise InvalidModel(f"{where}: its chunks have {ends[-1] if ends else 0} bytes, the file has {entry.size}")
    return ChunkList(ends, tuple(digest for _, digest in records))


def header_of(first_chunk: bytes, entry: FileEntry) -> dict[str, TensorEntry]:
    """The tensors of a shard, from its first chunk; raises InvalidModel where that is not its header."""
    length = int.from_bytes(first_chunk[:LENGTH_BYTES], "little")
    if len(first_chunk) < LENGTH_BYTES or length > MAX_HEADER_BYTES or LENGTH_BYTES + length != len(first_chunk):
        raise InvalidModel(f"{entry.path}: its first chunk is not its header; import the model again")
    return parse_header(first_chunk[LENGTH_BYTES:], entry.size, entry.path)


def chunk_lists(entries: Iterable[FileEntry]) -> Mapping[str, FileEntry]:
    """By path of the file, the entry of its list; a file of an older import has none and is fetched whole."""
    by_path = {entry.path: entry for entry in entries}
    return {path: by_path[path + LIST_SUFFIX] for path in by_path if path + LIST_SUFFIX in by_path}
