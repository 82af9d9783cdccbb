from __future__ import annotations

import re
from typing import Any

import pytest

from swarmnode.compute.spec import StageSpec, serving_dtype
from swarmnode.compute.supported import SCRIPTED, check_supported, quantization_obstacles
from swarmnode.errors import LoadRefused

LLAMA: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "kv_lora_rank": None}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["T5ForConditionalGeneration"]}, "not a …ForCausalLM"),
    ({"architectures": None, "model_type": "vit"}, "'vit' cannot be served"),
    ({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}, "latent attention"),
    ({"architectures": ["MambaForCausalLM"], "state_size": 16}, "recurrent state"),
    ({"architectures": ["Lfm2ForCausalLM"], "layer_types": ["conv", "full_attention"]}, "layers of type 'conv'"),
    ({"layer_types": "full_attention"}, "not a list"),
    ({"auto_map": {"AutoModelForCausalLM": "modeling.X"}}, "auto_map"),
    ({"is_encoder_decoder": True}, "an encoder"),
    ({"use_bidirectional_attention": True}, "later positions"),
    ({"vision_config": {"a": 1}}, "images"),
    ({"quantization_config": {"bits": 4}}, "quantized"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ({"rope_parameters": {"rope_type": "longrope"}}, "'longrope'"),
    ({"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "'dynamic'"),
    ({"model_type": 5}, "no model_type"),
]
ACCEPTED: list[dict[str, Any]] = [
    {},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}},
    {"layer_types": ["sliding_attention", "full_attention"]},
    {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 16},
    {"num_local_experts": 8},
    {"use_bidirectional_attention": False, "rope_scaling": None},
    {"architectures": [SCRIPTED], "model_type": "scripted"},
]


@pytest.mark.parametrize(("change", "reason"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(LoadRefused, match=reason):
        check_supported(LLAMA | change)


@pytest.mark.parametrize("change", ACCEPTED, ids=str)
def test_accepted(change: dict[str, Any]) -> None:
    check_supported(LLAMA | change)


TENSORS = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"] + [
    f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")
]
TENSORS += [f"model.layers.0.{norm}.weight" for norm in ("input_layernorm", "post_attention_layernorm")]
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 16}


@pytest.mark.parametrize(
    ("change", "method", "reason"),
    [
        ({"num_experts": 8}, "nf4", r"its experts \(num_experts\) are none"),
        ({"num_local_experts": 8}, "bnb-int8", "linear layers alone"),
        ({"n_routed_experts": 8}, "int8", "it has experts"),
        (HYBRID, "int4-fast", "layers of linear attention"),
        ({"residual_multiplier": 0.5}, "int8", "it scales what its blocks add"),
    ],
)
def test_a_quantization_that_its_blocks_do_not_take(change: dict[str, Any], method: str, reason: str) -> None:
    assert re.search(reason, quantization_obstacles(LLAMA | change, TENSORS)[method])
    assert "none" not in quantization_obstacles(LLAMA | change, TENSORS)
    assert quantization_obstacles(LLAMA, TENSORS) == quantization_obstacles(LLAMA, []) == {}


def test_linear_attention_is_quantized_by_bitsandbytes() -> None:
    assert "nf4" not in quantization_obstacles(LLAMA | HYBRID, TENSORS)


def test_fused_projections_are_seen_in_the_checkpoints_names() -> None:
    fused = [name for name in TENSORS if "q_proj" not in name] + ["model.layers.0.self_attn.qkv_proj.weight"]
    found = quantization_obstacles(LLAMA, fused)
    assert set(found) == {"int8", "int4-fast"}
    assert all("it has no self_attn.q_proj" in why for why in found.values())


@pytest.mark.parametrize("norm", ["input_layernorm", "post_attention_layernorm"])
def test_norms_elsewhere_are_seen_in_the_checkpoints_names(norm: str) -> None:
    """OLMo 2 has none before its blocks' parts, Cohere 2 one for both."""
    found = quantization_obstacles(LLAMA, [name for name in TENSORS if f".{norm}." not in name])
    assert set(found) == {"int8", "int4-fast"}
    assert all(f"it has no {norm}" in why for why in found.values())


@pytest.mark.parametrize(
    ("asked", "stored", "expected"),
    [
        ("auto", "F32", "float32"),
        ("auto", "BF16", "bfloat16"),
        ("auto", "F16", "bfloat16"),
        ("auto", "float32", "float32"),
        ("auto", "bfloat16", "bfloat16"),
        ("auto", "float16", "bfloat16"),
        ("float32", "BF16", "float32"),
        ("bfloat16", "F32", "bfloat16"),
    ],
)
def test_serving_dtype(asked: str, stored: str, expected: str) -> None:
    assert serving_dtype(asked, stored) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"first_layer": 2, "end_layer": 2},
        {"end_layer": 5},
        {"is_first": False},
        {"is_last": True},
        {"dtype": "float64"},
    ],
    ids=str,
)
def test_a_spec_that_makes_no_sense_is_refused(changes: dict[str, Any], tmp_path: Any) -> None:
    fine: dict[str, Any] = {"first_layer": 0, "end_layer": 2, "num_layers": 4, "is_first": True, "is_last": False}
    StageSpec(tmp_path, (), **fine)
    with pytest.raises(LoadRefused):
        StageSpec(tmp_path, (), **fine | changes)
