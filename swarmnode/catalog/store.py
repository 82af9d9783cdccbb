"""A peer's own files: fetched by content, checked before they count, laid out as the folder a worker loads from.

Layout under the root: `blobs/<sha256>` whole checked files, `partial/<sha256>` what a download has so far,
`slices/<sha256>` files of which some chunks are here (see `sliced_file`), `models/<id>-<digest>/` hard links in the
servable's layout. Every name is a digest, a checked model id or the path of a checked `FileEntry`, so nothing that a
coordinator sends can name a path elsewhere.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import threading
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING

from swarmnode.catalog.chunks import MAX_LIST_BYTES, parse_chunks
from swarmnode.catalog.disk import check_space, full_disk_as_no_space
from swarmnode.catalog.seal import is_sealed, seal
from swarmnode.catalog.sliced_file import SlicedFile, marks_path, read_marks
from swarmnode.errors import Conflict, FetchFailed
from swarmnode.ids import parse_model_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from swarmnode.catalog.manifest import FileEntry
    from swarmnode.ids import ModelId

_HASH_BYTES = 1 << 20
_DIGEST_CHARS = 16
"""Of the list of files, in a folder's name: two imports under one id, or two stages of one, do not share a folder."""


class ShardStore:
    """Content-addressed files of one peer. Synchronous; several loads of one process may use it at once."""

    def __init__(self, root: Path) -> None:
        self._blobs = root / "blobs"
        self._partial = root / "partial"
        self._slices = root / "slices"
        self._models = root / "models"
        for folder in (self._blobs, self._partial, self._slices, self._models):
            folder.mkdir(parents=True, exist_ok=True)

    def have(self, entry: FileEntry) -> bool:
        """Whether the whole file is here; it was checked before it got its place."""
        return _plain_size(self._blobs / entry.sha256) == entry.size

    def check_again(self, entries: Iterable[FileEntry], hashed: Callable[[int], None] = lambda _: None) -> None:
        """Remove what somebody wrote to since it was checked and is wrong now: it counts as one that never was here.

        `hashed` hears how far that is. Raises FetchFailed for what cannot be read.
        """
        for entry in entries:
            blob = self._blobs / entry.sha256
            with _as_fetch_failed(entry):
                if self.have(entry) and not is_sealed(blob):
                    _seal_or_remove(blob, entry, hashed)

    def missing(self, entries: Iterable[FileEntry]) -> tuple[FileEntry, ...]:
        """The files that are not here yet, each content once."""
        return tuple(entry for entry in {e.sha256: e for e in entries}.values() if not self.have(entry))

    def missing_bytes(self, entries: Iterable[FileEntry]) -> int:
        """What is still to be fetched for them, less what partial files already hold."""
        return sum(entry.size - min(entry.size, self._partial_size(entry)) for entry in self.missing(entries))

    def check_space(self, needed_bytes: int) -> None:
        """Raise NoSpace with the numbers unless `needed_bytes` fit beside the reserve."""
        check_space(self._blobs, needed_bytes, "fetching the model's files")

    def begin(self, entry: FileEntry, hashed: Callable[[int], None] = lambda _: None) -> PartialFile | None:
        """Own the download of one file, continuing what is there; None: the whole file arrived meanwhile.

        What is there is hashed first (minutes for a large file on a slow disk); `hashed` hears how far that is.
        Raises Conflict while another load downloads it (wait, then ask `have`), NoSpace. The file is owned until
        `finish`, `close` or the end of the `with` block, also across processes.
        """
        partial = PartialFile(entry, self._partial / entry.sha256, self._blobs / entry.sha256, hashed)
        if self.have(entry):
            partial.discard()
            return None
        return partial

    def open_slice(
        self, entry: FileEntry, chunk_list: FileEntry, hashed: Callable[[int], None] = lambda _: None
    ) -> SlicedFile:
        """Own a file that is fetched by chunks; `chunk_list` must be here. `hashed` and Conflict as `begin`'s."""
        return SlicedFile(entry, chunk_list, self._read_list(chunk_list), self._slices, hashed)

    def marks(self, entry: FileEntry, chunk_list: FileEntry) -> bytes:
        """A byte for each chunk of a file, 1 where it is here and checked; empty where its list is not here."""
        if not self.have(chunk_list):
            return b""
        count = len(parse_chunks(self._read_list(chunk_list), entry))
        if self.have(entry):
            return b"\1" * count
        if _plain_size(self._slices / entry.sha256) != entry.size:
            return bytes(count)
        return read_marks(marks_path(self._slices, entry.sha256, chunk_list.sha256), count)

    def source_of(self, entry: FileEntry, chunk_list: FileEntry, begin: int, end: int) -> Path:
        """Where bytes begin … end-1 of a file can be read, all of them checked; raises FetchFailed otherwise."""
        if self.have(entry):
            return self._blobs / entry.sha256
        marks = self.marks(entry, chunk_list)
        covering = parse_chunks(self._read_list(chunk_list), entry).covering(begin, end) if marks else ()
        if not marks or not all(marks[index] for index in covering):
            raise FetchFailed(f"{entry.path}: bytes {begin} to {end - 1} are not here")
        return self._slices / entry.sha256

    def whole(self, entry: FileEntry) -> Path:
        """Where the whole file lies; raises FetchFailed where it is not here."""
        if not self.have(entry):
            raise FetchFailed(f"{entry.path}: is not here")
        return self._blobs / entry.sha256

    def models(self) -> tuple[str, ...]:
        """The ids of the models of which files were placed here."""
        return tuple(sorted({path.name.rpartition("-")[0] for path in self._models.iterdir()}))

    def _read_list(self, chunk_list: FileEntry) -> bytes:
        if chunk_list.size > MAX_LIST_BYTES or not self.have(chunk_list):
            raise FetchFailed(f"{chunk_list.path}: is not in the store, or too large for a list of chunks")
        return (self._blobs / chunk_list.sha256).read_bytes()

    def place(self, model: ModelId, entries: Iterable[FileEntry], sliced: frozenset[str] = frozenset()) -> Path:
        """Lay out exactly these files as `tokenizer/…` and `shards/stage-i/…`; returns the folder.

        Of the paths in `sliced` the chunks that their stage reads were fetched. Raises FetchFailed if a file is not in
        the store.
        """
        wanted = sorted(entries, key=lambda entry: entry.path)
        folder = self._models / f"{parse_model_id(model)}-{_digest(wanted)}"
        with full_disk_as_no_space(f"placing {model}"):
            for entry in wanted:
                source = self._blobs / entry.sha256
                if not self.have(entry) and entry.path in sliced:
                    source = self._slices / entry.sha256
                if _plain_size(source) != entry.size:
                    raise FetchFailed(f"{entry.path}: is not in the store, fetch it before it is placed")
                _link(source, folder / entry.path)
        return folder

    def _partial_size(self, entry: FileEntry) -> int:
        return _plain_size(self._partial / entry.sha256) or 0


