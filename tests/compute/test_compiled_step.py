"""Compiled blocks: what float64 makes of the same weights, row by row, on any threads, reading nothing beyond."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from packed_kernels import NEEDS_COMPILED, take_kernels
from stage_chains import Chain, prompt_of, stage_specs
from tiny_models import make_tiny
from torch.nn.functional import silu

from swarmnode.compute import compiled_dense, tiled_projections
from swarmnode.compute.compiled_dense import CompiledDense, dense
from swarmnode.compute.compiled_step import BlockParts, CompiledStep, Gain, compiled_step
from swarmnode.compute.cpu_kernels import TILE
from swarmnode.compute.kv_cache import SessionCache
from swarmnode.compute.lean_block import LeanBlock
from swarmnode.compute.loader import load_stage
from swarmnode.compute.spec import PACKED_METHODS
from swarmnode.compute.tiled_projections import packed
from swarmnode.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

pytestmark = [NEEDS_COMPILED, pytest.mark.usefixtures("compiled_kernels")]

HIDDEN, INTERMEDIATE = 96, 160
LARGE = 5
"""The input that is far above the others."""
LENGTHS = (0, 1, 31, 32, 33, 70, 127, 300)
"""Positions held before: none, and around the code's blocks of 32."""
TOLERANCE = {torch.bfloat16: 2.0**-7, torch.float32: 1e-5}
"""Of what a block adds, as the norm of a row: bfloat16 rounds what attention gives, gate and up, and the result."""
METHODS = ("int8", "int4-fast", "bfloat16", "float32")
"""Packed weights, and dense ones of these dtypes."""


def some_parts(
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    method: str = "int4-fast",
    *,
    bias: bool = False,
    head_norms: bool = False,
    window: int | None = None,
    rotates: bool = True,
) -> BlockParts:
    dtype = torch.float32 if method == "float32" else torch.bfloat16

    def matrix(out: int, inputs: int, added: bool = False) -> Any:
        weight, beside = (torch.randn(out, inputs) / inputs**0.5).to(dtype), randn(out, dtype=dtype) if added else None
        return packed(method, weight, beside) if method in PACKED_METHODS else dense(weight, beside)

    def gain(size: int) -> Gain:
        return Gain(1 + 0.3 * torch.randn(size), 1e-5)

    wide = heads * head_dim
    return BlockParts(
        matrix(wide + 2 * kv_heads * head_dim, HIDDEN, bias),
        matrix(HIDDEN, wide, bias),
        matrix(2 * INTERMEDIATE, HIDDEN, bias),
        matrix(HIDDEN, INTERMEDIATE, bias),
        heads,
        kv_heads,
        head_dim,
        window,
        head_dim**-0.5,
        rotates,
        gain(HIDDEN),
        gain(HIDDEN),
        gain(head_dim) if head_norms else None,
        gain(head_dim) if head_norms else None,
    )


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def some_tables(count: int, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of angles that differ by row, the sine signed."""
    angles = torch.rand(count, 1, 1, head_dim // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def some_cache(parts: BlockParts, length: int) -> SessionCache:
    """`length` positions, and what lies unused behind them is no number, in a buffer that is no whole block."""
    cache, shape = SessionCache(1), (1, parts.kv_heads, length + 3, parts.head_dim)
    keys, values = (randn(*shape, dtype=parts.dtype) for _ in range(2))
    keys[:, :, length:] = values[:, :, length:] = float("nan")
    cache.append(0, keys, values)
    cache.trim()
    cache.crop(length)
    return cache


def held(parts: BlockParts, cache: SessionCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, (kv_heads, length, head_dim)."""
    nothing = torch.empty(1, parts.kv_heads, 0, parts.head_dim, dtype=parts.dtype)
    keys, values = cache.copy(cache.length, cache.length).append(0, nothing, nothing)
    return keys[0], values[0]


def run(
    parts: BlockParts, rows: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], caches: Sequence[SessionCache]
) -> torch.Tensor:
    step = compiled_step([parts])
    assert step is not None
    return step.run(rows, [tables], caches)


