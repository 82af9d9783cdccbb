"""Write a tar of plain files as a stream of known length (POSIX ustar, with a pax record where a field is too small).

Only writing, and only this much of the format: nothing in swarmnode ever reads an archive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from swarmnode.errors import InvalidModel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BLOCK_BYTES = 512
CHUNK_BYTES = 1 << 20
_NAME_BYTES = 100
_MAX_USTAR_SIZE = 8**11 - 1
_END_BYTES = 2 * BLOCK_BYTES
_FILE_MODE = 0o644


@dataclass(frozen=True, slots=True)
class Member:
    """One plain file: its path in the archive, its size, and how to open it."""

    path: str
    size: int
    open: Callable[[], IO[bytes]]


@dataclass(frozen=True, slots=True)
class Archive:
    """A tar that is made as it is read."""

    members: tuple[Member, ...]
    modified_s: int = 0
    """Unix seconds, the same for every member."""

    @property
    def size_bytes(self) -> int:
        """The exact length of `chunks()` joined."""
        return sum(len(self._header(m)) + m.size + -m.size % BLOCK_BYTES for m in self.members) + _END_BYTES

    def chunks(self) -> Iterator[bytes]:
        """The bytes; raises InvalidModel where a file turns out shorter than it was, so no reader sees a false end."""
        for member in self.members:
            yield self._header(member)
            yield from _content(member)
            yield bytes(-member.size % BLOCK_BYTES)
        yield bytes(_END_BYTES)

    def _header(self, member: Member) -> bytes:
        records = b""
        if len(member.path.encode()) > _NAME_BYTES:
            records += _pax_record("path", member.path)
        if member.size > _MAX_USTAR_SIZE:
            records += _pax_record("size", str(member.size))
        block = _ustar(member.path.encode()[-_NAME_BYTES:], min(member.size, _MAX_USTAR_SIZE), b"0", self.modified_s)
        if not records:
            return block
        extended = _ustar(b"pax_header", len(records), b"x", self.modified_s)
        return extended + records + bytes(-len(records) % BLOCK_BYTES) + block


def _content(member: Member) -> Iterator[bytes]:
    left = member.size
    with member.open() as file:
        while left:
            chunk = file.read(min(CHUNK_BYTES, left))
            if not chunk:
                raise InvalidModel(
                    f"{member.path}: ended {left} bytes early while it was read; did something change it?"
                )
            left -= len(chunk)
            yield chunk


def _ustar(name: bytes, size: int, kind: bytes, modified_s: int) -> bytes:
    """One header block: fields of fixed width, numbers in octal, a checksum over the block with blanks in its place."""
    fields = (
        name.ljust(_NAME_BYTES, b"\0"),
        b"%07o\0" % _FILE_MODE,
        b"%07o\0" % 0,  # owner
        b"%07o\0" % 0,  # group
        b"%011o\0" % size,
        b"%011o\0" % min(modified_s, _MAX_USTAR_SIZE),
        b" " * 8,  # the checksum
        kind,
        bytes(_NAME_BYTES),  # no link
        b"ustar\x0000",
    )
    block = b"".join(fields).ljust(BLOCK_BYTES, b"\0")
    checksum = b"%06o\0 " % sum(block)
    return block[:148] + checksum + block[156:]


def _pax_record(key: str, value: str) -> bytes:
    """ "LENGTH key=value\\n", where LENGTH counts the whole record, its own digits too."""
    body = f" {key}={value}\n".encode()
    length = len(body)
    while len(str(length)) + len(body) != length:
        length = len(str(length)) + len(body)
    return str(length).encode() + body
