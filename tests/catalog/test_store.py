"""The peer's store: only whole, checked files count; downloads resume; two loads never write one file."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.catalog import disk
from swarmnode.catalog.manifest import FileEntry
from swarmnode.catalog.store import ShardStore
from swarmnode.errors import Conflict, FetchFailed, NoSpace
from swarmnode.ids import ModelId

if TYPE_CHECKING:
    from pathlib import Path

MODEL = ModelId("tiny")
CONTENT = bytes(range(256)) * 40


def entry_of(content: bytes, path: str = "shards/stage-0/model.safetensors") -> FileEntry:
    return FileEntry(path=path, size=len(content), sha256=hashlib.sha256(content).hexdigest())


@pytest.fixture
def store(tmp_path: Path) -> ShardStore:
    return ShardStore(tmp_path / "peer")


def fetch(store: ShardStore, content: bytes, path: str = "shards/stage-0/model.safetensors") -> FileEntry:
    entry = entry_of(content, path)
    partial = store.begin(entry)
    assert partial is not None
    with partial:
        partial.write(content)
        partial.finish()
    return entry


def test_a_file_counts_once_it_is_whole(store: ShardStore) -> None:
    entry = entry_of(CONTENT)
    assert not store.have(entry)
    partial = store.begin(entry)
    assert partial is not None
    partial.write(CONTENT[:100])
    assert not store.have(entry)
    partial.write(memoryview(CONTENT)[100:])
    assert not store.have(entry)
    assert partial.finish().read_bytes() == CONTENT
    assert store.have(entry)
    assert store.begin(entry) is None
    assert store.missing([entry]) == ()


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, len(CONTENT)), max_size=5))
def test_a_download_continues_where_it_was_broken(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    store = ShardStore(tmp_path_factory.mktemp("peer"))
    entry, done = entry_of(CONTENT), 0
    for cut in sorted(cuts):
        partial = store.begin(entry)
        assert partial is not None
        assert partial.length == done
        with partial:
            partial.write(CONTENT[done:cut])
        assert store.missing_bytes([entry]) == len(CONTENT) - cut
        done = cut
    partial = store.begin(entry)
    assert partial is not None
    partial.write(CONTENT[done:])
    assert partial.finish().read_bytes() == CONTENT


def test_a_process_that_is_killed_leaves_a_resumable_file(store: ShardStore, tmp_path: Path) -> None:
    entry = entry_of(CONTENT)
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from swarmnode.catalog.manifest import FileEntry\n"
        "from swarmnode.catalog.store import ShardStore\n"
        "partial = ShardStore(Path(sys.argv[1])).begin(FileEntry.model_validate_json(sys.argv[2]))\n"
        "partial.write(bytes(range(100)))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "peer"), entry.model_dump_json()]
    assert subprocess.run(command, check=False).returncode == -9
    partial = store.begin(entry)
    assert partial is not None
    assert partial.length == 100
    partial.write(CONTENT[100:])
    partial.finish()
    assert store.have(entry)


def test_a_wrong_file_never_enters_and_is_named(store: ShardStore) -> None:
    entry = entry_of(CONTENT)
    partial = store.begin(entry)
    assert partial is not None
    partial.write(b"x" * len(CONTENT))
    with pytest.raises(FetchFailed, match=r"shards/stage-0/model\.safetensors: sha256 is"):
        partial.finish()
    assert not store.have(entry)
    fetch(store, CONTENT)  # and the next try begins from nothing
    assert store.have(entry)


def test_a_spoiled_beginning_is_found_at_the_end(store: ShardStore, tmp_path: Path) -> None:
    entry = entry_of(CONTENT)
    (tmp_path / "peer" / "partial" / entry.sha256).write_bytes(b"junk")
    partial = store.begin(entry)
    assert partial is not None
    assert partial.length == 4
    partial.write(CONTENT[4:])
    with pytest.raises(FetchFailed, match="sha256"):
        partial.finish()
    fetch(store, CONTENT)


def test_a_partial_file_longer_than_the_file_begins_anew(store: ShardStore, tmp_path: Path) -> None:
    entry = entry_of(b"abc")
    (tmp_path / "peer" / "partial" / entry.sha256).write_bytes(b"abcdef")
    partial = store.begin(entry)
    assert partial is not None
    assert partial.length == 0
    partial.write(b"abc")
    partial.finish()


def test_a_file_that_ends_early_is_kept_to_go_on(store: ShardStore) -> None:
    entry = entry_of(CONTENT)
    partial = store.begin(entry)
    assert partial is not None
    partial.write(CONTENT[:50])
    with pytest.raises(FetchFailed, match="50 of 10240 bytes arrived"):
        partial.finish()
    again = store.begin(entry)
    assert again is not None
    assert again.length == 50
    again.close()


def test_more_than_the_manifest_says_is_refused_at_once(store: ShardStore, tmp_path: Path) -> None:
    partial = store.begin(entry_of(b"abc"))
    assert partial is not None
    with pytest.raises(FetchFailed, match="more than the 3 bytes"):
        partial.write(b"abcd")
    assert list((tmp_path / "peer" / "partial").iterdir()) == []


def test_one_download_of_a_file_at_a_time(store: ShardStore, tmp_path: Path) -> None:
    entry = entry_of(CONTENT)
    first = store.begin(entry)
    assert first is not None
    for other in (store, ShardStore(tmp_path / "peer")):
        with pytest.raises(Conflict, match="another load is fetching it"):
            other.begin(entry)
    first.write(CONTENT[:10])
    first.close()
    second = store.begin(entry)
    assert second is not None
    assert second.length == 10
    second.write(CONTENT[10:])
    second.finish()
    assert store.begin(entry) is None


def test_two_files_of_the_same_content_are_fetched_once(store: ShardStore) -> None:
    entries = [entry_of(CONTENT, "tokenizer/a.json"), entry_of(CONTENT, "tokenizer/b.json")]
    assert len(store.missing(entries)) == 1
    assert store.missing_bytes(entries) == len(CONTENT)


def test_an_empty_file_is_a_file(store: ShardStore) -> None:
    assert store.have(fetch(store, b""))


def test_the_placed_folder_is_what_a_worker_loads(store: ShardStore) -> None:
    entries = [fetch(store, b"weights"), fetch(store, b"{}", "tokenizer/config.json")]
    folder = store.place(MODEL, entries)
    assert {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()} == {
        "shards/stage-0/model.safetensors": b"weights",
        "tokenizer/config.json": b"{}",
    }
    assert store.place(MODEL, reversed(entries)) == folder


def test_stages_and_reimports_do_not_share_a_folder(store: ShardStore) -> None:
    old, new = fetch(store, b"old"), fetch(store, b"new")
    assert store.place(MODEL, [old]) != store.place(MODEL, [new])
    assert (store.place(MODEL, [old]) / old.path).read_bytes() == b"old"


def test_a_file_that_is_not_here_is_not_placed(store: ShardStore) -> None:
    with pytest.raises(FetchFailed, match="fetch it before it is placed"):
        store.place(MODEL, [entry_of(b"x")])


@pytest.mark.parametrize("model", ["..", "../x", "/etc", "a/b", ""])
def test_a_model_id_from_outside_names_no_path(store: ShardStore, tmp_path: Path, model: str) -> None:
    with pytest.raises(ValueError, match="is not allowed"):
        store.place(ModelId(model), [])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["peer"]


def test_links_in_the_store_do_not_count(store: ShardStore, tmp_path: Path) -> None:
    entry = entry_of(CONTENT)
    (tmp_path / "elsewhere").write_bytes(CONTENT)
    (tmp_path / "peer" / "blobs" / entry.sha256).symlink_to(tmp_path / "elsewhere")
    assert not store.have(entry)
    (tmp_path / "peer" / "partial" / entry.sha256).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FetchFailed, match="cannot be stored"):
        store.begin(entry)
    assert (tmp_path / "elsewhere").read_bytes() == CONTENT


def test_space_is_checked_with_the_numbers(store: ShardStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 100_000_000)
    store.check_space(30_000_000)
    with pytest.raises(NoSpace, match=r"needs 40\.0 MB and 67\.1 MB kept free.*has 100\.0 MB left"):
        store.check_space(40_000_000)


def test_a_disk_that_fills_up_keeps_what_it_took(store: ShardStore, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = entry_of(CONTENT)
    partial = store.begin(entry)
    assert partial is not None
    real = partial._file

    class NearlyFull:
        """Takes ten bytes, then has no room: what a real disk does."""

        room = 10

        def write(self, chunk: memoryview) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            taken = real.write(chunk[: self.room])
            self.room -= taken
            return taken

        def close(self) -> None:
            real.close()

    partial._file = NearlyFull()  # type: ignore[assignment]
    with partial, pytest.raises(NoSpace, match="the disk is full"):
        partial.write(CONTENT)
    again = store.begin(entry)
    assert again is not None
    assert again.length == 10
    again.write(CONTENT[10:])
    again.finish()
    assert store.have(entry)


def test_a_file_that_somebody_wrote_to_is_checked_again_and_once(store: ShardStore, tmp_path: Path) -> None:
    good, bad = fetch(store, CONTENT), fetch(store, CONTENT[::-1])
    looked: list[int] = []
    store.check_again([good, bad], looked.append)
    assert looked == [], "nobody did"
    for entry, data in ((good, CONTENT[:1]), (bad, CONTENT[:1])):
        with (tmp_path / "peer" / "blobs" / entry.sha256).open("r+b") as file:
            file.write(data)
    store.check_again([good, bad], looked.append)
    assert (store.have(good), store.missing([bad])) == (True, (bad,))
    assert looked == [len(CONTENT)] * 2
    store.check_again([good, bad], looked.append)
    assert looked == [len(CONTENT)] * 2, "what is right is sealed again"