def exact(
    parts: BlockParts, row: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: SessionCache
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One row (hidden,) in float64: the block's result, and key and value of the new position."""

    def multiply(matrix: Any, x: torch.Tensor) -> torch.Tensor:
        weight = matrix.weight if isinstance(matrix, CompiledDense) else matrix.unpack(0, matrix.outputs)
        out = weight.double() @ x
        return out if matrix._bias is None else out + matrix._bias.double()

    def norm(x: torch.Tensor, gain: Gain | None) -> torch.Tensor:
        if gain is None:
            return x
        return x / (x.square().mean(-1, keepdim=True) + gain.eps).sqrt() * gain.weight.double()

    def turn(x: torch.Tensor) -> torch.Tensor:
        return x * cos.double() + x.roll(parts.head_dim // 2, -1) * sin.double() if parts.rotates else x

    x = row.double()
    qkv = multiply(parts.qkv, norm(x, parts.input_gain)).view(-1, parts.head_dim)
    query, key, value = qkv.split([parts.heads, parts.kv_heads, parts.kv_heads])
    query, key = turn(norm(query, parts.query_gain)), turn(norm(key, parts.key_gain))
    keys, values = (
        torch.cat((old.double(), new[:, None]), 1) for old, new in zip(held(parts, cache), (key, value), strict=True)
    )
    if parts.window is not None:
        keys, values = keys[:, -parts.window :], values[:, -parts.window :]
    grouped = query.view(parts.kv_heads, -1, parts.head_dim)
    shares = (grouped @ keys.transpose(1, 2) * parts.scaling).softmax(-1)
    x = x + multiply(parts.o, (shares @ values).reshape(-1))
    gate, up = multiply(parts.gate_up, norm(x, parts.mlp_gain)).chunk(2)
    return x + multiply(parts.down, silu(gate) * up), key, value


def assert_exact(parts: BlockParts, count: int, lengths: Sequence[int] = LENGTHS) -> None:
    rows, tables = randn(count, 1, HIDDEN, dtype=parts.dtype), some_tables(count, parts.head_dim, parts.dtype)
    rows[:, :, LARGE] *= 200  # one value that the others' codes have to share their scale with
    caches = [some_cache(parts, lengths[n % len(lengths)]) for n in range(count)]
    cos, sin = (table.view(count, -1) for table in tables)
    expected = [exact(parts, rows[n, 0], cos[n], sin[n], cache) for n, cache in enumerate(caches)]
    before = rows.clone()
    found = run(parts, rows, tables, caches)
    assert torch.equal(rows, before)
    assert found.dtype == parts.dtype
    for n, (row, key, value) in enumerate(expected):
        assert_close(found[n, 0].double(), row, rows[n, 0].double(), TOLERANCE[parts.dtype])
        for cached, new in zip(held(parts, caches[n]), (key, value), strict=True):
            assert cached.shape[1] == lengths[n % len(lengths)] + 1
            assert float((cached[:, -1].double() - new).norm() / new.norm()) < TOLERANCE[parts.dtype]


def assert_close(found: torch.Tensor, row: torch.Tensor, before: torch.Tensor, tolerance: float) -> None:
    """Within `tolerance` of what was added and, of the sum, what rounding it after attention and after the MLP costs;
    the one large value is looked at alone, so that it hides nothing of the others."""
    large = torch.arange(HIDDEN) == LARGE
    for of in (large, ~large):
        added = (row - before)[~large].norm()
        assert float((found - row)[of].norm()) < tolerance * (float(added) + float(row[of].norm()))


@pytest.mark.parametrize("method", ["int4-fast", "float32"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 9, 17])
def test_every_row_count_gives_what_float64_does(count: int, method: str) -> None:
    assert_exact(some_parts(method=method), count)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(9, 3, 64), (4, 2, 128), (2, 2, 16), (4, 2, 80), (6, 2, 32), (2, 1, 256), (1, 1, 4096)],
)
def test_every_grouping_and_head_size_does(heads: int, kv_heads: int, head_dim: int, method: str) -> None:
    assert_exact(some_parts(heads, kv_heads, head_dim, method), 8)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"bias": True}, id="biases"),
        pytest.param({"head_norms": True}, id="norms of heads"),
        pytest.param({"rotates": False}, id="no rotation"),
        pytest.param({"window": 1}, id="a window of one"),
        pytest.param({"window": 33}, id="a window"),
        pytest.param({"bias": True, "head_norms": True, "window": 64, "rotates": False}, id="all of these"),
    ],
)
@pytest.mark.parametrize("method", ["int4-fast", "float32"])
def test_every_kind_of_block_does(settings: dict[str, Any], method: str) -> None:
    assert_exact(some_parts(method=method, **settings), 8)


