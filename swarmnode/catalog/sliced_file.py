"""A file of which a peer holds some chunks: a sparse file of the whole's size, and a mark for every chunk there.

A chunk is written only after its sha256 was checked, and marked only once it is on the disk: what is marked is right,
also after a power cut; and where somebody else wrote to the file since (`seal`), it is checked again. The loader reads
the file as any other; it asks only for tensors whose chunks were fetched.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from swarmnode.catalog.chunks import ChunkList, parse_chunks
from swarmnode.catalog.disk import full_disk_as_no_space
from swarmnode.catalog.seal import is_sealed, seal
from swarmnode.errors import Conflict, FetchFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from swarmnode.catalog.manifest import FileEntry

FLUSH_BYTES = 64 << 20
"""Fetched anew at most after a power cut."""
_HERE, _MISSING = b"\1", b"\0"


def marks_path(folder: Path, sha256: str, list_sha256: str) -> Path:
    """Where the marks of a file cut by this list lie: another list cuts the same file elsewhere."""
    return folder / f"{sha256}-{list_sha256[:16]}.have"


def read_marks(path: Path, count: int) -> bytes:
    """A byte for each of `count` chunks, 1 where it is here; none of them where the file is not this list's."""
    with suppress(OSError):
        marks = path.read_bytes()
        if len(marks) == count:
            return marks
    return bytes(count)


class SlicedFile:
    """Owns the file until `close`, also across processes; raises Conflict while another load does. Threads may write
    and flush it at once."""

    def __init__(
        self, entry: FileEntry, chunk_list: FileEntry, raw_list: bytes, folder: Path, hashed: Callable[[int], None]
    ) -> None:
        """`hashed` hears how far the check is of what may have been spoiled."""
        self.entry = entry
        self.chunks: ChunkList = parse_chunks(raw_list, entry)
        self._file = _open(folder / entry.sha256, entry)
        self._marks_file = -1
        try:
            _lock(self._file, entry)
            marks = marks_path(folder, entry.sha256, chunk_list.sha256)
            self._marks_file = _open(marks, entry)
            self._marks = self._take_over()
            if not is_sealed(self._file):
                self._check_again(marks, hashed)
        except BaseException:
            self._release()
            raise
        self._lock = threading.RLock()
        """Of what was written and not flushed: a chunk that comes while others are synced is not synced by that."""
        self._written: list[int] = []
        self._unflushed_bytes = 0

    def missing(self, wanted: Iterable[int]) -> list[int]:
        """The chunks of `wanted` that are not here."""
        return [index for index in wanted if not self._marks[index]]

    def read(self, index: int) -> bytes:
        """A chunk that is here."""
        return os.pread(self._file, self.chunks.size(index), self.chunks.begin(index))

    def write(self, index: int, data: bytes | bytearray | memoryview) -> None:
        """Check and keep a chunk; raises FetchFailed that names a wrong one, which is not written, and NoSpace."""
        self.check(index, data)
        with self._lock, full_disk_as_no_space(f"fetching {self.entry.path}"):
            rest, at = memoryview(data), self.chunks.begin(index)
            while rest:
                taken = os.pwrite(self._file, rest, at)
                rest, at = rest[taken:], at + taken
            self._written.append(index)
            self._unflushed_bytes += len(data)
            if self._unflushed_bytes >= FLUSH_BYTES:
                self.flush()

    def check(self, index: int, data: bytes | bytearray | memoryview) -> None:
        begin, size = self.chunks.begin(index), self.chunks.size(index)
        if len(data) != size or hashlib.sha256(data).digest() != self.chunks.digests[index]:
            raise FetchFailed(
                f"{self.entry.path}: what came for bytes {begin} to {begin + size - 1} has another sha256 than the "
                "list of its chunks says; it was not kept"
            )

    def flush(self) -> None:
        """What was written counts from here on, for others too."""
        with self._lock, full_disk_as_no_space(f"fetching {self.entry.path}"):
            if not self._written:
                return
            written, self._written, self._unflushed_bytes = self._written, [], 0  # a sync that fails marks nothing
            os.fdatasync(self._file)
            for index in written:
                self._marks[index] = 1
                os.pwrite(self._marks_file, _HERE, index)

    def close(self) -> None:
        """Flush, seal and give up the file."""
        try:
            self.flush()
            seal(self._file)
        finally:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _take_over(self) -> bytearray:
        """The marks of an earlier fetch; none where the file is not the one they were made for."""
        count = len(self.chunks)
        with full_disk_as_no_space(f"fetching {self.entry.path}"):
            sized = os.fstat(self._file).st_size == self.entry.size
            if not sized or os.fstat(self._marks_file).st_size != count:
                os.ftruncate(self._marks_file, 0)
                os.ftruncate(self._marks_file, count)
            if not sized:
                os.ftruncate(self._file, self.entry.size)
        return bytearray(os.pread(self._marks_file, count, 0))

    def _check_again(self, marks: Path, hashed: Callable[[int], None]) -> None:
        """Somebody else wrote to it, or a fetch was killed before it could seal it: what is wrong is here no more, nor
        what only another list's marks tell of, which nobody can check here."""
        for other in marks.parent.glob(f"{self.entry.sha256}-*.have"):
            if other != marks:
                other.unlink(missing_ok=True)
        for index in [index for index, mark in enumerate(self._marks) if mark]:
            if not self._is_right(index):
                self._marks[index] = 0
                os.pwrite(self._marks_file, _MISSING, index)
            hashed(self.chunks.ends[index])

    def _is_right(self, index: int) -> bool:
        try:
            return hashlib.sha256(self.read(index)).digest() == self.chunks.digests[index]
        except OSError:  # a disk that fails
            return False

    def _release(self) -> None:
        for descriptor in (self._file, self._marks_file):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._marks_file = -1


def _open(path: Path, entry: FileEntry) -> int:
    try:
        with full_disk_as_no_space(f"fetching {entry.path}"):
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise FetchFailed(f"{entry.path}: cannot be stored: {error.strerror} ({error.filename})") from error


def _lock(descriptor: int, entry: FileEntry) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Conflict(f"{entry.path}: another load is fetching it; wait for that one") from error
