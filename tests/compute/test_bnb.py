"""bitsandbytes' NF4 and int8, quantized while loading, against a quantized `from_pretrained` of the same checkpoint."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from references import generate
from stage_chains import Chain, even_cuts, prompt_of, stage_specs
from tiny_models import make_tiny

from swarmnode.compute import bnb
from swarmnode.compute.loader import load_stage
from swarmnode.errors import KernelsFailed, LoadRefused

if TYPE_CHECKING:
    from pathlib import Path

    from stage_chains import Parity

pytest.importorskip("bitsandbytes")
LAYERS = 3
METHODS = ("nf4", "bnb-int8")


class Checkpoint:
    """A tiny checkpoint and what transformers makes of it when it quantizes."""

    def __init__(self, path: Path, method: str, family: str, dtype: str) -> None:
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig

        tied = family == "qwen2"
        self.path, self.method, self.dtype = path, method, dtype
        self.checkpoint = make_tiny(path / "model", family, 1, num_layers=LAYERS, tied=tied, dtype="bfloat16")
        served = getattr(torch, dtype)
        config = (
            BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=served)
            if method == "nf4"
            else BitsAndBytesConfig(load_in_8bit=True)
        )
        auto: Any = AutoModelForCausalLM
        self.model: Any = auto.from_pretrained(
            self.checkpoint, dtype=served, quantization_config=config, attn_implementation="sdpa", device_map="cpu"
        )
        self.model.eval()

    def chain(self, stages: int) -> Chain:
        specs = stage_specs(
            self.checkpoint,
            self.path / f"over-{stages}",
            LAYERS,
            even_cuts(LAYERS, stages),
            quantization=self.method,
            dtype=self.dtype,
        )
        return Chain([load_stage(spec) for spec in specs])


def facts(parameter: Any, module: Any) -> dict[str, torch.Tensor]:
    """Everything that decides what a quantized weight is."""
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        return {"packed": parameter.data, "absmax": state.absmax, "quant_map": state.code}
    scales = parameter.SCB if parameter.SCB is not None else module.state.SCB
    return {"CB": parameter.data, "SCB": scales}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("method", METHODS)
def test_q1_quantized_as_from_pretrained_would(
    method: str, family: str, tmp_path: Path, parity: Parity, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(bnb, "_CHUNK_ELEMENTS", 1024)  # a tiny weight takes several chunks too
    made = Checkpoint(tmp_path, method, family, "float32")
    theirs = dict(made.model.named_modules())
    chain = made.chain(2)
    compared = 0
    for engine in chain.engines:
        model: Any = engine.model  # type: ignore[attr-defined]
        for name, module in model.outer.named_modules():
            their = theirs.get(_whole_name(name.replace(".layer.", "."), model.first_layer))
            if type(module).__module__.startswith("bitsandbytes"):
                assert type(their) is type(module)
                ours, expected = facts(module.weight, module), facts(their.weight, their)
                assert list(ours) == list(expected)
                for key, tensor in ours.items():
                    assert torch.equal(tensor, expected[key]), (name, key)
                    assert tensor.dtype == expected[key].dtype
                compared += 1
    quantized = [name for name, m in theirs.items() if type(m).__module__.startswith("bitsandbytes")]
    assert compared == len(quantized) == 7 * LAYERS
    assert {engine.model.kernels() for engine in chain.engines} == {"bitsandbytes"}  # type: ignore[attr-defined]
    for session, prompt in enumerate((prompt_of(40), prompt_of(9, 1))):
        parity.check(chain.reply(session, prompt, 10, 64), generate(made.model, prompt, 10))


def _whole_name(name: str, first_layer: int) -> str:
    parts = name.split(".")
    if len(parts) > 2 and parts[1] == "layers":
        parts[2] = str(int(parts[2]) + first_layer)
    return ".".join(parts)


@pytest.mark.parametrize("method", METHODS)
def test_tokens_in_bfloat16_do_not_depend_on_stages(method: str, tmp_path: Path) -> None:
    made = Checkpoint(tmp_path, method, "llama", "bfloat16")
    prompt = prompt_of(30)
    one = made.chain(1).reply(0, prompt, 8, 64)
    assert made.chain(3).reply(0, prompt, 8, 64) == one


def test_experts_that_bitsandbytes_would_leave_alone_are_refused(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("qwen3_moe", hidden_size=64, num_hidden_layers=1, num_experts=2, vocab_size=32)
    with torch.device("meta"):
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config)
    with pytest.raises(LoadRefused, match="cannot be served with nf4: bitsandbytes quantizes linear layers alone"):
        bnb.replace_linears(model, "nf4", torch.float32)


def test_a_peer_without_the_library_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(KernelsFailed, match="bitsandbytes is not installed on this peer"):
        bnb.replace_linears(None, "nf4", torch.float32)


def test_a_library_that_cannot_be_imported_is_no_bug_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(KernelsFailed, match="bitsandbytes does not run on this peer: "):
        bnb.replace_linears(None, "nf4", torch.float32)
