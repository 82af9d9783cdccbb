"""The archive is a tar that the standard tools read, of exactly the announced length."""

from __future__ import annotations

import io
import tarfile
from typing import IO, TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.catalog.archive import Archive, Member
from swarmnode.catalog.registry import Registry
from swarmnode.errors import InvalidModel

if TYPE_CHECKING:
    from pathlib import Path

    from swarmnode.catalog.manifest import Manifest


def member(path: str, content: bytes) -> Member:
    return Member(path, len(content), lambda: io.BytesIO(content))


def test_a_servable_comes_whole(root: Path, servable: Manifest, tmp_path: Path) -> None:
    archive = Registry(root).archive(servable.id)
    raw = b"".join(archive.chunks())
    assert len(raw) == archive.size_bytes
    with tarfile.open(fileobj=io.BytesIO(raw), mode="r:") as tar:
        names = tar.getnames()
        assert names == [f"tiny-llama/{p}" for p in ("servable.json", *(f.path for f in servable.files))]
        for name in names:
            file = tar.extractfile(name)
            assert file is not None
            assert file.read() == (root / name).read_bytes()
        assert {(m.mode, m.mtime, m.isreg()) for m in tar} == {(0o644, servable.created, True)}


paths = st.lists(st.text("aé-", min_size=1, max_size=90), min_size=1, max_size=4).map("/".join)


@settings(deadline=None)
@given(files=st.dictionaries(paths, st.binary(max_size=1500), max_size=5))
def test_any_names_and_sizes_are_read_back(files: dict[str, bytes]) -> None:
    archive = Archive(tuple(member(path, content) for path, content in files.items()))
    raw = b"".join(archive.chunks())
    assert len(raw) == archive.size_bytes
    with tarfile.open(fileobj=io.BytesIO(raw), mode="r:", encoding="utf-8") as tar:
        read = {m.name: tar.extractfile(m) for m in tar}
        assert {name: file.read() for name, file in read.items() if file} == files


class Zeros(io.RawIOBase):
    def read(self, size: int = -1) -> bytes:
        return bytes(size)


def test_a_file_beyond_8_gib_keeps_its_size() -> None:
    size = 9 << 30
    archive = Archive((Member("big", size, Zeros),))  # type: ignore[arg-type]
    head = next(archive.chunks())
    info = tarfile.TarFile.open(fileobj=io.BytesIO(head + bytes(1024)), mode="r:").next()
    assert info is not None
    assert (info.name, info.size) == ("big", size)
    assert archive.size_bytes == len(head) + size + 1024


def test_a_file_that_shrank_breaks_the_stream() -> None:
    def open_short() -> IO[bytes]:
        return io.BytesIO(b"abc")

    archive = Archive((Member("x", 10, open_short),))
    with pytest.raises(InvalidModel, match="x: ended 7 bytes early"):
        list(archive.chunks())
