"""Make tiny random checkpoints in the Hugging Face layout: real configs, real weights files, a real tokenizer.

For tests only. Importing this module does not import torch; calling `make_tiny` does.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3")
PAD, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VOCAB_SIZE = 384
"""256 bytes, three special tokens and some merges, so that words and single bytes both occur."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_CORPUS = (
    "The quick brown fox jumps over the lazy dog. Hello, how are you today? I am fine, thank you.",
    "system user assistant: what is the capital of France? The capital of France is Paris.",
    "One machine holds the first layers, another the last, and the tokens go round the ring.",
)


def make_tokenizer(path: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json of a byte-level BPE with a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, IM_START, IM_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS * 4, trainer)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": IM_END,
        "pad_token": PAD,
        "additional_special_tokens": [IM_START, IM_END],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def make_tiny(
    path: Path,
    family: str = "llama",
    seed: int = 0,
    *,
    num_layers: int = 4,
    tied: bool = False,
    dtype: str = "float32",
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of `family` into `path` (a new folder) and return it.

    Same arguments, same bytes. `max_shard_size` as in `save_pretrained` ("50KB" gives a sharded checkpoint with an
    index). `overrides` are set on the config. The hidden size is 64, 4 heads of 16 over 2 KV heads.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    make_tokenizer(path)
    config = AutoConfig.for_model(_MODEL_TYPES[family], **_settings(family, num_layers, tied) | overrides)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _randomize(model)
    model.to(getattr(torch, dtype)).save_pretrained(path, max_shard_size=max_shard_size)
    return path


def write_random(path: Path, model_type: str, num_layers: int, **settings: Any) -> Path:
    """Weights and config alone, in float32, of any family that transformers knows; `settings` are its config's own."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": num_layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
    tokens = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False}
    auto: Any = AutoModelForCausalLM
    config: Any = AutoConfig.for_model(model_type, **(shape | heads | tokens | settings))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = auto.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            spread = 0.1 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
            parameter.add_(torch.randn_like(parameter) * spread)
    model.save_pretrained(path)
    return path


def tiny_copy(source: Path, target: Path) -> Path:
    """A copy of a checkpoint that a test may spoil."""
    shutil.copytree(source, target)
    return target


_MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "mistral": "mistral",
    "gemma3": "gemma3_text",
}


def _settings(family: str, num_layers: int, tied: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    if family == "gemma3":
        # A window shorter than the prompts of the tests, and both kinds of layers whatever their count.
        kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)]
        settings |= {"sliding_window": 32, "layer_types": kinds, "query_pre_attn_scalar": 16}
    if family == "mistral":
        settings |= {"sliding_window": None}
    if family == "qwen2":
        del settings["head_dim"]
    return settings


def _randomize(model: Any) -> None:
    """Weights large enough that every layer matters and greedy tokens vary; the library's own init gives near ties."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                # Small beside what the layers add; else a tied head answers every token with itself.
                parameter.copy_(torch.randn_like(parameter) * 0.03)
            elif parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
