"""Four-bit blocks of GGUF files: packed as they are, and a load that takes them never looks at the weights beside."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from card_kernels import emulated_card, load_as_on_a_card
from packed_kernels import ALL_KERNELS, take_kernels
from safetensors.torch import load_file, save_file
from stage_chains import Chain, even_cuts, logits_of, prompt_of
from test_shard_selection import sliced_copies
from tiny_gguf import write_gguf
from tiny_models import make_tiny

from swarmnode.catalog.adapter_import import import_adapter
from swarmnode.catalog.importing import import_model
from swarmnode.catalog.kept_blocks import BLOCK_BYTES, BLOCKS_FILE, blocks_shape
from swarmnode.catalog.source_wheel import DEMO_MODEL_ID
from swarmnode.compute import gguf_blocks, projections, tiled_projections
from swarmnode.compute.gguf_blocks import Q4Blocks
from swarmnode.compute.loader import load_stage
from swarmnode.compute.projections import Int4Projection, Int8Projection
from swarmnode.compute.spec import StageSpec
from swarmnode.compute.tiled_projections import packed
from swarmnode.errors import LoadFailed

if TYPE_CHECKING:
    from pathlib import Path

KINDS = sorted(BLOCK_BYTES)
OUT, INPUTS = 256, 96
LAYERS = 3
EIGHT_BITS = 2.0**-8
"""The largest rounding to bfloat16, as a share of the number."""


def random_raw(kind: str, out: int = OUT, seed: int = 0) -> torch.Tensor:
    """Any codes, scales of both signs from the smallest that float16 holds, and whole groups of zeros."""
    rng = np.random.default_rng(seed)
    shape = blocks_shape((out, INPUTS), kind)
    assert shape is not None
    raw = rng.integers(0, 256, shape, np.uint8).reshape(-1, BLOCK_BYTES[kind])
    halves = (BLOCK_BYTES[kind] - 16) // 2
    numbers = rng.standard_normal((raw.shape[0], halves)) * 10.0 ** rng.uniform(-8, 2, (raw.shape[0], 1))
    numbers[:3] = 0
    raw[:, : 2 * halves] = numbers.astype(np.float16).view(np.uint8)
    return torch.from_numpy(raw.reshape(shape))


def by_gguf(raw: torch.Tensor, kind: str) -> torch.Tensor:
    """The weights in float32 as gguf-py computes them."""
    from gguf import GGMLQuantizationType, quants

    return torch.from_numpy(quants.dequantize(raw.numpy(), GGMLQuantizationType[kind.upper()]).copy())


def scales_and_lows(raw: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, groups, 1) each, read from the bytes one by one."""
    blocks = raw.numpy().reshape(raw.shape[0], -1, BLOCK_BYTES[kind])
    scales = blocks[..., :2].copy().view(np.float16).astype(np.float32)
    lows = blocks[..., 2:4].copy().view(np.float16).astype(np.float32) if kind == "q4_1" else -8 * scales
    return torch.from_numpy(scales), torch.from_numpy(lows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_llama_cpps_bit_for_bit(kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_raw(kind)
    expected = by_gguf(raw, kind).to(dtype)
    assert torch.equal(Q4Blocks(raw, kind).dequantized(dtype), expected)
    monkeypatch.setattr(gguf_blocks, "_DEQUANTIZED_ELEMENTS", 7 * INPUTS)
    room = torch.full((OUT, INPUTS), torch.nan, dtype=dtype)
    assert Q4Blocks(raw, kind).dequantized(dtype, room) is room
    assert torch.equal(room, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_are_off_by_the_rounding_of_scale_and_zero_alone(kind: str) -> None:
    raw = random_raw(kind)
    blocks = Q4Blocks(raw, kind)
    exact = blocks.dequantized(torch.float32).view(OUT, -1, 32)
    unrelated = torch.zeros((OUT, INPUTS), dtype=torch.bfloat16)
    found = Int4Projection(unrelated, None, [(0, blocks)]).unpack(0, OUT).view(OUT, -1, 32)
    scales, lows = scales_and_lows(raw, kind)
    bound = EIGHT_BITS * (8 * scales.abs() + (lows + 8 * scales).abs()) * 1.0001
    assert ((found - exact).abs() <= bound).all()
    assert bound.max() > 0
    # The kernel multiplies by those numbers, one row or many.
    for count in (1, 200):
        rows = torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        expected = rows.float() @ found.view(OUT, INPUTS).T
        difference = (Int4Projection(unrelated, None, [(0, blocks)])(rows).float() - expected).abs()
        assert difference.max() <= 0.01 * expected.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_scales_that_eight_bits_hold_are_packed_without_any_error(kind: str) -> None:
    raw = random_raw(kind).view(OUT, -1, BLOCK_BYTES[kind])
    halves = torch.tensor([[0.5, -1.5, 2.0**-10][i % 3] for i in range(OUT * raw.shape[1])]).view(OUT, -1, 1)
    raw[..., :2] = halves.to(torch.float16).view(torch.uint8)
    if kind == "q4_1":
        raw[..., 2:4] = (-4 * halves).to(torch.float16).view(torch.uint8)
    blocks = Q4Blocks(raw.view(OUT, -1), kind)
    projection = Int4Projection(torch.zeros((OUT, INPUTS), dtype=torch.bfloat16), None, [(0, blocks)])
    assert torch.equal(projection.unpack(0, OUT), blocks.dequantized(torch.float32))


def test_a_fused_matrix_takes_blocks_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 0…255 of q4_0, 256…383 that stand alone, 384…639 of q4_1; also where chunks end within them."""
    first, last = Q4Blocks(random_raw("q4_0"), "q4_0"), Q4Blocks(random_raw("q4_1", seed=1), "q4_1")
    alone = torch.randn((128, INPUTS), generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    weight = torch.cat((first.dequantized(torch.bfloat16), alone, last.dequantized(torch.bfloat16)))
    parts = [
        Int4Projection(weight[:256], None, [(0, first)]),
        Int4Projection(alone, None),
        Int4Projection(weight[384:], None, [(0, last)]),
    ]
    expected = torch.cat([part.unpack(0, part._out) for part in parts])
    for rows in (512, 128, 192):
        monkeypatch.setattr(projections, "QUANTIZED_ROWS", rows)
        monkeypatch.setattr(tiled_projections, "QUANTIZED_ROWS", rows)
        for kernels in ALL_KERNELS:
            with monkeypatch.context() as these:
                take_kernels(kernels, these)
                fused = packed("int4-fast", weight, None, [(0, first), (384, last)])
            assert torch.equal(fused.unpack(0, 640), expected)
    assert not torch.equal(packed("int4-fast", weight, None).unpack(0, 640), expected)


def test_a_shape_the_kernel_does_not_take_is_served_in_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    take_kernels("torch", monkeypatch)
    blocks = Q4Blocks(random_raw("q4_1", out=24), "q4_1")
    weight = blocks.dequantized(torch.bfloat16)
    found = packed("int4-fast", weight, None, [(0, blocks)])
    assert isinstance(found, Int8Projection)
    assert torch.equal(found.unpack(0, 24), Int8Projection(weight, None).unpack(0, 24))


def kinds_of(name: str) -> str | None:
    """Both kinds in one fused matrix, and one that is not kept."""
    if not name.endswith("proj.weight"):
        return None
    if "v_proj" in name:
        return "Q8_0"
    return "Q4_0" if "q_proj" in name or "up_proj" in name else "Q4_1"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_servable(tmp_path_factory.mktemp("blocks"))


def make_servable(folder: Path) -> Path:
    """Made of a GGUF file, in one shard with its blocks beside."""
    source = make_tiny(folder / "source" / "tiny", "qwen2", num_layers=LAYERS)
    write_gguf(source, folder / "tiny.gguf", kinds_of)
    import_model(str(folder / "tiny.gguf"), folder, stages=1)
    return folder / "tiny"


def shards(folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(folder.glob("shards/*/*.safetensors")))


def spec_of(folder: Path, files: tuple[Path, ...], begin: int, end: int, layers: int = LAYERS) -> StageSpec:
    ends = begin == 0, end == layers
    return StageSpec(folder, files, begin, end, layers, *ends, quantization="int4-fast")


def without_blocks(folder: Path) -> tuple[Path, ...]:
    return tuple(path for path in shards(folder) if path.name != BLOCKS_FILE)


def test_stages_packed_from_blocks_say_what_one_process_says(tiny: Path, tmp_path: Path) -> None:
    """The bytes that int4-fast does not read are NaN: what is not fetched is not needed."""
    prompts = {0: prompt_of(9), 1: prompt_of(20, 1)}
    whole = Chain([load_stage(spec_of(tiny, shards(tiny), 0, LAYERS))])
    expected = {session: whole.reply(session, prompt, 8, 32) for session, prompt in prompts.items()}
    for stages in (2, 3):
        engines = []
        for begin, end in pairwise(even_cuts(LAYERS, stages)):
            target = tmp_path / f"{stages}-{begin}"
            paths = sliced_copies(shards(tiny), begin, end, LAYERS, target, from_blocks=True)
            engines.append(load_stage(spec_of(tiny, paths, begin, end)))
        chain = Chain(engines)
        assert {s: chain.reply(s, prompt, 8, 32) for s, prompt in prompts.items()} == expected


def test_logits_are_those_of_the_dequantized_weights_in_full_precision(tiny: Path, tmp_path: Path) -> None:
    """v_proj has no blocks here; what it is packed to stands in its place."""
    (dense,) = without_blocks(tiny)
    tensors = {name: tensor.float() for name, tensor in load_file(dense).items()}
    for name, weight in tensors.items():
        if "v_proj.weight" in name:
            tensors[name] = packed("int4-fast", weight, None).unpack(0, weight.shape[0]).contiguous()
    save_file(tensors, tmp_path / dense.name, metadata={"format": "pt"})
    full = replace(spec_of(tiny, (tmp_path / dense.name,), 0, LAYERS), quantization="none", lean=False)
    exact = logits_of(Chain([load_stage(full)]))
    found, anew = (
        logits_of(Chain([load_stage(spec_of(tiny, files, 0, LAYERS))]))
        for files in (shards(tiny), without_blocks(tiny))
    )
    # What is left is bfloat16's rounding between the matrices and the head's eight bits.
    assert float((found - exact).norm() / exact.norm()) < 0.04
    assert float((anew - exact).norm() / exact.norm()) > 0.08


def test_on_a_card_they_are_dequantized_and_quantized_anew(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = sliced_copies(shards(tiny), 0, LAYERS, LAYERS, tmp_path / "slice", from_blocks=True)
    load_as_on_a_card(monkeypatch)
    with emulated_card(monkeypatch):
        found, expected = (
            logits_of(Chain([load_stage(spec_of(tiny, files, 0, LAYERS))])) for files in (paths, without_blocks(tiny))
        )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("method", ["none", "int8"])
def test_other_methods_read_the_weights(method: str, tiny: Path, tmp_path: Path) -> None:
    paths = sliced_copies(shards(tiny), 0, LAYERS, LAYERS, tmp_path / "slice")
    spec = replace(spec_of(tiny, paths, 0, LAYERS), quantization=method)
    expected = replace(spec, files=without_blocks(tiny))
    assert torch.equal(logits_of(Chain([load_stage(spec)])), logits_of(Chain([load_stage(expected)])))


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_is_merged_into_the_weights(tiny: Path, tmp_path: Path) -> None:
    """Blocks are not what it was trained on top of; they are not even fetched."""
    pytest.importorskip("peft")
    from test_lora import make_adapter

    adapter = make_adapter(tiny.parent / "source" / "tiny", tmp_path / "adapter", target_modules=["q_proj"])
    import_adapter(str(adapter), "tiny", tiny.parent, model_id="tuned")
    tuned = tiny.parent / "tuned"
    paths = sliced_copies(shards(tuned), 0, LAYERS, LAYERS, tmp_path / "slice")
    found, expected, bare = (
        logits_of(Chain([load_stage(spec_of(folder, files, 0, LAYERS))]))
        for folder, files in ((tuned, paths), (tuned, without_blocks(tuned)), (tiny, shards(tiny)))
    )
    assert torch.equal(found, expected)
    assert not torch.equal(found, bare)


def test_progress_counts_the_bytes_that_are_read(tiny: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_stage(spec_of(tiny, shards(tiny), 0, LAYERS), lambda _, done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    read = [load_file(path) for path in shards(tiny)]
    names = {name: tensor for tensors in read for name, tensor in tensors.items()}
    dense = {name.rpartition(".")[0] for name in names if name.endswith(tuple(KINDS))}
    assert len(dense) == 6 * LAYERS
    assert seen[-1][1] == sum(tensor.nbytes for name, tensor in names.items() if name not in dense)


@pytest.mark.parametrize("fault", ["shape", "dtype"])
def test_blocks_of_another_shape_are_refused_by_name(fault: str, tiny: Path, tmp_path: Path) -> None:
    (path,) = (path for path in shards(tiny) if path.name == BLOCKS_FILE)
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight.q4_0"
    tensors[name] = tensors[name][:-1].contiguous() if fault == "shape" else tensors[name].to(torch.int8)
    save_file(tensors, tmp_path / BLOCKS_FILE)
    spec = spec_of(tiny, (*without_blocks(tiny), tmp_path / BLOCKS_FILE), 0, LAYERS)
    with pytest.raises(LoadFailed, match=r"up_proj\.weight\.q4_0' is .*, which are no q4_0 blocks of a \[96, 64\]"):
        load_stage(spec)


@pytest.mark.model
def test_the_demo_models_stages_packed_from_blocks(demo_models_root: Path, tmp_path: Path) -> None:
    """A Llama, whose queries and keys llama.cpp keeps in another order, over two stages."""
    torch.set_num_threads(1)
    folder = demo_models_root / DEMO_MODEL_ID
    blocks = [path for path in shards(folder) if path.name == BLOCKS_FILE]
    assert [len(load_file(path)) for path in blocks] == [7 * 15, 7 * 15]
    prompt = prompt_of(24, vocab=49152)
    whole = Chain([load_stage(spec_of(folder, shards(folder), 0, 30, 30))]).reply(0, prompt, 8, 256)
    engines = []
    for stage, (begin, end) in enumerate([(0, 15), (15, 30)]):
        own = tuple(sorted((folder / f"shards/stage-{stage}").glob("*.safetensors")))
        paths = sliced_copies(own, begin, end, 30, tmp_path / f"{stage}", from_blocks=True)
        engines.append(load_stage(spec_of(folder, paths, begin, end, 30)))
    assert Chain(engines).reply(0, prompt, 8, 256) == whole
