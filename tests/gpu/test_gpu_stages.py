"""Stages on a card: the tokens of the same stages on the CPU, for every way a stage computes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu
LAYERS = 4
HYBRID = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
    "qwen3_5_text": HYBRID,
}


def write(path: Path, model_type: str) -> Path:
    """A tiny random checkpoint in float32."""
    from tiny_models import write_random

    return write_random(path, model_type, LAYERS, **MODELS[model_type])


def chain(checkpoint: Path, target: Path, stages: int, device: str, **settings: Any) -> Any:
    from stage_chains import Chain, even_cuts, stage_specs

    from swarmnode.compute.loader import load_stage

    specs = stage_specs(checkpoint, target, LAYERS, even_cuts(LAYERS, stages), device=device, **settings)
    return Chain([load_stage(spec) for spec in specs])


@pytest.mark.parametrize("model_type", MODELS)
def test_float32_gives_the_tokens_of_one_process_on_the_cpu(model_type: str, device: str, tmp_path: Path) -> None:
    """But where the two best of those are a rounding apart."""
    import torch
    from references import generate
    from stage_chains import Parity, prompt_of
    from transformers import AutoModelForCausalLM

    checkpoint, parity = write(tmp_path / "model", model_type), Parity()
    auto: Any = AutoModelForCausalLM
    reference = auto.from_pretrained(checkpoint, dtype=torch.float32).eval()
    stages = chain(checkpoint, tmp_path / "s", 2, device)
    assert {engine.model.device.type for engine in stages.engines} == {device}
    for session, length in ((0, 60), (1, 9)):
        prompt = prompt_of(length, session)
        parity.check(stages.reply(session, prompt, 10, 32), generate(reference, prompt, 10))
    assert parity.tokens == 20
    assert parity.excused < 2


@pytest.mark.parametrize("model_type", MODELS)
def test_bfloat16_does_not_depend_on_the_batch(model_type: str, device: str, tmp_path: Path) -> None:
    """Within rounding: the first tokens of a batch are those of its sessions alone."""
    from stage_chains import prompt_of

    checkpoint = write(tmp_path / "model", model_type)
    stages = chain(checkpoint, tmp_path / "s", 2, device, dtype="bfloat16")
    prompts = {session: prompt_of(20 + 7 * session, session) for session in range(3)}
    alone = {session: stages.reply(session, prompt, 3, 16) for session, prompt in prompts.items()}
    tokens = {session: [stages.prefill(session, prompt, 16)] for session, prompt in prompts.items()}
    for _ in range(2):
        for session, token in zip(prompts, stages.step(*prompts), strict=True):
            tokens[session].append(token)
    agreeing = sum(a == b for s in prompts for a, b in zip(alone[s], tokens[s], strict=True))
    assert agreeing >= 8


def test_the_lean_decoder_serves_on_a_card_too(device: str, tmp_path: Path) -> None:
    stages = chain(write(tmp_path / "model", "llama"), tmp_path / "s", 1, device, dtype="bfloat16")
    assert stages.engines[0].model.lean is not None


def test_the_cpus_packed_kernels_are_refused_on_a_card(device: str, tmp_path: Path) -> None:
    from swarmnode.errors import LoadRefused

    if device == "cpu":
        pytest.skip("there is no card")
    with pytest.raises(LoadRefused, match="packs weights for the CPU's kernels"):
        chain(write(tmp_path / "model", "llama"), tmp_path / "s", 1, device, quantization="int8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_t3_a_continued_piece_copies_no_key_per_head_and_holds_no_scores(dtype: str, device: str) -> None:
    import torch

    from swarmnode.compute.attention import session_attention
    from swarmnode.compute.kv_cache import SessionViews

    if device == "cpu":
        pytest.skip("a card's own count is needed")
    heads, kv_heads, width, n, length = 32, 4, 128, 256, 8192
    made = {"dtype": getattr(torch, dtype), "device": device}
    query, keys, values = (torch.randn(1, h, m, width, **made) for h, m in ((heads, n), *[(kv_heads, length)] * 2))
    views = SessionViews([keys], [values], {}, "auto")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    session_attention(torch.nn.Module(), query, views, views, None)
    taken = torch.cuda.max_memory_allocated() - before
    masks = (1 + heads // kv_heads) * n * length * query.element_size()
    copied = 2 * (heads - kv_heads) * length * width * query.element_size()
    assert taken < 1.2 * masks + 8 * query.nbytes
    assert 1.2 * masks + 8 * query.nbytes < copied < heads * n * length * 4, "the bound tells the ways apart"


def test_an_ended_session_gives_its_memory_back(device: str, tmp_path: Path) -> None:
    from stage_chains import prompt_of

    stages = chain(write(tmp_path / "model", "qwen3_5_text"), tmp_path / "s", 1, device)
    stages.prefill(0, prompt_of(100), 64)
    assert stages.engines[0].kv_bytes() > 0
    stages.free(0)
    assert stages.engines[0].kv_bytes() == 0
