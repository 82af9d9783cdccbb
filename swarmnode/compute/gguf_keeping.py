"""Which matrices of a GGUF file are kept in their blocks, and the file that holds them.

Those of Llama-shaped layers, which alone are packed to four bits, in a type that the packed kernel takes, and whose
blocks were seen to give the imported weight bit for bit. So it does not matter here what else a converter may do to a
matrix on its way: what it changed is not kept, and is quantized at load as any other weight.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from swarmnode.catalog.kept_blocks import BLOCK_BYTES, BLOCKS_DTYPE, blocks_name, blocks_shape
from swarmnode.catalog.safetensors_header import encode_header
from swarmnode.compute.gguf_blocks import Q4Blocks

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_MATRICES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(rf"blk\.(\d{{1,5}})\.({'|'.join(_MATRICES)})\.weight")


@dataclass(frozen=True, slots=True)
class _Kept:
    """A matrix whose blocks are kept; `heads` if its rows are interleaved in pairs in each of so many heads."""

    name: str
    kind: str
    tensor: Any
    heads: int | None


def write_blocks(gguf: Path, model: Any, target: Path) -> None:
    """Write what is kept of `gguf` to the safetensors file `target`; no file where nothing is. `model` is what was
    made of it."""
    from gguf import GGUFReader

    weights, config = model.state_dict(), model.config
    heads = {
        "attn_q": getattr(config, "num_attention_heads", None),
        "attn_k": getattr(config, "num_key_value_heads", None),
    }
    kept = [found for tensor in GGUFReader(gguf).tensors if (found := _kept(tensor, weights, heads)) is not None]
    if not kept:
        return
    with target.open("wb") as file:
        file.write(encode_header((blocks_name(k.name, k.kind), BLOCKS_DTYPE, k.tensor.data.shape) for k in kept))
        for matrix in kept:
            file.write(_blocks(matrix.tensor, matrix.heads).numpy().data)


def _kept(tensor: Any, weights: Mapping[str, torch.Tensor], heads: Mapping[str, Any]) -> _Kept | None:
    match, kind = _NAME.fullmatch(tensor.name), tensor.tensor_type.name.lower()
    name = f"model.layers.{match[1]}.{_MATRICES[match[2]]}.weight" if match is not None else ""
    if match is None or name not in weights or kind not in BLOCK_BYTES:
        return None
    weight = weights[name]
    if tuple(tensor.data.shape) != blocks_shape(tuple(weight.shape), kind):
        return None
    pairs = heads.get(match[2])
    for order in (None, pairs) if isinstance(pairs, int) and weight.shape[0] % (2 * pairs) == 0 else (None,):
        if torch.equal(Q4Blocks(_blocks(tensor, order), kind).dequantized(weight.dtype), weight):
            return _Kept(name, kind, tensor, order)
    return None


def _blocks(tensor: Any, heads: int | None) -> torch.Tensor:
    """The blocks of a matrix, uint8 (rows, bytes of a row), in the order of the model's rows.

    llama.cpp turns neighbouring values of a head where transformers turns those half a head apart, and its converter
    orders the rows of queries and keys of some families (Llama) for that.
    """
    raw = torch.from_numpy(np.array(tensor.data))
    if heads is None:
        return raw
    return raw.view(heads, -1, 2, raw.shape[1]).transpose(1, 2).reshape(raw.shape)
