"""Stages loaded in eight and four bits: what the packed weights say, the same over any stages and batches."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from packed_kernels import ALL_KERNELS, take_kernels
from safetensors.torch import load_file, save_file
from stage_chains import Chain, even_cuts, prompt_of, stage_specs
from test_parity import write_random
from tiny_models import make_tiny

from swarmnode.compute import lean_block, lean_loading
from swarmnode.compute.kv_cache import SessionCache
from swarmnode.compute.loader import load_stage
from swarmnode.compute.spec import StageSpec
from swarmnode.compute.tiled_projections import packed
from swarmnode.errors import KernelsFailed, LoadRefused

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

LAYERS = 3
METHODS = ("int8", "int4-fast")
FAMILIES = ("llama", "qwen2", "qwen3", "gemma3")


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("packed") / "model"
    return make_tiny(path, request.param, num_layers=LAYERS, tied=request.param != "llama")


@pytest.fixture(params=ALL_KERNELS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whose kernels serve."""
    take_kernels(request.param, monkeypatch)
    return str(request.param)


def load(checkpoint: Path, target: Path, stages: int = 1, **settings: Any) -> Chain:
    specs = stage_specs(checkpoint, target, LAYERS, even_cuts(LAYERS, stages), **settings)
    return Chain([load_stage(spec) for spec in specs])


def logits(chain: Chain) -> torch.Tensor:
    model = chain.engines[0].model
    with torch.inference_mode():
        rows = model.embed(torch.tensor([prompt_of(30)]))
        out = model.logits(rows, torch.arange(30)[None], [SessionCache(LAYERS)])
    assert isinstance(out, torch.Tensor)
    return out.float()


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("method", METHODS)
def test_logits_are_those_of_the_unpacked_weights_in_full_precision(
    method: str, checkpoint: Path, tmp_path: Path
) -> None:
    unpacked = tmp_path / "unpacked"
    shutil.copytree(checkpoint, unpacked)
    tensors = load_file(checkpoint / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith("proj.weight"):
            exact = packed(method, weight.to(torch.bfloat16), None)
            tensors[name] = exact.unpack(0, weight.shape[0]).contiguous()
    save_file(tensors, unpacked / "model.safetensors", metadata={"format": "pt"})
    exact_logits = logits(load(unpacked, tmp_path / "full", dtype="float32", lean=False))
    found = logits(load(checkpoint, tmp_path / "packed", quantization=method))
    # What is left is bfloat16's rounding between the matrices and the head's eight bits.
    assert float((found - exact_logits).norm() / exact_logits.norm()) < 0.04


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("method", METHODS)
def test_tokens_do_not_depend_on_stages_or_batch(method: str, checkpoint: Path, tmp_path: Path) -> None:
    prompts = {0: prompt_of(9), 1: prompt_of(20, 1)}
    one = load(checkpoint, tmp_path / "one", quantization=method)
    expected = {session: one.reply(session, prompt, 6, 32) for session, prompt in prompts.items()}
    chain = load(checkpoint, tmp_path / "two", 2, quantization=method)
    tokens = {session: [chain.prefill(session, prompt, 32)] for session, prompt in prompts.items()}
    for _ in range(5):
        for session, token in zip(prompts, chain.step(*prompts), strict=True):
            tokens[session].append(token)
    assert tokens == expected


@pytest.mark.parametrize("method", METHODS)
def test_a_stage_says_whose_kernels_serve_it(kernels: str, method: str, checkpoint: Path, tmp_path: Path) -> None:
    chain = load(checkpoint, tmp_path / "s", 2, quantization=method)
    said = {engine.model.kernels() for engine in chain.engines}
    assert said == {"fastcpu" if kernels == "compiled" else "torch"}
    dense = load(checkpoint, tmp_path / "dense").engines[0].model
    assert dense.kernels() == ("fastcpu" if kernels == "compiled" else "dense")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("method", METHODS)
def test_dense_memory_is_let_go(method: str, checkpoint: Path, tmp_path: Path) -> None:
    first, last = (engine.model for engine in load(checkpoint, tmp_path / "s", 2, quantization=method).engines)
    matrices = [p for model in (first, last) for p in model.base.layers.parameters()]
    assert all(p.is_meta for p in matrices)
    assert last.outer.lm_head.weight.is_meta
    assert not first.base.embed_tokens.weight.is_meta
    assert first.lean is not None
    assert first.dtype == torch.bfloat16


def test_a_family_the_kernels_do_not_serve_is_refused_with_the_reason(tmp_path: Path) -> None:
    write_random(tmp_path / "model", "phi3", {})
    specs = stage_specs(tmp_path / "model", tmp_path / "s", 5, [0, 5], quantization="int8")
    with pytest.raises(KernelsFailed, match="cannot be served with int8, whose kernels need Llama-shaped blocks"):
        load_stage(specs[0])


@pytest.mark.parametrize("module", [lean_block, lean_loading], ids=["blocks", "head"])
@pytest.mark.parametrize("error", [RuntimeError("not built for this CPU"), AttributeError("no such kernel")])
def test_kernels_that_do_not_run_are_told_apart_from_what_else_may_fail(
    error: Exception, module: ModuleType, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> object:
        raise error

    monkeypatch.setattr(module, "packed", failing)
    with pytest.raises(KernelsFailed, match=f"kernels for int8 do not run here: {type(error).__name__}: {error}"):
        load(checkpoint, tmp_path / "s", quantization="int8")


def test_what_is_asked_is_checked(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadRefused, match="'int3' is not one of none, int8, int4-fast"):
        StageSpec(tmp_path, (), 0, 1, 1, True, True, quantization="int3")
