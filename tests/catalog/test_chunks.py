"""Chunks of a file: their list, which of them a slice takes, and a file of which only some are here."""

from __future__ import annotations

import hashlib
import os
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.catalog import disk
from swarmnode.catalog.chunks import ChunkList, chunk_lists, encode_chunks, header_of, parse_chunks
from swarmnode.catalog.manifest import FileEntry
from swarmnode.catalog.safetensors_header import encode_header
from swarmnode.catalog.slices import slice_tensors
from swarmnode.catalog.store import ShardStore
from swarmnode.errors import Conflict, FetchFailed, InvalidModel, NoSpace

if TYPE_CHECKING:
    from pathlib import Path

    from swarmnode.catalog.manifest import Manifest

PATH = "shards/stage-0/model.safetensors"


def entry_of(content: bytes, path: str = PATH) -> FileEntry:
    return FileEntry(path=path, size=len(content), sha256=hashlib.sha256(content).hexdigest())


def listed(parts: list[bytes]) -> bytes:
    return encode_chunks((len(part), hashlib.sha256(part).digest()) for part in parts)


class Sliced:
    """A file of three chunks whose list is in the store."""

    def __init__(self, folder: Path) -> None:
        self.parts = [b"head", b"x" * 5000, b"tail" * 700]
        self.entry = entry_of(b"".join(self.parts))
        raw = listed(self.parts)
        self.chunk_list = entry_of(raw, PATH + ".chunks")
        self.store = ShardStore(folder / "peer")
        partial = self.store.begin(self.chunk_list)
        assert partial is not None
        with partial:
            partial.write(raw)
            partial.finish()

    def marks(self) -> list[int]:
        return list(self.store.marks(self.entry, self.chunk_list))


@pytest.fixture
def sliced(tmp_path: Path) -> Sliced:
    return Sliced(tmp_path)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_the_chunks_that_cover_a_span_are_those_that_share_a_byte_with_it(
    sizes: list[int], data: st.DataObject
) -> None:
    raw = listed([bytes(size) for size in sizes])
    chunks = parse_chunks(raw, entry_of(bytes(sum(sizes))))
    begin = data.draw(st.integers(0, sum(sizes)))
    end = data.draw(st.integers(begin, sum(sizes)))
    expected = [i for i in range(len(sizes)) if begin < end and chunks.begin(i) < end and begin < chunks.ends[i]]
    assert list(chunks.covering(begin, end)) == expected


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"short", "no list"),
        (listed([b"", b"abc"]), "a chunk of 0 bytes"),
        (encode_chunks([(33 << 20, bytes(32))]), "allowed are 1 to"),
        (listed([b"ab"]), "have 2 bytes, the file has 3"),
        (b"", "have 0 bytes"),
    ],
)
def test_a_list_that_does_not_fit_its_file_is_named(raw: bytes, message: str) -> None:
    with pytest.raises(InvalidModel, match=message) as refused:
        parse_chunks(raw, entry_of(b"abc"))
    assert PATH in refused.value.message


@pytest.mark.parametrize("first", [b"", b"\1", b"\xff" * 8, (9).to_bytes(8, "little") + b"{}"])
def test_a_first_chunk_that_is_no_header_is_refused(first: bytes) -> None:
    with pytest.raises(InvalidModel, match="not its header"):
        header_of(first, entry_of(bytes(100)))


def test_an_import_lists_the_chunks_of_every_shard_tensor_by_tensor(servable: Manifest, root: Path) -> None:
    lists = chunk_lists(servable.files)
    assert sorted(lists) == [PATH, "shards/stage-1/model.safetensors"]
    for path, chunk_list in lists.items():
        content = (root / servable.id / path).read_bytes()
        entry = next(entry for entry in servable.files if entry.path == path)
        chunks = parse_chunks((root / servable.id / chunk_list.path).read_bytes(), entry)
        header = header_of(content[: chunks.size(0)], entry)
        for i, digest in enumerate(chunks.digests):
            assert hashlib.sha256(content[chunks.begin(i) : chunks.ends[i]]).digest() == digest
        borders = {tensor.end for tensor in header.values()}
        assert borders <= set(chunks.ends)


def names(cuts: tuple[int, int], *headers: list[str]) -> list[list[str]]:
    parsed = [
        header_of(raw, FileEntry(path=PATH, size=len(raw) + 4 * len(header), sha256="0" * 64))
        for header in headers
        for raw in [encode_header((name, "F32", (1,)) for name in header)]
    ]
    return [sorted(found) for found in slice_tensors(parsed, *cuts, 3)]


