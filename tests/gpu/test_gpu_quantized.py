"""bitsandbytes on a card: quantized by its CUDA kernels as transformers would, and the same tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from test_gpu_stages import LAYERS, chain, write

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("method", ["nf4", "bnb-int8"])
def test_q1_tensors_and_tokens_are_those_of_a_quantized_from_pretrained(
    method: str, device: str, tmp_path: Path
) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    pytest.importorskip("accelerate")
    import torch
    from stage_chains import prompt_of
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    checkpoint = write(tmp_path / "model", "llama")
    make: Any = BitsAndBytesConfig
    config = (
        make(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
        if method == "nf4"
        else make(load_in_8bit=True)
    )
    auto: Any = AutoModelForCausalLM
    model: Any = auto.from_pretrained(
        checkpoint, dtype=torch.bfloat16, quantization_config=config, device_map=device
    ).eval()
    stages = chain(checkpoint, tmp_path / "s", 1, device, dtype="bfloat16", quantization=method)
    theirs = dict(model.named_modules())
    compared = 0
    for name, module in stages.engines[0].model.outer.named_modules():
        if isinstance(module, (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)):
            other = theirs[name]
            assert torch.equal(module.weight.data, other.weight.data), name
            if method == "nf4":
                assert torch.equal(module.weight.quant_state.absmax, other.weight.quant_state.absmax), name
            else:
                assert torch.equal(row_scales(module), row_scales(other)), name
            compared += 1
    assert compared == 7 * 4
    prompt = prompt_of(40)
    out = model.generate(
        torch.tensor([prompt], device=model.device),
        max_new_tokens=6,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    expected = out[0, len(prompt) :].tolist()
    ours = stages.reply(0, prompt, 6, 64)
    assert ours[:2] == expected[:2], "bfloat16 rounds in another order: the first tokens have to agree"


def row_scales(module: Any) -> Any:
    """Where a first forward has put them, if there was one."""
    return module.weight.SCB if module.weight.SCB is not None else module.state.SCB


WIDE: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16, "head_dim": 64}
CHUNK_BYTES = 128 * 2048 * 20
"""What torchao may hold beside the rows that it quantizes at a time."""


@pytest.fixture
def int4_device(device: str) -> str:
    """`device`, where int4-fast has kernels; skips with the reason where it has none."""
    from swarmnode.compute.device import int4_obstacle, pick_device

    picked = pick_device(device)
    if picked.type == "cuda" and (obstacle := int4_obstacle(picked)):
        pytest.skip(obstacle)
    return device


def test_q2_every_matrix_is_the_stored_one_off_by_half_a_step(int4_device: str, tmp_path: Path) -> None:
    """Read back through the kernel: what was padded, packed in chunks and fused is in its place."""
    import torch
    from safetensors.torch import load_file
    from tiny_models import write_random

    from swarmnode.compute.lean_block import MATRICES
    from swarmnode.compute.projections import GROUP

    checkpoint = write_random(tmp_path / "model", "llama", LAYERS, **WIDE | {"intermediate_size": 1344})
    stages = chain(checkpoint, tmp_path / "s", 1, int4_device, dtype="bfloat16", quantization="int4-fast")
    stored = load_file(checkpoint / "model.safetensors")
    model = stages.engines[0].model
    with torch.inference_mode():
        for layer, block in enumerate(model.lean.blocks):
            for names, projection in zip(MATRICES.values(), block.projections, strict=True):
                weight = torch.cat([stored[f"model.layers.{layer}.{name}.weight"] for name in names])
                exact = weight.to(torch.bfloat16).float()
                eye = torch.eye(exact.shape[1], dtype=torch.bfloat16, device=model.device)
                off = (projection(eye).float().t().cpu() - exact).view(exact.shape[0], -1, GROUP).abs().amax(-1)
                groups = exact.view(exact.shape[0], -1, GROUP)
                assert bool((off < 0.7 * (groups.amax(-1) - groups.amin(-1)) / 15).all()), (layer, names)


def test_q2_a_load_holds_one_dense_block_and_lets_it_go(int4_device: str, tmp_path: Path) -> None:
    import torch
    from stage_chains import prompt_of
    from tiny_models import write_random

    if int4_device == "cpu":
        pytest.skip("a card's own count is needed")
    checkpoint = write_random(tmp_path / "model", "llama", LAYERS, **WIDE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    stages = chain(checkpoint, tmp_path / "s", 1, int4_device, dtype="bfloat16", quantization="int4-fast")
    peak, held = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    model = stages.engines[0].model
    params = sum(p.numel() for p in model.base.layers[0].parameters())
    kept = model.lean.size_bytes() + model.tail_bytes() + model.base.embed_tokens.weight.nbytes
    assert held < 1.2 * kept
    assert peak < held + 2 * params * 2 + CHUNK_BYTES
    assert len(stages.reply(0, prompt_of(40), 6, 64)) == 6


def test_q2_a_card_and_a_cpu_serve_one_ring(int4_device: str, tmp_path: Path) -> None:
    """The tokens of the same ring on CPUs alone, within the rounding of two kernels."""
    from stage_chains import Chain, even_cuts, prompt_of, stage_specs

    from swarmnode.compute.loader import load_stage

    checkpoint = write(tmp_path / "model", "llama")
    rings = []
    for name, devices in (("a", ("cpu", "cpu")), ("b", ("cpu", int4_device)), ("c", (int4_device, "cpu"))):
        cuts = even_cuts(LAYERS, 2)
        specs = stage_specs(checkpoint, tmp_path / name, LAYERS, cuts, dtype="bfloat16", quantization="int4-fast")
        rings.append(Chain([load_stage(replace(s, device=d)) for s, d in zip(specs, devices, strict=True)]))
    alone, *mixed = (ring.reply(0, prompt_of(40), 3, 64) for ring in rings)
    for tokens in mixed:
        assert tokens[0] == alone[0]
