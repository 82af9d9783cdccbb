"""bitsandbytes on a card: quantized by its CUDA kernels as transformers would, and the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from test_gpu_stages import chain, write

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