EMBED, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
LAYERS = [f"model.layers.{i}.mlp.weight" for i in range(3)]


def test_a_stage_takes_its_layers_and_the_ends_where_they_live() -> None:
    both = [EMBED, *LAYERS[:2]], [LAYERS[2], NORM, HEAD]
    assert names((0, 1), *both) == [sorted([EMBED, LAYERS[0]]), []]
    assert names((1, 2), *both) == [[LAYERS[1]], []]
    assert names((1, 3), *both) == [[LAYERS[1]], sorted([LAYERS[2], NORM, HEAD])]
    assert names((0, 3), *both) == [sorted(part) for part in both]


def test_a_table_that_is_head_too_goes_to_both_ends() -> None:
    one = [EMBED, *LAYERS, NORM]
    assert names((2, 3), one) == [sorted([EMBED, LAYERS[2], NORM])]
    assert names((1, 2), one) == [[LAYERS[1]]]
    assert names((2, 3), [*one, HEAD]) == [sorted([HEAD, LAYERS[2], NORM])]


def test_layer_one_is_not_layer_ten() -> None:
    many = [f"model.layers.{i}.w" for i in (1, 10, 11)]
    assert names((1, 2), many) == [["model.layers.1.w"]]


def test_chunks_come_in_any_order_and_are_here_once_flushed(sliced: Sliced) -> None:
    with sliced.store.open_slice(sliced.entry, sliced.chunk_list) as file:
        file.write(2, sliced.parts[2])
        assert sliced.marks() == [0, 0, 0]
        file.flush()
        assert sliced.marks() == [0, 0, 1]
        assert file.missing([0, 2]) == [0]
    with sliced.store.open_slice(sliced.entry, sliced.chunk_list) as again:
        assert again.missing(range(3)) == [0, 1]
        again.write(0, sliced.parts[0])
        assert again.read(2) == sliced.parts[2]
    assert sliced.marks() == [1, 0, 1]


@pytest.mark.parametrize("wrong", [b"X" * 5000, b"x" * 4999, b"x" * 5001, b""])
def test_a_wrong_chunk_is_named_and_not_kept(sliced: Sliced, wrong: bytes) -> None:
    with sliced.store.open_slice(sliced.entry, sliced.chunk_list) as file:
        with pytest.raises(FetchFailed, match=r"model.safetensors: what came for bytes 4 to 5003"):
            file.write(1, wrong)
        file.flush()
        assert file.missing([1]) == [1]


def test_one_load_owns_a_sliced_file(sliced: Sliced) -> None:
    with (
        sliced.store.open_slice(sliced.entry, sliced.chunk_list),
        pytest.raises(Conflict, match="another load"),
    ):
        sliced.store.open_slice(sliced.entry, sliced.chunk_list)
    sliced.store.open_slice(sliced.entry, sliced.chunk_list).close()


def test_marks_of_another_file_or_list_do_not_count(sliced: Sliced, tmp_path: Path) -> None:
    with sliced.store.open_slice(sliced.entry, sliced.chunk_list) as file:
        file.write(0, sliced.parts[0])
    os.truncate(tmp_path / "peer" / "slices" / sliced.entry.sha256, 10)
    assert sliced.marks() == [0, 0, 0]
    with sliced.store.open_slice(sliced.entry, sliced.chunk_list) as file:
        assert file.missing(range(3)) == [0, 1, 2]


@pytest.mark.parametrize("spoilt", [0, 1, 2])
def test_chunks_that_somebody_wrote_to_are_found_and_are_here_no_more(
    sliced: Sliced, tmp_path: Path, spoilt: int
) -> None:
    looked: list[int] = []
    with sliced.store.open_slice(sliced.entry, sliced.chunk_list) as file:
        for index, part in enumerate(sliced.parts):
            file.write(index, part)
    sliced.store.open_slice(sliced.entry, sliced.chunk_list, looked.append).close()
    assert looked == [], "nobody did"
    with (tmp_path / "peer" / "slices" / sliced.entry.sha256).open("r+b") as raw:
        raw.seek(len(b"".join(sliced.parts[:spoilt])))
        raw.write(b"!")
    with sliced.store.open_slice(sliced.entry, sliced.chunk_list, looked.append) as file:
        assert file.missing(range(3)) == [spoilt]
        file.write(spoilt, sliced.parts[spoilt])
    assert len(looked) == 3
    sliced.store.open_slice(sliced.entry, sliced.chunk_list, looked.append).close()
    assert (sliced.marks(), len(looked)) == ([1, 1, 1], 3), "and not looked at again"


