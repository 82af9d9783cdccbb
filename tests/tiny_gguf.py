"""Write a tiny Qwen2 checkpoint as a GGUF file, the way llama.cpp's converter lays it out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.layers": "blk",
}
_NORMAL, _CONTROL = 1, 3
"""llama.cpp's token types."""


def write_gguf(source: Path, target: Path, kind_of: Callable[[str], str | None] = lambda name: None) -> None:
    """`source` is a Qwen2 of `make_tiny`; `kind_of` names the type ("Q4_0") to quantize a tensor to."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants
    from safetensors.numpy import load_file

    config = json.loads((source / "config.json").read_text())
    writer = GGUFWriter(target, "qwen2")
    writer.add_name("tiny")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    _add_tokenizer(writer, source)
    for name, tensor in load_file(source / "model.safetensors").items():
        kind = kind_of(name)
        if kind is None:
            writer.add_tensor(_gguf_name(name), tensor)
        else:
            quantized = GGMLQuantizationType[kind]
            writer.add_tensor(_gguf_name(name), quants.quantize(tensor, quantized), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return name


def _add_tokenizer(writer: Any, source: Path) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    control = {token["content"] for token in tokenizer["added_tokens"]}
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL if token in control else _NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(0)  # as many files do, with <|im_end|> only in the template
    writer.add_pad_token_id(0)
    settings = json.loads((source / "tokenizer_config.json").read_text())
    writer.add_chat_template(settings["chat_template"])
