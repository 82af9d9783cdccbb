"""Q2: int4-fast on a card, by torchao's code over emulated kernels: weights, order, memory, mixed rings, refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from card_kernels import emulated_card, load_as_on_a_card
from safetensors.torch import load_file, save_file
from stage_chains import Chain, even_cuts, logits_of, prompt_of, stage_specs
from tiny_models import make_tiny

from swarmnode.cluster.quantization import INT4_CARD
from swarmnode.compute import device, lean_block, loader
from swarmnode.compute.card_projection import CardInt4Projection, _quantized, on_card
from swarmnode.compute.device import card_memory, int4_obstacle, stage_gauges
from swarmnode.compute.kv_cache import SessionCache
from swarmnode.compute.loader import load_stage
from swarmnode.compute.projections import GROUP, DenseProjection
from swarmnode.compute.stage_model import StageModel
from swarmnode.compute.tiled_projections import packed
from swarmnode.errors import KernelsFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytest.importorskip("torchao")
LAYERS = 4
CARD = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.set_num_threads(1)
    with emulated_card(monkeypatch):
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("card") / "model", "qwen2", num_layers=LAYERS, tied=False)


def weights(out: int, inputs: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(out + inputs)
    return torch.randn((out, inputs), generator=generator).to(torch.bfloat16)


def unpacked(projection: Any, inputs: int) -> torch.Tensor:
    """The weight that the kernel multiplies by."""
    return projection(torch.eye(inputs, dtype=torch.bfloat16)).float().t().contiguous()


@pytest.mark.parametrize(("out", "inputs"), [(20, 96), (520, 1024), (1040, 64), (8, 2080)])
def test_weights_are_off_by_half_a_step_whatever_is_padded(out: int, inputs: int) -> None:
    weight = weights(out, inputs)
    found = unpacked(CardInt4Projection(weight, None), inputs)
    groups = weight.float().view(out, -1, GROUP)
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    off = (found - weight.float()).view(out, -1, GROUP).abs().amax(-1)
    assert found.shape == weight.shape
    assert bool((off < 0.7 * step).all()), "half a step, and bfloat16's rounding of scale, zero and result"


def test_a_batch_of_rows_and_a_bias() -> None:
    weight, bias = weights(24, 96), weights(1, 24)[0]
    rows = weights(6, 96).view(2, 3, 96)
    found = CardInt4Projection(weight, bias)(rows)
    plain = CardInt4Projection(weight, None)
    assert torch.equal(found, plain(rows) + bias)
    assert torch.equal(found[1, 2], plain(rows[1, 2]) + bias)
    assert CardInt4Projection(weight, bias)(rows.float()).dtype == torch.float32


def test_quantizing_in_chunks_changes_nothing() -> None:
    weight = weights(1040, 64)
    projection, (tiles, scales_zeros) = CardInt4Projection(weight, None), _quantized(weight)
    assert torch.equal(projection._tiles, tiles)
    assert torch.equal(projection._scales_zeros, scales_zeros)
    assert projection.size_bytes() == 1040 * (1024 // 2 + 1024 // GROUP * 4)


def test_rows_that_are_no_whole_groups_stay_dense() -> None:
    assert isinstance(on_card(weights(16, 80), None), DenseProjection)


def load(checkpoint: Path, target: Path, stages: int = 1, **settings: Any) -> Chain:
    specs = stage_specs(checkpoint, target, LAYERS, even_cuts(LAYERS, stages), **settings)
    return Chain([load_stage(spec) for spec in specs])


def with_weights_of(pack: Callable[[int, torch.Tensor], torch.Tensor], checkpoint: Path, target: Path) -> torch.Tensor:
    """The logits, in full precision and by transformers' blocks, of weights that `pack` made of those of a layer."""
    shutil.copytree(checkpoint, target)
    tensors = load_file(checkpoint / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith("proj.weight"):
            tensors[name] = pack(int(name.split(".")[2]), weight.to(torch.bfloat16))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return logits_of(load(target, target / "full", dtype="float32", lean=False))


def as_on_a_card(_: int, weight: torch.Tensor) -> torch.Tensor:
    return unpacked(CardInt4Projection(weight, None), weight.shape[1])


def test_logits_are_those_of_the_quantized_weights_in_full_precision(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = with_weights_of(as_on_a_card, checkpoint, tmp_path / "unpacked")
    load_as_on_a_card(monkeypatch)
    chain = load(checkpoint, tmp_path / "s", quantization="int4-fast")
    model = chain.engines[0].model
    assert {type(p) for block in model.lean.blocks for p in block.projections} == {CardInt4Projection}
    assert model.kernels() == "torchao"
    found = logits_of(chain)
    assert float((found - exact).norm() / exact.norm()) < 0.03, "bfloat16's rounding between the matrices"


def test_tokens_do_not_depend_on_stages_or_batch(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_as_on_a_card(monkeypatch)
    prompts = {0: prompt_of(9), 1: prompt_of(20, 1)}
    one = load(checkpoint, tmp_path / "one", quantization="int4-fast")
    expected = {session: one.reply(session, prompt, 6, 32) for session, prompt in prompts.items()}
    chain = load(checkpoint, tmp_path / "two", 2, quantization="int4-fast")
    tokens = {session: [chain.prefill(session, prompt, 32)] for session, prompt in prompts.items()}
    for _ in range(5):
        for session, token in zip(prompts, chain.step(*prompts), strict=True):
            tokens[session].append(token)
    assert tokens == expected


@pytest.mark.parametrize("card_first", [True, False])
def test_in_a_mixed_ring_each_stage_computes_with_its_own_kernels(
    card_first: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pack(layer: int, weight: torch.Tensor) -> torch.Tensor:
        if (layer < LAYERS // 2) == card_first:
            return as_on_a_card(layer, weight)
        projection = packed("int4-fast", weight, None)
        return projection.unpack(0, weight.shape[0]).contiguous()

    exact = with_weights_of(pack, checkpoint, tmp_path / "unpacked")
    specs = stage_specs(checkpoint, tmp_path / "s", LAYERS, even_cuts(LAYERS, 2), quantization="int4-fast")
    engines: list[Any] = []
    for spec in specs:
        with monkeypatch.context() as this_one:
            if spec.is_first == card_first:
                load_as_on_a_card(this_one)
            engines.append(load_stage(spec))
    kinds = [type(engine.model.lean.blocks[0].projections[0]) is CardInt4Projection for engine in engines]
    assert kinds == [card_first, not card_first]
    first, last = (engine.model for engine in engines)
    with torch.inference_mode():
        positions = torch.arange(30)[None]
        rows = first.hidden(first.embed(torch.tensor([prompt_of(30)])), positions, [SessionCache(LAYERS // 2)])
        found = last.logits(rows, positions, [SessionCache(LAYERS // 2)]).float()
    assert float((found - exact).norm() / exact.norm()) < 0.04
    assert len(Chain(engines).reply(0, prompt_of(9), 4, 32)) == 4


def test_a_load_holds_one_dense_block_at_a_time(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the layers; every dense matrix is freed before the next block's are quantized."""
    load_as_on_a_card(monkeypatch)
    made: list[StageModel] = []
    seen: list[tuple[int, int]] = []
    matrices: list[weakref.ref[torch.Tensor]] = []

    class Watched(StageModel):
        def __init__(self, *of: Any) -> None:
            super().__init__(*of)
            made.append(self)

    def quantize(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        (model,) = made
        dense = {layer for layer in range(LAYERS) if any(not p.is_meta for p in model.block(layer).parameters())}
        (layer,) = dense
        if not seen or seen[-1][0] != layer:
            assert [ref() for ref in matrices] == [None] * len(matrices)
            seen.append((layer, 0))
        seen[-1] = (layer, seen[-1][1] + 1)
        matrices.append(weakref.ref(weight))
        return on_card(weight, bias)

    monkeypatch.setattr(loader, "StageModel", Watched)
    monkeypatch.setattr(lean_block, "on_card", quantize)
    (engine,) = load(checkpoint, tmp_path / "s", quantization="int4-fast").engines
    assert seen == [(layer, 4) for layer in range(LAYERS)]
    assert [ref() for ref in matrices] == [None] * (4 * LAYERS)
    model = engine.model  # type: ignore[attr-defined]
    assert all(p.is_meta for p in model.base.layers.parameters())
    assert not model.outer.lm_head.weight.is_meta, "the head stays in bfloat16"


@pytest.mark.parametrize("capability", [(7, 5), (6, 1)])
def test_an_older_card_is_refused_by_its_capability(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "GeForce")
    assert f"GeForce has compute capability {capability[0]}.{capability[1]}" in int4_obstacle(CARD)
    assert "8.0 (Ampere) or newer" in int4_obstacle(CARD)


def test_a_card_without_torchao_or_without_cuda_is_refused_by_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert int4_obstacle(CARD) == "this torch is not built for CUDA"
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert int4_obstacle(CARD) == ""
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    assert "torchao cannot be imported (ModuleNotFoundError" in int4_obstacle(CARD)


def test_the_worker_looks_again_on_the_card_it_is_told_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(KernelsFailed, match="int4-fast on a card cannot be served: this torch is not built for CUDA"):
        loader._check_kernels(INT4_CARD, CARD)
    with pytest.raises(KernelsFailed, match="int8 packs weights for the CPU's kernels, and this stage is on cuda:0"):
        loader._check_kernels("int8", CARD)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    loader._check_kernels(INT4_CARD, CARD)
    assert chosen == [CARD] * 3, "where torchao and its kernel look"


def test_what_a_worker_would_find_is_told_in_one_line() -> None:
    """The real program, on this machine; with a card it would say so."""
    said = subprocess.run(
        [sys.executable, "-m", "swarmnode.compute.device", "cpu"], capture_output=True, check=True, timeout=60
    ).stdout
    assert json.loads(said) == {"device": "cpu", "int4_obstacle": ""}


def test_of_a_card_its_memory_is_told_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(device, "pick_device", lambda name: CARD if name == "cuda" else None)
    monkeypatch.setattr(device, "int4_obstacle", lambda card: "it is old")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda card: (5 << 30, 8 << 30))
    monkeypatch.setattr(device.signal, "alarm", lambda seconds: None)
    monkeypatch.setattr(sys, "argv", ["device", "cuda"])
    device.main()
    memory = {"vram_bytes": 8 << 30, "vram_free_bytes": 5 << 30}
    assert json.loads(capsys.readouterr().out) == {"device": "cuda", "int4_obstacle": "it is old", **memory}


def test_a_cards_memory_is_told_and_what_a_stage_holds_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 << 30, 8 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1 << 30)
    assert card_memory(CARD) == {"vram_bytes": 8 << 30, "vram_free_bytes": 5 << 30}
    assert stage_gauges(CARD) == {"vram_bytes": 1 << 30, "vram_free_bytes": 5 << 30}
    assert card_memory(torch.device("cpu")) == stage_gauges(torch.device("cpu")) == {}
