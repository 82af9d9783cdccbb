"""The lean decoder is taken only where it reproduces transformers' own blocks; otherwise those serve and it is said."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from stage_chains import Chain, even_cuts, prompt_of, stage_specs
from tiny_models import make_tiny

import swarmnode.compute.lean_block as lean_block
from swarmnode.compute.kv_cache import SessionCache
from swarmnode.compute.lean_decoder import RotaryTable
from swarmnode.compute.loader import load_stage

if TYPE_CHECKING:
    from pathlib import Path

LAYERS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny(tmp_path_factory.mktemp("lean") / "model", "qwen3", num_layers=LAYERS)


def load(checkpoint: Path, target: Path, cuts: tuple[int, ...] = (0, LAYERS), **settings: Any) -> Chain:
    return Chain([load_stage(spec) for spec in stage_specs(checkpoint, target, LAYERS, cuts, **settings)])


def test_both_decoders_share_one_copy_of_the_weights(checkpoint: Path, tmp_path: Path) -> None:
    model = load(checkpoint, tmp_path / "s").engines[0].model
    block = model.block(1)
    joined = block.self_attn.q_proj.weight.untyped_storage().data_ptr()
    assert joined == block.self_attn.v_proj.weight.untyped_storage().data_ptr()
    assert (
        block.mlp.gate_proj.weight.untyped_storage().data_ptr() == block.mlp.up_proj.weight.untyped_storage().data_ptr()
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cuts", [(0, LAYERS), (0, 1, LAYERS)])
def test_a_block_that_computes_something_else_is_not_used(
    cuts: tuple[int, ...],
    dtype: str,
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = load(checkpoint, tmp_path / "good", cuts, dtype=dtype, lean=False).reply(0, prompt_of(20), 8, 8)
    monkeypatch.setattr(lean_block, "silu", torch.relu)
    with caplog.at_level(logging.WARNING, "swarmnode.compute.lean"):
        chain = load(checkpoint, tmp_path / "bad", cuts, dtype=dtype)
    assert all(engine.model.lean is None for engine in chain.engines)
    assert f"block {0} differs by" in caplog.text
    assert "transformers' own blocks serve" in caplog.text
    assert chain.reply(0, prompt_of(20), 8, 8) == expected


def test_only_the_last_block_being_another_gives_up_all(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_init = lean_block.LeanBlock.__init__

    def broken(self: Any, block: Any, *rest: Any) -> None:
        true_init(self, block, *rest)
        self.rotates = block.self_attn.layer_idx != LAYERS - 1

    monkeypatch.setattr(lean_block.LeanBlock, "__init__", broken)
    assert load(checkpoint, tmp_path / "s").engines[0].model.lean is None


def test_rows_that_enter_stay_as_they_are(checkpoint: Path, tmp_path: Path) -> None:
    lean = load(checkpoint, tmp_path / "s").engines[0].model.lean
    rows = torch.randn(1, 4, 64)
    before = rows.clone()
    with torch.inference_mode():
        lean.run(rows, torch.arange(4)[None], [SessionCache(LAYERS)])
    assert torch.equal(rows, before)


def test_rotary_tables_grow_and_stay_the_same() -> None:
    def compute(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[..., None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
        return angles.cos(), angles.sin()

    table = RotaryTable(compute)
    early = table.at(torch.tensor([[3], [511]]), 511)
    late = table.at(torch.tensor([[3], [2000]]), 2000)
    assert early[0].shape == (2, 1, 1, 4)
    assert torch.equal(early[0][0], late[0][0])
    x = torch.randn(1, 1, 1, 4)
    cos, sin = compute(torch.tensor([[2000]]))
    turned = x * cos + torch.cat((-x[..., 2:], x[..., :2]), -1) * sin
    assert torch.allclose(x * late[0][1:] + x.roll(2, -1) * late[1][1:], turned)


def test_a_head_whose_logits_are_capped_keeps_the_familys_own_tail(tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        checkpoint = make_tiny(tmp_path / dtype / "m", "gemma3", num_layers=LAYERS, final_logit_softcapping=30.0)
        outputs = []
        for lean in (True, False):
            model = load(checkpoint, tmp_path / dtype / f"s{lean}", dtype=dtype, lean=lean).engines[0].model
            with torch.inference_mode():
                rows = model.embed(torch.arange(9)[None])
                outputs.append(model.logits(rows, torch.arange(9)[None], [SessionCache(LAYERS)]).float())
        assert torch.allclose(*outputs, atol=1e-4 if dtype == "float32" else 0.1)
        assert model.outer.config.final_logit_softcapping == 30.0


def test_attention_modes_give_the_same_tokens(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = []
    for mode in ("auto", "grouped", "sdpa"):
        monkeypatch.setenv("SWARM_SERVE_ATTENTION", mode)
        replies.append(load(checkpoint, tmp_path / mode, tuple(even_cuts(LAYERS, 2))).reply(0, prompt_of(40), 8, 16))
    assert replies[0] == replies[1] == replies[2]
