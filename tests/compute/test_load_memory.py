"""Q1, L5: what a load allocates at its peak, byte by byte as torch's allocator tells it, against the issue's bound and
against what placement priced."""

from __future__ import annotations

import gc
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from stage_chains import even_cuts
from tiny_models import make_tiny
from torch.profiler import ProfilerActivity, profile

from benchmarks.load_memory import held_bytes
from swarmnode.catalog.importing import import_model
from swarmnode.catalog.planning import stage_files
from swarmnode.cluster.pricing import price_stage
from swarmnode.cluster.quantization import METHODS, NONE
from swarmnode.compute import bnb, few_rows, projections, tiled_projections
from swarmnode.compute.loader import load_stage
from swarmnode.compute.spec import PACKED_METHODS, StageSpec
from swarmnode.roles.planning import model_shape

if TYPE_CHECKING:
    from pathlib import Path

    from swarmnode.catalog.manifest import Manifest
    from swarmnode.compute.engine import TorchEngine

LAYERS, HIDDEN, VOCAB = 4, 64, 16_384
"""A head of a million parameters beside blocks of thirty thousand: whoever holds it dense is seen."""
STAGED = 64 << 10
"""Small tensors of the proof and of the headers."""


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("load-memory")
    shape = {"num_layers": LAYERS, "tied": request.param, "dtype": "bfloat16", "vocab_size": VOCAB}
    manifest = import_model(str(make_tiny(root / "base", **shape)), root / "models", stages=2)
    return root / "models" / manifest.id, manifest


@pytest.fixture(autouse=True)
def no_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It multiplies in float32 chunks of 4 MiB and rows by the head, and packs two million weights twice to see which
    kernel is faster: all are little beside any slice but these."""
    monkeypatch.setattr(few_rows, "crossover", lambda _: 32)
    monkeypatch.setattr(projections, "crossover_rows", lambda *_: 32)
    monkeypatch.setattr(tiled_projections, "_tiles_are_faster", lambda *_: True)


def load(folder: Path, manifest: Manifest, begin: int, end: int, method: str) -> tuple[TorchEngine, int]:
    """The stage, and the most that was allocated at once while it loaded."""
    stages = 1 if end - begin == LAYERS else 2
    files = stage_files(manifest, begin, end, stages, begin * stages // LAYERS)
    paths = tuple(folder / file.path for file in files if file.path.endswith(".safetensors"))
    gc.collect()  # what it frees meanwhile would count
    spec = StageSpec(folder, paths, begin, end, LAYERS, begin == 0, end == LAYERS, device="cpu", quantization=method)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        engine = load_stage(spec)
    results: Any = seen.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    taken = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        taken += event.nbytes()
        peak = max(peak, taken)
    return engine, peak


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("begin", "end"), [(0, 2), (2, 4), (0, 4)], ids=["first", "last", "whole"])
def test_q1_the_peak_is_the_slice_and_one_dense_block(
    begin: int, end: int, method: str, model: tuple[Path, Manifest]
) -> None:
    folder, manifest = model
    engine, peak = load(folder, manifest, begin, end, method)
    held, block = held_bytes(engine.model), max(manifest.architecture.layer_params[begin:end]) * 2
    assert peak <= 1.2 * held + block + STAGED
    assert peak > held, "what is held was not seen"


@pytest.mark.parametrize("method", METHODS)
def test_l5_what_a_load_takes_is_what_was_priced(method: str, model: tuple[Path, Manifest]) -> None:
    folder, manifest = model
    for begin, end in pairwise(even_cuts(LAYERS, 2)):
        engine, peak = load(folder, manifest, begin, end, method)
        price = price_stage(model_shape(manifest), begin, end, "bfloat16", method, 1)
        assert held_bytes(engine.model) == pytest.approx(price.weights, rel=0.1)
        assert peak <= price.weights + price.workspace


@pytest.mark.parametrize("method", [method for method in METHODS if method != NONE])
def test_q1_no_second_dense_block_is_held(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks beside which all else is small, and quantized in pieces that are smaller than these."""
    for module in (projections, tiled_projections):
        monkeypatch.setattr(module, "QUANTIZED_ROWS", 64)
    monkeypatch.setattr(bnb, "_CHUNK_ELEMENTS", 1 << 12)
    shape: dict[str, Any] = {"num_layers": LAYERS, "dtype": "bfloat16", "hidden_size": 256, "intermediate_size": 768}
    manifest = import_model(str(make_tiny(tmp_path / "base", **shape)), tmp_path / "models", stages=1)
    engine, peak = load(tmp_path / "models" / manifest.id, manifest, 0, LAYERS, method)
    block, held = manifest.architecture.layer_params[0] * 2, held_bytes(engine.model)
    assert held < 0.75 * LAYERS * block
    assert peak - held < (1.9 if method in PACKED_METHODS else 1) * block
