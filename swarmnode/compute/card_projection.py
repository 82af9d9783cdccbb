"""A lean block's matrix in four bits on a card: quantized and packed by torchao, multiplied by torch's own kernel.

Groups of 32 weights share a scale and a zero, as in the CPU's packed kernel: a ring of cards and CPUs rounds alike. The
kernel takes bfloat16 rows whose length is a multiple of 1,024; torchao pads the weight, and the rows are padded here.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import pad

from swarmnode.cluster.quantization import CARD_INPUTS
from swarmnode.compute.projections import GROUP, QUANTIZED_ROWS, DenseProjection

if TYPE_CHECKING:
    from swarmnode.compute.projections import Projection


def on_card(weight: torch.Tensor, bias: torch.Tensor | None) -> Projection:
    """`weight` in four bits; one whose rows are no whole groups stays dense."""
    if weight.shape[1] % GROUP:
        return DenseProjection(weight, bias)
    return CardInt4Projection(weight, bias)


class CardInt4Projection:
    """x (…, in) → (…, out); `weight` is (out, in) on the card, `in` a multiple of GROUP."""

    __slots__ = ("_bias", "_missing", "_out", "_scales_zeros", "_tiles")
    kernels = "torchao"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._out, inputs = weight.shape
        self._missing = -inputs % CARD_INPUTS
        # A chunk is whole tiles of 8 rows; torchao holds some 16 bytes beside each weight that it quantizes.
        parts = [_quantized(chunk) for chunk in torch.split(weight, QUANTIZED_ROWS)]
        self._tiles = torch.cat([tiles for tiles, _ in parts])
        self._scales_zeros = torch.cat([scales_zeros for _, scales_zeros in parts], 1)
        self._bias = bias.clone() if bias is not None else None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        flat = rows.reshape(-1, rows.shape[-1]).to(torch.bfloat16)
        if self._missing:
            flat = pad(flat, (0, self._missing))
        out = torch._weight_int4pack_mm(flat, self._tiles, GROUP, self._scales_zeros)[:, : self._out].to(rows.dtype)
        if self._bias is not None:
            out = out + self._bias
        return out.reshape(*rows.shape[:-1], self._out)

    def size_bytes(self) -> int:
        return self._tiles.nbytes + self._scales_zeros.nbytes


def _quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a weight as tiles (rows / 8, …) and bfloat16 scales and zeros (in / GROUP, rows, 2), both padded."""
    config, quantize = _torchao()
    holder = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    holder.weight = nn.Parameter(weight.to(torch.bfloat16), requires_grad=False)
    quantize(holder, config)
    packed: Any = holder.weight
    return packed.qdata, packed.scale_and_zero


@functools.cache
def _torchao() -> tuple[Any, Any]:
    from torchao.quantization import Int4WeightOnlyConfig, quantize_

    make: Any = Int4WeightOnlyConfig
    config = make(group_size=GROUP, int4_packing_format="tile_packed_to_4d", set_inductor_config=False)
    return config, quantize_
