"""Decide from config.json alone, without torch, whether this release can serve a model in stages.

The rule is about what a config says a model does, not about names: what is refused here would be computed wrongly by
stages (state other than KV, attention whose positions depend on the whole batch, parts outside the list of layers).
`compute/loader.py` checks the built model again (its parts, one KV entry per layer and position) before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swarmnode.catalog.layer_kinds import LINEAR_ATTENTION, recurrent_layers
from swarmnode.compute.spec import BNB_METHODS, PACKED_METHODS
from swarmnode.errors import LoadRefused

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

SCRIPTED = "Scripted"
"""Architecture name of servables that `compute/scripted.py` replays."""
PARITY_TESTED = (
    "cohere2",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "granite",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "smollm3",
)
"""model_types whose tokens the tests compare with transformers' own; others run if nothing below refuses them."""

_LAYER_TYPES = ("full_attention", "sliding_attention", LINEAR_ATTENTION)
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_REFUSED_KEYS: Mapping[str, str] = {
    "kv_lora_rank": "multi-head latent attention",
    "q_lora_rank": "multi-head latent attention",
    "state_size": "recurrent state",
    "ssm_state_size": "recurrent state",
    "ssm_cfg": "recurrent state",
    "mamba_d_state": "recurrent state",
    "conv_L_cache": "recurrent state",
    "attn_layer_period": "layers without attention",
    "lru_width": "recurrent state",
    "hidden_size_per_layer_input": "per-layer embeddings",
    "num_kv_shared_layers": "layers that share a KV cache",
    "attention_chunk_size": "chunked attention",
    "altup_num_inputs": "alternating updates",
    "quantization_config": "weights stored quantized",
    "cross_attention_layers": "cross attention",
    "vision_config": "images",
    "audio_config": "audio",
    "text_config": "a model inside a model (multimodal)",
}
_LLAMA_PARTS = (
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    *("input_layernorm", "post_attention_layernorm"),
)
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_REFUSED_FLAGS: Mapping[str, str] = {
    "is_encoder_decoder": "an encoder",
    "use_bidirectional_attention": "attention to later positions",
    "alibi": "ALiBi positions",
    "position_embedding_type": "positions other than rotary",
}


def check_supported(config: Mapping[str, Any]) -> None:
    """Raise LoadRefused, naming the architecture and the reason, if stages cannot serve this config."""
    name = architecture_name(config)
    if name == SCRIPTED:
        return
    reason = next(_reasons(config, name), None)
    if reason is not None:
        raise LoadRefused(
            f"architecture {name!r} cannot be served: {reason}; "
            f"served are decoder-only models, tested: {', '.join(PARITY_TESTED)}"
        )


def quantization_obstacles(config: Mapping[str, Any], tensors: Collection[str]) -> dict[str, str]:
    """By method, why it cannot quantize the blocks of this config, whose checkpoint has `tensors`, if those are known.
    What neither says (what a block does with its parts) is found at the load."""
    experts = next((key for key in _EXPERT_COUNTS if config.get(key)), None)
    missing = [part for part in _LLAMA_PARTS if tensors and not any(f".{part}." in name for name in tensors)]
    other = f"it has experts ({experts})" if experts is not None else ""
    other = other or ("it has layers of linear attention" if recurrent_layers(config) else "")
    other = other or (f"it has no {missing[0]}" if missing else "")
    scaled = config.get("residual_multiplier") not in (None, 1.0)
    other = other or ("it scales what its blocks add (residual_multiplier)" if scaled else "")
    found = {method: f"the packed kernels need Llama-shaped blocks, and {other}" for method in PACKED_METHODS if other}
    if experts is not None:
        linear = f"bitsandbytes quantizes linear layers alone, and its experts ({experts}) are none"
        found |= dict.fromkeys(BNB_METHODS, linear)
    return found


def architecture_name(config: Mapping[str, Any]) -> str:
    """The class name in the config, or its model_type where no class is given."""
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    return str(config.get("model_type", "unknown"))


def _reasons(config: Mapping[str, Any], name: str) -> Iterator[str]:
    if not isinstance(config.get("model_type"), str):
        yield "config.json has no model_type"
    if not name.endswith("ForCausalLM"):
        yield "it is not a …ForCausalLM model"
    if "auto_map" in config:
        yield "it needs code from its repository (auto_map), which is never run"
    for key, what in ({**_REFUSED_KEYS, **_REFUSED_FLAGS}).items():
        if config.get(key) and config[key] != "rotary":
            yield f"it has {what} ({key})"
    yield from _layer_type_reasons(config.get("layer_types"))
    yield from _rope_reasons(config)


def _layer_type_reasons(kinds: object) -> Iterator[str]:
    if kinds is None:
        return
    if not isinstance(kinds, list):
        yield "layer_types is not a list"
        return
    for kind in kinds:
        if kind not in _LAYER_TYPES:
            yield f"it has layers of type {kind!r}"


def _rope_reasons(config: Mapping[str, Any]) -> Iterator[str]:
    # Types such as "dynamic" and "longrope" change earlier positions once a sequence grows: a KV cache, pieces of a
    # prompt and sessions in one batch would each see another rotation than the whole prompt alone.
    for source in (config.get("rope_parameters"), config.get("rope_scaling")):
        if not isinstance(source, dict):
            continue
        nested = [value for value in source.values() if isinstance(value, dict)]
        for parameters in nested or [source]:
            kind = parameters.get("rope_type", parameters.get("type", "default"))
            if kind not in _ROPE_TYPES:
                yield f"its rotary positions are of type {kind!r}, which depend on the length of the whole batch"