@pytest.mark.parametrize("method", ["int4-fast", "float32"])
def test_scores_far_apart_are_as_exact(method: str) -> None:
    """One position takes nearly all, early or late: sums of before are scaled down to nothing, or nothing is added."""
    assert_exact(replace(some_parts(method=method), scaling=1.0), 8)


@pytest.mark.parametrize("method", METHODS)
def test_a_row_does_not_depend_on_the_others_nor_on_threads(method: str) -> None:
    parts = some_parts(9, 3, 64, method)
    rows, tables = randn(8, 1, HIDDEN, dtype=parts.dtype), some_tables(8, 64, parts.dtype)
    caches = [some_cache(parts, length) for length in LENGTHS]

    def copies() -> list[SessionCache]:
        return [cache.copy(cache.length, cache.length + 1) for cache in caches]

    alone = torch.cat(
        [
            run(parts, rows[n : n + 1], (tables[0][n : n + 1], tables[1][n : n + 1]), [cache])
            for n, cache in enumerate(copies())
        ]
    )
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(run(parts, rows, tables, copies()), alone)


def test_threads_without_a_share_do_nothing() -> None:
    """More threads than row and head give shares to, and than the matrices have tiles."""
    parts = some_parts(2, 1, 64)
    torch.set_num_threads(1 + parts.o.outputs // TILE)
    assert_exact(parts, 1)


def test_broken_numbers_stay_in_their_row_and_are_seen() -> None:
    parts, rows, tables = some_parts(), randn(3, 1, HIDDEN), some_tables(3, 64)
    rows[1, 0, 7] = float("nan")
    found = run(parts, rows, tables, [some_cache(parts, 40) for _ in range(3)])
    assert found[0].isfinite().all()
    assert not found[1].isfinite().any()
    assert found[2].isfinite().all()


def test_buffers_grow_step_by_step() -> None:
    parts, tables = some_parts(), some_tables(1, 64)
    cache = SessionCache(1)
    for length in range(130):
        row = randn(1, 1, HIDDEN)
        expected = exact(parts, row[0, 0], tables[0].view(-1), tables[1].view(-1), cache)[0] if length else None
        found = run(parts, row, tables, [cache])
        assert cache.length == length + 1
        if expected is not None:
            assert float((found.double().view(-1) - expected).norm() / expected.norm()) < TOLERANCE[parts.dtype]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda p: replace(p, head_dim=8, heads=32, kv_heads=16), id="heads of eight"),
        pytest.param(lambda p: replace(p, kv_heads=3), id="other KV heads than rows of qkv"),
        pytest.param(lambda p: replace(p, o=p.down), id="another matrix"),
        pytest.param(lambda p: replace(p, o=some_parts(method="float32").o), id="a matrix for other rows"),
        pytest.param(lambda p: replace(p, mlp_gain=Gain(torch.ones(HIDDEN - 1), 1e-5)), id="a short gain"),
        pytest.param(lambda p: replace(p, input_gain=Gain(torch.ones(HIDDEN).bfloat16(), 1e-5)), id="a coarse gain"),
        pytest.param(lambda p: replace(p, query_gain=Gain(torch.ones(2 * 64)[::2], 1e-5)), id="a gain with gaps"),
    ],
)
def test_sizes_that_do_not_fit_together_are_torchs(change: Any) -> None:
    parts = some_parts()
    assert compiled_step([parts]) is not None
    assert compiled_step([change(parts)]) is None
    assert compiled_step([parts, change(parts)]) is None