class PartialFile:
    """One file on its way in. What is already there is hashed on opening; `length` is where the download goes on."""

    def __init__(self, entry: FileEntry, path: Path, target: Path, hashed: Callable[[int], None]) -> None:
        self.entry = entry
        self._path = path
        self._target = target
        self._digest = hashlib.sha256()
        self._file = _open_locked(path, entry)
        try:
            self.length = self._take_over(hashed)
        except BaseException:
            self._file.close()
            raise

    def write(self, chunk: bytes | bytearray | memoryview) -> None:
        """Append; raises NoSpace (what is there stays) and FetchFailed if more comes than the manifest says."""
        rest = memoryview(chunk).cast("B")
        if self.length + len(rest) > self.entry.size:
            self.discard()
            raise FetchFailed(f"{self.entry.path}: more than the {self.entry.size} bytes of the manifest were sent")
        with full_disk_as_no_space(f"fetching {self.entry.path}"):
            while rest:
                # A nearly full disk takes a part first and raises at the next call; what it took has to count.
                taken = self._file.write(rest)
                self._digest.update(rest[:taken])
                self.length += taken
                rest = rest[taken:]

    def finish(self) -> Path:
        """Check length and sha256 and move the file into the store; a wrong one is removed and named."""
        if self.length != self.entry.size:
            self.close()
            raise FetchFailed(
                f"{self.entry.path}: {self.length} of {self.entry.size} bytes arrived; they are kept and continued"
            )
        found = self._digest.hexdigest()
        if found != self.entry.sha256:
            self.discard()
            raise FetchFailed(
                f"{self.entry.path}: sha256 is {found}, the manifest says {self.entry.sha256}; "
                "the file was removed and has to be fetched again"
            )
        with full_disk_as_no_space(f"fetching {self.entry.path}"):
            seal(self._file.fileno())
            os.fsync(self._file.fileno())
            self._path.replace(self._target)
        self.close()
        return self._target

    def discard(self) -> None:
        """Remove what is there and give up the file."""
        with suppress(FileNotFoundError):
            self._path.unlink()
        self.close()

    def close(self) -> None:
        """Give up the file; what is there stays and is continued by the next `begin`."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _take_over(self, hashed: Callable[[int], None]) -> int:
        """Hash what an earlier download left; something longer than the file cannot be its beginning."""
        if os.fstat(self._file.fileno()).st_size > self.entry.size:
            self._file.truncate(0)
        self._file.seek(0)
        return _hash_into(self._digest, self._file, hashed)


def _hash_into(digest: hashlib._Hash, file: IO[bytes], hashed: Callable[[int], None]) -> int:
    """Hash the rest of an open file; returns its bytes, which `hashed` hears the number of as they grow."""
    size = 0
    while chunk := file.read(_HASH_BYTES):
        digest.update(chunk)
        size += len(chunk)
        hashed(size)
    return size


def _seal_or_remove(blob: Path, entry: FileEntry, hashed: Callable[[int], None]) -> None:
    with blob.open("rb", buffering=0) as file:
        digest = hashlib.sha256()
        _hash_into(digest, file, hashed)
        if digest.hexdigest() == entry.sha256:
            seal(file.fileno())
        elif os.path.samestat(os.fstat(file.fileno()), blob.stat()):  # else another load has fetched it meanwhile
            blob.unlink()


def _open_locked(path: Path, entry: FileEntry) -> IO[bytes]:
    """Open and lock a partial file; Conflict while somebody else owns it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with _as_fetch_failed(entry), full_disk_as_no_space(f"fetching {entry.path}"):
        # Unbuffered: what `write` took is on the disk's side when the process dies, and a full disk shows at once.
        file = os.fdopen(os.open(path, flags, 0o644), "r+b", buffering=0)
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The owner may have finished and renamed the file between our open and our lock.
        if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
            raise FileNotFoundError(errno.ENOENT, "moved", str(path))
    except (BlockingIOError, FileNotFoundError) as error:
        file.close()
        raise Conflict(f"{entry.path}: another load is fetching it; wait for that one") from error
    return file


def _digest(entries: list[FileEntry]) -> str:
    lines = "".join(f"{entry.sha256} {entry.path}\n" for entry in entries)
    return hashlib.sha256(lines.encode()).hexdigest()[:_DIGEST_CHARS]


@contextmanager
def _as_fetch_failed(entry: FileEntry) -> Iterator[None]:
    """Map what the file system refuses (rights, a link in the way) to FetchFailed."""
    try:
        yield
    except OSError as error:
        raise FetchFailed(f"{entry.path}: cannot be stored: {error.strerror} ({error.filename})") from error


def _plain_size(path: Path) -> int | None:
    """Size of a regular file, not of what a link points to; None if there is none."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_size if path.is_file() and not path.is_symlink() else None


def _link(blob: Path, target: Path) -> None:
    """Make `target` a hard link of `blob`: no second copy, and removing one leaves the other."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        if os.path.samestat(target.lstat(), blob.lstat()):
            return
    temporary = _temporary(target)
    temporary.unlink(missing_ok=True)
    temporary.hardlink_to(blob)
    temporary.replace(target)


def _temporary(target: Path) -> Path:
    """A name that no other load of this or another process uses."""
    return target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