def test_what_only_another_list_can_check_is_fetched_again_once_somebody_wrote(sliced: Sliced, tmp_path: Path) -> None:
    """The same content cut elsewhere: opening it by one list checks and seals nothing of the other's."""
    whole = b"".join(sliced.parts)
    raw = listed([whole[:10], whole[10:]])
    other_list = entry_of(raw, PATH + ".chunks")
    partial = sliced.store.begin(other_list)
    assert partial is not None
    with partial:
        partial.write(raw)
        partial.finish()
    with sliced.store.open_slice(sliced.entry, sliced.chunk_list) as file:
        for index, part in enumerate(sliced.parts):
            file.write(index, part)
    with sliced.store.open_slice(sliced.entry, other_list) as file:
        file.write(0, whole[:10])
    path = tmp_path / "peer" / "slices" / sliced.entry.sha256
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with sliced.store.open_slice(sliced.entry, other_list) as file:
        assert file.missing([0, 1]) == [1]
    with sliced.store.open_slice(sliced.entry, sliced.chunk_list) as file:
        assert file.missing([0, 1, 2]) == [0, 1, 2]


def test_only_checked_ranges_are_shared(sliced: Sliced) -> None:
    with sliced.store.open_slice(sliced.entry, sliced.chunk_list) as file:
        file.write(0, sliced.parts[0])
        file.write(1, sliced.parts[1])
    assert sliced.store.source_of(sliced.entry, sliced.chunk_list, 0, 5004).is_file()
    with pytest.raises(FetchFailed, match="bytes 0 to 5004 are not here"):
        sliced.store.source_of(sliced.entry, sliced.chunk_list, 0, 5005)
    unknown = sliced.chunk_list.model_copy(update={"sha256": "0" * 64})
    assert sliced.store.marks(sliced.entry, unknown) == b""


def test_a_sliced_file_is_placed_under_its_path_only_where_that_is_asked(sliced: Sliced) -> None:
    with sliced.store.open_slice(sliced.entry, sliced.chunk_list) as file:
        file.write(0, sliced.parts[0])
    files = [sliced.entry, sliced.chunk_list]
    with pytest.raises(FetchFailed, match="not in the store"):
        sliced.store.place("tiny", files)  # type: ignore[arg-type]
    folder = sliced.store.place("tiny", files, frozenset({PATH}))  # type: ignore[arg-type]
    assert (folder / PATH).stat().st_size == sliced.entry.size
    assert (folder / PATH).read_bytes()[:4] == b"head"
    assert sliced.store.models() == ("tiny",)


def test_a_disk_that_fills_up_while_a_chunk_is_written_keeps_it_unmarked(
    sliced: Sliced, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(next(iter(disk._FULL)), "No space left on device")

    with sliced.store.open_slice(sliced.entry, sliced.chunk_list) as file:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(NoSpace, match=r"model\.safetensors"):
                file.write(0, sliced.parts[0])
        assert file.missing([0]) == [0]
    assert ChunkList((), ()).covering(0, 0) == range(0)


def test_a_chunk_that_comes_while_others_are_synced_is_marked_only_after_a_sync_of_its_own(
    sliced: Sliced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sources of one file write and flush it at once, each in a thread."""
    steps, sync = list[str](), os.fdatasync
    with sliced.store.open_slice(sliced.entry, sliced.chunk_list, lambda _: None) as file:

        def write_other() -> None:
            file.write(1, sliced.parts[1])
            file.flush()

        other = threading.Thread(target=write_other)

        def slow_sync(descriptor: int) -> None:
            steps.append("sync")
            sync(descriptor)
            if not other.ident:
                other.start()
                other.join(0.2)  # as long as a disk may take: it must not get in meanwhile
                steps.append(f"missing {file.missing([0, 1])}")

        monkeypatch.setattr(os, "fdatasync", slow_sync)
        file.write(0, sliced.parts[0])
        file.flush()
        other.join()
        assert (steps, file.missing([0, 1])) == (["sync", "missing [0, 1]", "sync"], [])


def test_what_could_not_be_synced_is_fetched_again(sliced: Sliced, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next sync of the same descriptor does not tell of it any more."""
    with sliced.store.open_slice(sliced.entry, sliced.chunk_list, lambda _: None) as file:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            file.write(0, sliced.parts[0])
            with pytest.raises(NoSpace):
                file.flush()
        file.flush()
        assert file.missing([0]) == [0]
