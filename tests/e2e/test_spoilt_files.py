"""Files of a model that are cut off, lost or altered, on real disks: the right bytes are fetched once, and served."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from local_swarms import start_swarm, wait_until
from tiny_models import make_tiny

from swarmnode.catalog.importing import import_model
from swarmnode.catalog.registry import Registry
from swarmnode.ids import ModelId

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from swarmnode.catalog.manifest import FileEntry

pytestmark = pytest.mark.e2e
MODEL = "tiny"
ATTIC, DEN = "attic", "den"


class House:
    """Two peers that keep files of a small real model, which has two shards."""

    def __init__(self, folder: Path) -> None:
        import_model(str(make_tiny(folder / "source")), folder / "models", model_id=MODEL, stages=2)
        manifest = Registry(folder / "models").get(ModelId(MODEL))
        self.models = folder / "models" / MODEL
        self.files = {entry.path: entry for entry in manifest.files}
        self.swarm = start_swarm(folder, folder / "models", peers=0)
        self.swarm.local.start_peers(ATTIC, DEN)

    def kept(self, peer: str, path: str) -> Path:
        """Where a peer has a file of the model: whole, or a stage's part of it."""
        cache, sha256 = self.swarm.local.folder / peer / "models", self.files[path].sha256
        whole = cache / "blobs" / sha256
        return whole if whole.exists() else cache / "slices" / sha256

    def is_right(self, peer: str, entry: FileEntry) -> bool:
        return self.kept(peer, entry.path).read_bytes() == (self.models / entry.path).read_bytes()

    def fetched(self, peer: str) -> list[dict[str, Any]]:
        """What each of its loads fetched of the shards, and from whom; nothing for one that lacked nothing."""
        return [event["bytes"] for event in self.swarm.local.peers[peer].seen if event["event"] == "fetched"]

    def answers_from(self, peer: str) -> str | None:
        """The reply of the whole model on one peer."""
        self.swarm.load(MODEL, num_stages=1, peers=[peer])
        said = self.swarm.openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], temperature=0, max_tokens=16
        )
        self.swarm.unload(MODEL)
        return said.choices[0].message.content


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    house = House(tmp_path_factory.mktemp("spoilt"))
    yield house
    house.swarm.close()


def flip(path: Path, at: int) -> None:
    """One byte, of a file that keeps its length."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 0xFF]))


def test_scenarios_12_and_13_of_files_that_were_cut_lost_or_altered(house: House) -> None:
    right = house.answers_from(ATTIC)
    first, second = (path for path in house.files if path.endswith("model.safetensors"))
    assert len(house.fetched(ATTIC)) == 1
    cut, altered = house.kept(ATTIC, first), house.kept(ATTIC, second)
    with cut.open("r+b") as file:
        file.truncate(cut.stat().st_size // 2)
    flip(altered, altered.stat().st_size - 1)  # a weight: its length and its header are as they were
    flip(house.kept(ATTIC, "tokenizer/tokenizer.json"), 5)
    house.kept(ATTIC, "tokenizer/config.json").unlink()
    assert house.answers_from(ATTIC) == right
    again = house.fetched(ATTIC)[1:]
    assert [sum(bytes_from.values()) < 2 * cut.stat().st_size for bytes_from in again] == [True]
    assert all(house.is_right(ATTIC, entry) for entry in house.files.values() if house.kept(ATTIC, entry.path).exists())


@pytest.mark.soak
def test_right_files_are_kept_and_wrong_ones_given_to_nobody(house: House) -> None:
    right = house.answers_from(ATTIC)
    first, second = (path for path in house.files if path.endswith("model.safetensors"))
    loads = len(house.fetched(ATTIC))
    inodes = {path: house.kept(ATTIC, path).stat().st_ino for path in house.files if house.kept(ATTIC, path).exists()}
    assert house.answers_from(ATTIC) == right
    assert len(house.fetched(ATTIC)) == loads, "once, and no more"
    assert {path: house.kept(ATTIC, path).stat().st_ino for path in inodes} == inodes

    flip(house.kept(ATTIC, second), house.files[second].size - 1)  # what it gives others is not what it says
    assert house.answers_from(DEN) == right
    (sources,) = house.fetched(DEN)
    assert sources.keys() == {ATTIC, "the coordinator"}, "both gave some"
    assert all(house.is_right(DEN, house.files[path]) for path in (first, second)), "nothing wrong was kept"
    wait_until(
        lambda: any(second in line and "another sha256" in line for line in house.swarm.local.peers[DEN].log),
        "the log names the shard and the source",
    )
