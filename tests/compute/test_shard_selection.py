"""M4 over a real import: every split reads just the shards it overlaps, and gives the tokens of the whole model."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from stage_chains import Chain, as_servable, even_cuts, prompt_of
from tiny_models import make_tiny

from swarmnode.catalog.importing import import_model
from swarmnode.catalog.planning import stage_files
from swarmnode.catalog.safetensors_header import read_header
from swarmnode.catalog.slices import slice_tensors
from swarmnode.compute.loader import load_stage
from swarmnode.compute.spec import StageSpec
from swarmnode.errors import LoadRefused

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from swarmnode.catalog.manifest import Manifest

LAYERS = 5
PROMPT = prompt_of(24)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, Path]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("m4")
    checkpoint = make_tiny(root / "source", "llama", num_layers=LAYERS)
    return import_model(str(checkpoint), root, model_id="tiny", stages=2), root / "tiny"


def shards(manifest: Manifest, cuts: tuple[int, ...]) -> list[list[str]]:
    """By stage, the shards it reads."""
    stages = len(cuts) - 1
    plans = [stage_files(manifest, a, b, stages, i) for i, (a, b) in enumerate(pairwise(cuts))]
    return [[f.path.split("/")[1] for f in plan if f.path.endswith(".safetensors")] for plan in plans]


def reply(manifest: Manifest, folder: Path, cuts: tuple[int, ...]) -> list[int]:
    """Tokens of stages that see their planned shards alone."""
    engines = []
    for stage, (begin, end) in enumerate(pairwise(cuts)):
        files = stage_files(manifest, begin, end, len(cuts) - 1, stage)
        paths = tuple(folder / file.path for file in files if file.path.startswith("shards/"))
        engines.append(load_stage(StageSpec(folder, paths, begin, end, LAYERS, begin == 0, end == LAYERS)))
    return Chain(engines).reply(0, PROMPT, 6, 32)


def test_m4_the_trained_split_reads_one_shard_a_stage_any_other_what_it_overlaps(
    imported: tuple[Manifest, Path],
) -> None:
    manifest, folder = imported
    assert manifest.boundaries is not None
    (cut,) = manifest.boundaries
    same, other = (0, cut, LAYERS), (0, cut - 1, cut + 1, LAYERS)
    assert shards(manifest, same) == [["stage-0"], ["stage-1"]]
    assert shards(manifest, other) == [["stage-0"], ["stage-0", "stage-1"], ["stage-1"]]
    whole = reply(manifest, folder, (0, LAYERS))
    for cuts in (same, other, tuple(even_cuts(LAYERS, LAYERS))):
        assert reply(manifest, folder, cuts) == whole


def test_m4_an_unrecorded_split_serves_over_its_own_stages_alone(imported: tuple[Manifest, Path]) -> None:
    manifest, folder = imported
    unrecorded = manifest.model_copy(update={"boundaries": None})
    assert manifest.boundaries is not None
    cuts = (0, *manifest.boundaries, LAYERS)
    assert shards(unrecorded, cuts) == [["stage-0"], ["stage-1"]]
    assert reply(unrecorded, folder, cuts) == reply(manifest, folder, cuts)
    with pytest.raises(LoadRefused, match="only over the 2 stages it was exported with; 3 were asked"):
        stage_files(unrecorded, 0, 1, 3, 0)


@pytest.mark.parametrize("kind", ["untied", "tied", "one table"])
def test_m5_a_stage_reads_no_byte_outside_its_slice(kind: str, tmp_path: Path) -> None:
    """What is not fetched is a hole, whose zeros would be weights: here the rest of every shard is NaN."""
    torch.set_num_threads(1)
    checkpoint = make_tiny(tmp_path / "source", "llama", num_layers=3, tied=kind != "untied")
    if kind == "one table":
        folder, shard_paths = as_servable(checkpoint, tmp_path / "tiny")
    else:
        manifest = import_model(str(checkpoint), tmp_path, model_id="tiny", stages=1)
        folder = tmp_path / "tiny"
        shard_paths = tuple(folder / f.path for f in manifest.files if f.path.endswith(".safetensors"))
    replies = []
    for cuts in ((0, 3), (0, 1, 3), (0, 1, 2, 3)):
        engines = []
        for begin, end in pairwise(cuts):
            paths = sliced_copies(shard_paths, begin, end, 3, tmp_path / f"{len(cuts)}-{begin}")
            engines.append(load_stage(StageSpec(folder, paths, begin, end, 3, begin == 0, end == 3)))
        replies.append(Chain(engines).reply(0, PROMPT, 6, 32))
    assert replies[1] == replies[2] == replies[0]


def sliced_copies(
    paths: Sequence[Path], begin: int, end: int, layers: int, target: Path, *, from_blocks: bool = False
) -> tuple[Path, ...]:
    headers = [read_header(path) for path in paths]
    slices = slice_tensors(headers, begin, end, layers, from_blocks=from_blocks)
    target.mkdir()
    copies = []
    for path, header, chosen in zip(paths, headers, slices, strict=True):
        content = bytearray(path.read_bytes())
        for name, entry in header.items():
            if name not in chosen:
                content[entry.begin : entry.end] = b"\xff" * entry.size_bytes
        copies.append(target / path.name)
        copies[-1].write_bytes(content)
    return tuple(copies)
