"""Read and write the header of a safetensors file without torch, trusting nothing in it.

A file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes back to back. A header that lies
(spans beyond the file, overlaps, holes, a size that is not dtype × shape) raises InvalidModel before any byte of it
is used; llama.cpp-style loaders that believed such offsets were read out of bounds.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swarmnode.errors import InvalidModel

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 25_000_000
"""A quarter of the format's own cap: some 150,000 tensors, ten times the largest checkpoint known; parsing costs
about ten times its size in memory, so the format's 100 MB would let one file take a gigabyte."""
MAX_TENSORS = 200_000
MAX_NAME_CHARS = 512
MAX_DIMENSIONS = 16
_HEADER_ALIGNMENT_BYTES = 8
"""The format's own writer pads so that 8-byte elements can be mapped in place."""

DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: `begin` and `end` are absolute byte offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        return self.end - self.begin

    @property
    def params(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of the file by name, in file order; raises InvalidModel naming the file and the tensor."""
    try:
        with path.open("rb") as file:
            file_bytes = file.seek(0, 2)
            file.seek(0)
            header_bytes = _header_bytes(file.read(LENGTH_BYTES), file_bytes, path.name)
            header = file.read(header_bytes)
    except OSError as error:
        raise InvalidModel(f"{path.name}: cannot be read ({error.strerror or error})") from error
    return parse_header(header, file_bytes, path.name)


def parse_header(header: bytes, file_bytes: int, file_name: str) -> dict[str, TensorEntry]:
    """Check and return the tensors of a header (its JSON bytes, without the length) of a file of `file_bytes`."""
    fields = _parse_json(header, file_name)
    fields.pop("__metadata__", None)
    if len(fields) > MAX_TENSORS:
        raise InvalidModel(f"{file_name}: the header lists {len(fields)} tensors, allowed are {MAX_TENSORS}")
    data_begin = LENGTH_BYTES + len(header)
    entries = {name: _entry(name, raw, data_begin, file_name) for name, raw in fields.items()}
    ordered = sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end))
    _check_contiguous(ordered, data_begin, file_bytes, file_name)
    return dict(ordered)


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """Length and header of a file that holds (name, dtype, shape) back to back in this order."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + DTYPE_BYTES[dtype] * math.prod(shape)
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    header = json.dumps(fields, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _HEADER_ALIGNMENT_BYTES)
    return len(header).to_bytes(LENGTH_BYTES, "little") + header


def _header_bytes(prefix: bytes, file_bytes: int, file_name: str) -> int:
    if len(prefix) < LENGTH_BYTES:
        raise InvalidModel(f"{file_name}: {file_bytes} bytes are too few for a safetensors file")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise InvalidModel(
            f"{file_name}: the header claims {length} bytes, allowed are {MAX_HEADER_BYTES}; "
            "this is not a safetensors file or a hostile one"
        )
    if length > file_bytes - LENGTH_BYTES:
        raise InvalidModel(
            f"{file_name}: the header claims {length} bytes, the file has {file_bytes}; is it cut short?"
        )
    return length


def _parse_json(header: bytes, file_name: str) -> dict[str, Any]:
    try:
        fields = json.loads(header.decode("utf-8"), object_pairs_hook=_unique_fields)
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"{file_name}: the header is not valid JSON: {str(error)[:200]}") from error
    if not isinstance(fields, dict):
        raise InvalidModel(f"{file_name}: the header is not a JSON object")
    return fields


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        # Two readers that keep different copies of a name would disagree about what was checked.
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"{twice[:80]!r} occurs twice")
    return fields


def _entry(name: str, raw: object, data_begin: int, file_name: str) -> TensorEntry:
    where = f"{file_name}: tensor {name[:80]!r}"
    if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise InvalidModel(f"{where}: names have 1 to {MAX_NAME_CHARS} printable characters")
    if not isinstance(raw, dict) or set(raw) != {"dtype", "shape", "data_offsets"}:
        raise InvalidModel(f"{where}: exactly dtype, shape and data_offsets are expected")
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise InvalidModel(f"{where}: dtype {str(dtype)[:40]!r} is not one of {', '.join(DTYPE_BYTES)}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise InvalidModel(f"{where}: shape {str(shape)[:80]} is not a list of up to {MAX_DIMENSIONS} sizes")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise InvalidModel(f"{where}: data_offsets {str(offsets)[:80]} is not [begin, end]")
    span, expected = offsets[1] - offsets[0], DTYPE_BYTES[dtype] * math.prod(shape)
    if span != expected:
        raise InvalidModel(f"{where}: spans {span} bytes, but {dtype} × {str(shape)[:80]} takes {expected}")
    return TensorEntry(dtype, tuple(shape), data_begin + offsets[0], data_begin + offsets[1])


def _are_sizes(values: object) -> bool:
    """A list of plain ints from 0 to 2^63-1 (bool is an int in Python, not in a header)."""
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def _check_contiguous(ordered: list[tuple[str, TensorEntry]], data_begin: int, file_bytes: int, file_name: str) -> None:
    """The format allows no hole, no overlap and no tail: each tensor begins where the one before it ends."""
    position = data_begin
    for name, entry in ordered:
        where = f"{file_name}: tensor {name[:80]!r}"
        if entry.end > file_bytes:
            raise InvalidModel(f"{where}: ends at byte {entry.end}, the file has {file_bytes}; is it cut short?")
        if entry.begin < position:
            raise InvalidModel(f"{where}: begins at byte {entry.begin}, inside the tensor before it")
        if entry.begin > position:
            raise InvalidModel(f"{where}: begins at byte {entry.begin}, {entry.begin - position} bytes belong to none")
        position = entry.end
    if position != file_bytes:
        raise InvalidModel(f"{file_name}: {file_bytes - position} bytes after the last tensor belong to none")