def test_blocks_of_other_shapes_and_of_other_kernels_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = some_parts()
    assert compiled_step([parts, some_parts(2, 1)]) is None
    assert compiled_step([parts, some_parts(method="float32")]) is None
    assert compiled_step([parts, None]) is None
    assert compiled_step([]) is None
    monkeypatch.setattr("swarmnode.compute.compiled_step.cpu_kernels", lambda *_: None)
    assert compiled_step([parts]) is None


@pytest.mark.parametrize(
    ("rows", "tables"),
    [
        pytest.param(torch.ones(2, 1, HIDDEN + 32).bfloat16(), (2, 64), id="wide rows"),
        pytest.param(torch.ones(2, 2, HIDDEN).bfloat16(), (2, 64), id="two positions"),
        pytest.param(torch.ones(1, 1, HIDDEN).bfloat16(), (2, 64), id="one row"),
        pytest.param(torch.ones(2, 1, HIDDEN), (2, 64), id="float32"),
        pytest.param(torch.ones(2, 1, HIDDEN).bfloat16(), (1, 64), id="a table for one"),
        pytest.param(torch.ones(2, 1, HIDDEN).bfloat16(), (2, 32), id="narrow tables"),
    ],
)
def test_a_step_that_the_code_would_misread_is_refused(rows: torch.Tensor, tables: tuple[int, int]) -> None:
    parts = some_parts()
    caches = [some_cache(parts, 4) for _ in range(2)]
    with pytest.raises(StageFailed, match="a step of 2 sessions got rows"):
        run(parts, rows, some_tables(*tables), caches)
    assert [cache.length for cache in caches] == [4, 4]


def test_a_bias_that_the_code_would_misread_is_refused() -> None:
    parts = some_parts()
    parts.o._bias = torch.zeros(HIDDEN - 1).bfloat16()
    with pytest.raises(ValueError, match="the kernel reads 96 in bfloat16"):
        compiled_step([parts])


# in a stage


def load(checkpoint: Path, target: Path, **settings: Any) -> Chain:
    return Chain([load_stage(spec) for spec in stage_specs(checkpoint, target, 3, [0, 3], **settings)])


def compiled(chain: Chain) -> bool:
    (engine,) = chain.engines
    lean = engine.model.lean  # type: ignore[attr-defined]
    return lean is not None and lean._compiled is not None


@pytest.mark.parametrize(
    ("family", "expected"), [("llama", True), ("qwen2", True), ("qwen3", True), ("mistral", True), ("gemma3", False)]
)
def test_which_blocks_it_serves(family: str, expected: bool, tmp_path: Path) -> None:
    checkpoint = make_tiny(tmp_path / "m", family, num_layers=3)
    assert compiled(load(checkpoint, tmp_path / "four", quantization="int4-fast")) is expected
    assert compiled(load(checkpoint, tmp_path / "eight", quantization="int8")) is expected
    for dtype in ("bfloat16", "float32"):
        assert compiled(load(checkpoint, tmp_path / dtype, dtype=dtype)) is expected
    assert not compiled(load(checkpoint, tmp_path / "exact", dtype="float32", quantization="int8"))


