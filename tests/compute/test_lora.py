"""LoRA adapters against PEFT's own output: merged into full precision, beside quantized weights, over 1 to 3 stages."""

from __future__ import annotations

import importlib.util
import shutil
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from card_kernels import emulated_card, load_as_on_a_card
from references import generate
from safetensors.torch import load_file, save_file
from stage_chains import Chain, even_cuts, logits_of, prompt_of
from tiny_models import make_tiny

from swarmnode.catalog.adapter_import import import_adapter
from swarmnode.catalog.importing import import_model
from swarmnode.catalog.planning import stage_files
from swarmnode.compute.loader import load_stage
from swarmnode.compute.lora import LoraLinear
from swarmnode.compute.spec import StageSpec
from swarmnode.compute.tiled_projections import packed
from swarmnode.errors import LoadRefused

if TYPE_CHECKING:
    from pathlib import Path

    from stage_chains import Parity

    from swarmnode.catalog.manifest import Manifest

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")
"""PEFT and what it imports warn of all they did not find."""
LAYERS = 3
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "patterns": {
        "target_modules": "all-linear",
        "use_rslora": True,
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 8},
        "alpha_pattern": {"o_proj": 3},
    },
    "dora": {"target_modules": ["k_proj", "o_proj", "gate_proj"], "use_dora": True},
}


@dataclass(frozen=True)
class Tuned:
    """A base and an adapter on disk, and the two imported as one servable."""

    base: Path
    adapter: Path
    root: Path
    manifest: Manifest
    dora: bool

    def engines(self, stages: int, quantization: str = "none", dtype: str = "float32", device: str = "auto") -> Chain:
        folder, engines = self.root / self.manifest.id, []
        for stage, (begin, end) in enumerate(pairwise(even_cuts(LAYERS, stages))):
            files = stage_files(self.manifest, begin, end, stages, stage)
            paths = tuple(folder / file.path for file in files if file.path.endswith(".safetensors"))
            ends = (begin == 0, end == LAYERS)
            spec = StageSpec(folder, paths, begin, end, LAYERS, *ends, quantization=quantization, dtype=dtype)
            engines.append(load_stage(replace(spec, device=device)))
        return Chain(engines)

    def peft(self, **how: Any) -> Any:
        """PEFT's model of the two."""
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        auto: Any = AutoModelForCausalLM
        model = auto.from_pretrained(self.base, attn_implementation="sdpa", **{"dtype": torch.float32} | how)
        return PeftModel.from_pretrained(model, self.adapter).eval()


