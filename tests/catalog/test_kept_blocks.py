"""The import of a GGUF file keeps the blocks it can; a load reads the blocks of a matrix or its weights, never both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_gguf import write_gguf
from tiny_models import make_tiny

from swarmnode.catalog.checkpoint import read_checkpoint
from swarmnode.catalog.importing import import_model
from swarmnode.catalog.kept_blocks import (
    BLOCKS_FILE,
    blocks_name,
    blocks_shape,
    reads_blocks,
    weight_and_kind,
)
from swarmnode.catalog.safetensors_header import encode_header, parse_header
from swarmnode.catalog.slices import slice_tensors
from swarmnode.errors import InvalidModel

if TYPE_CHECKING:
    from pathlib import Path

    from swarmnode.catalog.manifest import Manifest

UP = "model.layers.{}.mlp.up_proj.weight"
NORM = "model.layers.{}.input_layernorm.weight"


def import_tiny(folder: Path, root: Path, kinds: dict[str, str]) -> Manifest:
    """A tiny GGUF whose matrices have the types of `kinds`, by the end of their names, over two stages."""
    source = make_tiny(folder / "source", "qwen2", num_layers=2)

    def kind_of(name: str) -> str | None:
        return next((kind for end, kind in kinds.items() if name.endswith(f"{end}.weight")), None)

    write_gguf(source, folder / "tiny.gguf", kind_of)
    return import_model(str(folder / "tiny.gguf"), root, stages=2)


def test_blocks_are_kept_as_they_are_beside_the_weights_of_their_stage(tmp_path: Path, root: Path) -> None:
    from gguf import GGUFReader

    kinds = {"q_proj": "Q4_0", "up_proj": "Q4_1", "down_proj": "Q8_0", "lm_head": "Q4_0"}
    manifest = import_tiny(tmp_path, root, kinds)
    original = {tensor.name: tensor.data for tensor in GGUFReader(tmp_path / "tiny.gguf").tensors}
    for stage in range(2):
        paths = [entry.path for entry in manifest.shard_files(stage)]
        file = f"shards/stage-{stage}/{BLOCKS_FILE}"
        assert paths[2:] == [file, f"{file}.chunks"]
        found = load_file(root / manifest.id / file)
        prefix = f"model.layers.{stage}."
        assert sorted(found) == [f"{prefix}mlp.up_proj.weight.q4_1", f"{prefix}self_attn.q_proj.weight.q4_0"]
        assert np.array_equal(found[f"{prefix}mlp.up_proj.weight.q4_1"], original[f"blk.{stage}.ffn_up.weight"])
        assert np.array_equal(found[f"{prefix}self_attn.q_proj.weight.q4_0"], original[f"blk.{stage}.attn_q.weight"])
    assert manifest.architecture.layer_params == import_plain(tmp_path, root).architecture.layer_params


def import_plain(folder: Path, root: Path) -> Manifest:
    return import_model(str(folder / "source"), root, model_id="plain")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint as the converter leaves it, with blocks of one matrix."""
    folder = make_tiny(tmp_path / "checkpoint", "llama", num_layers=2)
    write_blocks(folder, {})
    return folder


def write_blocks(folder: Path, changes: dict[str, Any]) -> None:
    blocks = {blocks_name(UP.format(1), "q4_0"): np.zeros((96, 36), np.uint8)} | changes
    save_file({name: tensor for name, tensor in blocks.items() if tensor is not None}, folder / BLOCKS_FILE)


def test_blocks_of_a_checkpoint_are_found_by_layer(checkpoint: Path) -> None:
    assert [sorted(layer) for layer in read_checkpoint(checkpoint).blocks] == [[], [UP.format(1) + ".q4_0"]]


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (UP.format(1) + ".q4_0", np.zeros((96, 35), np.uint8)),
        (UP.format(1) + ".q4_0", np.zeros((96, 36), np.int8)),
        (UP.format(1) + ".q4_1", np.zeros((96, 36), np.uint8)),
        (UP.format(7) + ".q4_0", np.zeros((96, 36), np.uint8)),
        (NORM.format(1) + ".q4_0", np.zeros(36, np.uint8)),
        (UP.format(1), np.zeros((96, 36), np.uint8)),
        ("lm_head.weight.q4_0", np.zeros((384, 36), np.uint8)),
    ],
)
def test_what_is_no_matrix_s_blocks_is_refused_by_name(name: str, tensor: Any, checkpoint: Path) -> None:
    write_blocks(checkpoint, {name: tensor})
    with pytest.raises(InvalidModel, match=f"{BLOCKS_FILE}: tensor '{name}' is not the blocks"):
        read_checkpoint(checkpoint)


def test_a_load_reads_blocks_or_weights() -> None:
    dense = [UP.format(0), NORM.format(0), UP.format(1), "lm_head.weight"]
    blocks = [UP.format(0) + ".q4_0", UP.format(1) + ".q4_1"]
    headers = [header(dict.fromkeys(dense, "F32")), header(dict.fromkeys(blocks, "U8"))]

    def names(from_blocks: bool, first: int = 0, end: int = 2) -> list[list[str]]:
        return [list(found) for found in slice_tensors(headers, first, end, 2, from_blocks=from_blocks)]

    assert names(False) == [dense, []]
    assert names(True) == [[NORM.format(0), "lm_head.weight"], blocks]
    assert names(True, 0, 1) == [[NORM.format(0)], blocks[:1]]
    assert names(False, 1, 2) == [[UP.format(1), "lm_head.weight"], []]


def header(dtypes: dict[str, str]) -> dict[str, Any]:
    raw = encode_header((name, dtype, (1,)) for name, dtype in dtypes.items())
    return parse_header(raw[8:], len(raw) + sum({"F32": 4, "U8": 1}[dtype] for dtype in dtypes.values()), "a shard")


def test_names_shapes_and_the_loads_that_take_blocks() -> None:
    assert weight_and_kind(blocks_name("a.weight", "q4_1")) == ("a.weight", "q4_1")
    assert weight_and_kind("a.weight") is None
    assert weight_and_kind("a.weight.q8_0") is None
    assert blocks_shape((3, 64), "q4_0") == (3, 36)
    assert blocks_shape((3, 64), "q4_1") == (3, 40)
    assert blocks_shape((3, 48), "q4_0") is None
    assert blocks_shape((64,), "q4_0") is None
    assert reads_blocks("int4-fast", adapted=False)
    assert not reads_blocks("int4-fast", adapted=True)
    assert not any(reads_blocks(method, adapted=False) for method in ("none", "int8", "nf4", "bnb-int8"))