def test_a_mode_of_attention_that_was_asked_for_and_torchs_kernels_keep_torchs_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_tiny(tmp_path / "m", "llama", num_layers=3)
    with monkeypatch.context() as asked:
        asked.setenv("SWARM_SERVE_ATTENTION", "sdpa")
        assert not compiled(load(checkpoint, tmp_path / "asked", quantization="int8"))
    for module in (tiled_projections, compiled_dense):
        monkeypatch.setattr(module, "cpu_kernels", lambda *_: None)
    assert not compiled(load(checkpoint, tmp_path / "torch", quantization="int8"))
    assert not compiled(load(checkpoint, tmp_path / "dense"))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        pytest.param({"quantization": "int8"}, 0.03, id="int8"),
        pytest.param({"dtype": "bfloat16"}, 0.03, id="bfloat16"),
        pytest.param({"dtype": "float32"}, 1e-5, id="float32"),
    ],
)
def test_its_logits_are_those_of_torchs_way_to_rounding(
    settings: dict[str, str], tolerance: float, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_tiny(tmp_path / "m", family, num_layers=3)
    ours = load(checkpoint, tmp_path / "ours", **settings)
    assert compiled(ours)
    if "dtype" in settings:
        take_kernels("torch", monkeypatch)
    monkeypatch.setattr(LeanBlock, "parts", lambda _: None)
    theirs = load(checkpoint, tmp_path / "theirs", **settings)
    assert not compiled(theirs)
    found, expected = (forced_logits(chain) for chain in (ours, theirs))
    assert float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max()) < tolerance


def forced_logits(chain: Chain) -> torch.Tensor:
    """After each of ten given tokens behind a prompt of 20."""
    model: Any = chain.engines[0].model  # type: ignore[attr-defined]
    ids, cache = prompt_of(30), SessionCache(3)
    with torch.inference_mode():
        model.logits(model.embed(torch.tensor([ids[:20]])), torch.arange(20)[None], [cache])
        steps = [
            model.logits(model.embed(torch.tensor([[ids[n]]])), torch.tensor([[n]]), [cache]) for n in range(20, 30)
        ]
    return torch.cat(steps).float()


def test_a_compiled_block_that_computes_something_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = make_tiny(tmp_path / "m", "llama", num_layers=3)
    true_parts = LeanBlock.parts

    def other_parts(self: LeanBlock) -> BlockParts | None:
        parts = true_parts(self)
        assert parts is not None
        return replace(parts, rotates=False)

    monkeypatch.setattr(LeanBlock, "parts", other_parts)
    with caplog.at_level(logging.WARNING, "swarmnode.compute.lean"):
        chain = load(checkpoint, tmp_path / "s", quantization="int8")
    assert not compiled(chain)
    assert "torch's operations serve each step: compiled block 0 differs by" in caplog.text
    assert chain.engines[0].model.lean is not None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("module", "said"), [("cpu_kernels", "a bias of "), ("compiled_step", "a step of 1 sessions got rows")]
)
def test_a_stage_whose_bias_or_rotations_the_code_would_misread_is_served_by_torch(
    module: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = make_tiny(tmp_path / "m", "qwen2", num_layers=3)
    monkeypatch.setattr(f"swarmnode.compute.{module}.readable", lambda _, dtype: dtype != torch.bfloat16)
    with caplog.at_level(logging.WARNING, "swarmnode.compute.lean"):
        chain = load(checkpoint, tmp_path / "s", quantization="int8")
    assert f"torch's operations serve each step: {said}" in caplog.text
    assert not compiled(chain)
    assert forced_logits(chain).isfinite().all()


def test_many_sessions_are_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From as many rows on as are multiplied faster in another way."""
    chain = load(make_tiny(tmp_path / "m", "llama", num_layers=3), tmp_path / "s", quantization="int8")
    lean = chain.engines[0].model.lean  # type: ignore[attr-defined]
    counts: list[int] = []
    true_run = CompiledStep.run
    monkeypatch.setattr(
        CompiledStep, "run", lambda self, rows, *rest: (counts.append(len(rows)), true_run(self, rows, *rest))[1]
    )
    for session in range(5):
        chain.prefill(session, prompt_of(9, session), 32)
    lean.use_compiled(lean._compiled, below=5)
    chain.step(0, 1, 2, 3)
    chain.step(0, 1, 2, 3, 4)
    assert counts == [4]
