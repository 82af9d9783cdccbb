"""One layer of a model of a usual width with random weights: what its new tokens behind a past take beside themselves.

`benchmarks.prefix --hidden 2048` runs it. Weights that are random cost what real ones cost; one layer says what the
others say, and text, links and the head of the model, which are the same in both times, are left out.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.stage_times import Bench

LAYER, LAYERS = 1, 3
"""A layer in the middle has neither embedding nor head."""
HEAD_DIM = 64
HEADS_A_KV_HEAD = 4
WIDTH_STEP = HEAD_DIM * HEADS_A_KV_HEAD
MLP_TIMES = 4


def measure_layer(hidden: int, past: int, new: int, runs: int, dtype: str, threads: int) -> dict[str, Any]:
    """Milliseconds of `new` positions behind `past` and with none, and by arithmetic what the past adds."""
    import torch

    from swarmnode.compute.loader import load_stage
    from swarmnode.compute.spec import StageSpec

    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = (_write(folder, hidden),)
        spec = StageSpec(folder, files, LAYER, LAYER + 1, LAYERS, False, False, dtype, "cpu", threads)
        bench = Bench(load_stage(spec), is_first=False)
        second = [ms for _ in range(runs) for ms in bench.pieces([new], past)]
        alone = [ms for _ in range(runs) for ms in bench.pieces([new], 0)]
    return {
        "hidden": hidden,
        "cached_tokens": past,
        "new_tokens": new,
        "second_ms": round(statistics.median(second), 2),
        "alone_ms": round(statistics.median(alone), 2),
        "ratio": round(statistics.median(second) / statistics.median(alone), 3),
        "arithmetic": round(1 + past_share(hidden, past), 3),
    }


def layer_shapes(hidden: int) -> dict[str, tuple[int, int]]:
    """Matrices of the layer, (out, in)."""
    kv, mlp = hidden // HEADS_A_KV_HEAD, MLP_TIMES * hidden
    attention = {"q_proj": (hidden, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, hidden)}
    mlps = {"gate_proj": (mlp, hidden), "up_proj": (mlp, hidden), "down_proj": (hidden, mlp)}
    return {f"self_attn.{n}": shape for n, shape in attention.items()} | {f"mlp.{n}": s for n, s in mlps.items()}


def past_share(hidden: int, past: int) -> float:
    """Multiplications of one position with `past` keys and values, over those with the layer's weights."""
    return 2 * past * hidden / sum(out * width for out, width in layer_shapes(hidden).values())


def _write(folder: Path, hidden: int) -> Path:
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=MLP_TIMES * hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=hidden // HEAD_DIM,
        num_key_value_heads=hidden // HEAD_DIM // HEADS_A_KV_HEAD,
        max_position_embeddings=8192,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder / "tokenizer")
    noise = torch.Generator().manual_seed(0)
    weights = {
        f"model.layers.{LAYER}.{name}.weight": torch.randn(shape, generator=noise) * 0.02
        for name, shape in layer_shapes(hidden).items()
    }
    for norm in ("input_layernorm", "post_attention_layernorm"):
        weights[f"model.layers.{LAYER}.{norm}.weight"] = torch.ones(hidden)
    file = folder / "layer.safetensors"
    save_file(weights, str(file))
    return file