def make_adapter(base: Path, target: Path, **settings: Any) -> Path:
    """A random adapter large enough that tokens change with it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    make: Any = LoraConfig
    config = make(r=4, lora_alpha=8, task_type="CAUSAL_LM", **settings)
    with torch.random.fork_rng(devices=[]):  # PEFT draws lora_A from the global generator
        torch.manual_seed(3)
        model: Any = get_peft_model(auto.from_pretrained(base, dtype=torch.float32), config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
            elif "magnitude" in name:
                parameter.mul_(1 + 0.2 * torch.rand(parameter.shape, generator=generator))
    model.save_pretrained(target)
    return target


def tune(root: Path, kind: str, family: str = "llama", dtype: str = "float32") -> Tuned:
    base = make_tiny(root / "base", family, 1, num_layers=LAYERS, dtype=dtype)
    adapter = make_adapter(base, root / "adapter", **KINDS[kind])
    import_model(str(base), root / "models", stages=2)
    manifest = import_adapter(str(adapter), "base", root / "models", model_id="tuned")
    return Tuned(base, adapter, root / "models", manifest, kind == "dora")


@pytest.fixture(scope="module", params=sorted(KINDS))
def tuned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    torch.set_num_threads(1)
    return tune(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    torch.set_num_threads(1)
    return tune(tmp_path_factory.mktemp("plain"), "plain")


def test_q3_merged_into_full_precision_it_is_pefts_model(tuned: Tuned, parity: Parity) -> None:
    reference = tuned.peft()
    prompts = [prompt_of(40), prompt_of(9, 1)]
    expected = [generate(reference, prompt, 10) for prompt in prompts]
    for stages in (1, 2, 3):
        chain = tuned.engines(stages)
        for session, prompt in enumerate(prompts):
            parity.check(chain.reply(session, prompt, 10, 32), expected[session])
    with torch.no_grad():
        theirs = reference(torch.tensor([prompt_of(30)])).logits[:, -1]
        bare = reference.unload()(torch.tensor([prompt_of(30)])).logits[:, -1]
    ours = logits_of(tuned.engines(1))
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()
    assert (bare - theirs).abs().max() > 0.2 * theirs.abs().max(), "the adapter would not be missed"


@pytest.mark.parametrize("mode", ["lean", "lean16", "peft"])
@pytest.mark.parametrize("method", ["nf4", "bnb-int8"])
def test_q3_kept_beside_bitsandbytes_weights_it_is_pefts_model(
    mode: str, method: str, tuned: Tuned, parity: Parity, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import BitsAndBytesConfig

    monkeypatch.setenv("SWARM_SERVE_LORA", mode)
    if method == "bnb-int8" and tuned.dora:
        pytest.skip("PEFT itself fails there; see test_q3_eight_bits_of_dora_are_those_of_the_merged_weights")
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    make: Any = BitsAndBytesConfig
    config = make(**four) if method == "nf4" else make(load_in_8bit=True)
    reference = tuned.peft(quantization_config=config, device_map="cpu")
    prompt = prompt_of(30)
    expected = generate(reference, prompt, 8)
    for stages in (1, 3):
        parity.check(tuned.engines(stages, method).reply(0, prompt, 8, 32), expected)


def test_q3_the_lean_ways_use_no_module_of_peft(plain: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {}
    for mode in ("lean", "peft"):
        monkeypatch.setenv("SWARM_SERVE_LORA", mode)
        model: Any = plain.engines(1, "nf4").engines[0].model  # type: ignore[attr-defined]
        kinds[mode] = {type(module).__module__.split(".")[0] for module in model.outer.modules()}
        assert any(isinstance(module, LoraLinear) for module in model.outer.modules()) == (mode == "lean")
    assert "peft" in kinds["peft"] - kinds["lean"]


@pytest.mark.parametrize(("mode", "dtype"), [("lean", torch.float32), ("lean16", torch.bfloat16)])
def test_q3_lean_keeps_its_matrices_in_float32_and_lean16_in_the_serving_dtype(
    mode: str, dtype: torch.dtype, plain: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARM_SERVE_LORA", mode)
    model: Any = plain.engines(1, "nf4", "bfloat16").engines[0].model  # type: ignore[attr-defined]
    kept = [module._low for module in model.outer.modules() if isinstance(module, LoraLinear)]
    assert len(kept) == 3 * LAYERS
    assert {low.a.dtype for low in kept} == {low.b.dtype for low in kept} == {dtype}


def with_eight_bits(base: Path, target: Path) -> Path:
    """A base in full precision whose matrices say what they say once they are packed."""
    shutil.copytree(base, target)
    tensors = load_file(base / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith("proj.weight") or name == "lm_head.weight":
            tensors[name] = packed("int8", weight, None).unpack(0, weight.shape[0]).contiguous()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("mode", ["lean", "lean16"])
@pytest.mark.parametrize("kind", ["plain", "patterns"])
def test_q3_beside_packed_eight_bits_it_is_pefts_model_over_what_those_say(
    mode: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left is that the kernel takes its rows in bfloat16."""
    monkeypatch.setenv("SWARM_SERVE_LORA", mode)
    tuned = tune(tmp_path, kind)
    reference = replace(tuned, base=with_eight_bits(tuned.base, tmp_path / "rounded")).peft()
    with torch.no_grad():
        expected = reference(torch.tensor([prompt_of(30)])).logits[:, -1]
        bare = reference.unload()(torch.tensor([prompt_of(30)])).logits[:, -1]
    found = logits_of(tuned.engines(1, "int8"))
    assert float((found - expected).norm() / expected.norm()) < 0.02
    assert float((bare - expected).norm() / expected.norm()) > 0.2, "the adapter would not be missed"
    prompt = prompt_of(25)
    assert tuned.engines(3, "int8").reply(0, prompt, 6, 32) == tuned.engines(1, "int8").reply(0, prompt, 6, 32)


def merged(tuned: Tuned, root: Path) -> Tuned:
    """PEFT's own merge, saved and imported as a model of its own."""
    tuned.peft().merge_and_unload().save_pretrained(root / "merged")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (root / "merged" / name).write_bytes((tuned.base / name).read_bytes())
    manifest = import_model(str(root / "merged"), root / "models", stages=2)
    return replace(tuned, root=root / "models", manifest=manifest)


@pytest.mark.parametrize("method", ["int8", "bnb-int8"])
def test_q3_eight_bits_of_dora_are_those_of_the_merged_weights(method: str, tmp_path: Path) -> None:
    """PEFT cannot show it over bitsandbytes."""
    tuned = tune(tmp_path, "dora")
    expected, found = (logits_of(each.engines(1, method)) for each in (merged(tuned, tmp_path / "whole"), tuned))
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()


def test_q3_peft_has_no_modules_over_packed_weights(plain: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_SERVE_LORA", "peft")
    with pytest.raises(LoadRefused, match="SWARM_SERVE_LORA=peft: PEFT runs over nf4 and bnb-int8 weights, not int8"):
        plain.engines(1, "int8")
    assert len(plain.engines(1, "int4-fast").reply(0, prompt_of(9), 2, 32)) == 2, "merged, whatever the mode"


@pytest.mark.parametrize("card", [False, True], ids=["cpu", "card"])
def test_q3_four_packed_bits_are_those_of_the_merged_weights(
    card: bool, plain: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Q2: on a card, too, whose kernels take no adapter."""
    if card:
        load_as_on_a_card(monkeypatch)
    whole = merged(plain, tmp_path)
    with emulated_card(monkeypatch):
        expected, found = logits_of(whole.engines(1, "int4-fast")), logits_of(plain.engines(1, "int4-fast"))
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()


def test_a_peer_without_peft_says_so(plain: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else found(name))
    monkeypatch.setenv("SWARM_SERVE_LORA", "peft")
    with pytest.raises(LoadRefused, match="peft is not installed"):
        plain.engines(1, "nf4")


def test_an_unknown_way_is_refused(plain: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_SERVE_LORA", "fast")
    with pytest.raises(LoadRefused, match="'fast'; allowed are lean, lean16, peft"):
        plain.engines(1)
