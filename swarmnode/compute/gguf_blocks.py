"""Four-bit blocks of a GGUF file as the packed kernel takes them: its codes are theirs, nothing is quantized anew.

A block of 32 weights is code * scale + low, the kernel's group (code - 8) * scale + zero. Scale and zero are stored in
bfloat16, and that is the only rounding: a weight is off by at most 2^-8 of |8 scale| + |low + 8 scale|.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swarmnode.catalog.kept_blocks import (
    BLOCK_BYTES,
    BLOCK_WEIGHTS,
    BLOCKS_DTYPE,
    blocks_shape,
    weight_and_kind,
)
from swarmnode.errors import LoadFailed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from swarmnode.compute.stored_tensors import Stored

_CODE_BYTES = BLOCK_WEIGHTS // 2
_CENTRE = 8
"""The kernel's code that stands for its zero; also where q4_0 has the weight zero."""
_DEQUANTIZED_ELEMENTS = 1 << 20
"""4 MiB of float32 at a time."""


class Q4Blocks:
    """The blocks of one (rows, inputs) matrix, uint8 (rows, bytes of a row); `kind` is one of BLOCK_BYTES."""

    def __init__(self, raw: torch.Tensor, kind: str) -> None:
        self.rows = raw.shape[0]
        self.inputs = raw.shape[1] // BLOCK_BYTES[kind] * BLOCK_WEIGHTS
        self._raw, self._kind = raw, kind

    def encode(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows begin … end-1 as int32 codes (rows, in) and bfloat16 scales and zeros (in / 32, rows, 2)."""
        codes, scales, lows = self._parts(begin, end)
        zeros = lows + scales * _CENTRE
        pairs = torch.stack((scales, zeros), -1).to(torch.bfloat16)
        return codes.to(torch.int32).view(end - begin, self.inputs), pairs.transpose(0, 1).contiguous()

    def dequantized(self, dtype: torch.dtype, room: torch.Tensor | None = None) -> torch.Tensor:
        """The weights (rows, inputs) as float32 gives them, rounded to `dtype`; in `room` if given."""
        whole = torch.empty((self.rows, self.inputs), dtype=dtype) if room is None else room
        step = max(1, _DEQUANTIZED_ELEMENTS // self.inputs)
        for begin in range(0, self.rows, step):
            end = min(begin + step, self.rows)
            codes, scales, lows = self._parts(begin, end)
            weights = codes.float().mul_(scales[..., None]).add_(lows[..., None])
            whole[begin:end] = weights.view(end - begin, self.inputs)
        return whole

    def _parts(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes (rows, groups, 32) in uint8, scales and lows (rows, groups) in float32."""
        blocks = self._raw[begin:end].view(end - begin, -1, BLOCK_BYTES[self._kind])
        pairs = blocks[..., -_CODE_BYTES:]
        halves = blocks[..., :-_CODE_BYTES].contiguous().view(torch.float16).float()
        scales = halves[..., 0]
        lows = halves[..., 1] if self._kind == "q4_1" else scales * -_CENTRE
        return torch.cat((pairs & 15, pairs >> 4), -1), scales, lows


def find_blocks(stored: Mapping[str, Stored]) -> dict[str, tuple[Stored, str]]:
    """By weight, the tensor with its blocks and their type."""
    found = {}
    for name, tensor in stored.items():
        if (parsed := weight_and_kind(name)) is not None:
            found[parsed[0]] = tensor, parsed[1]
    return found


def check_blocks(tensor: Stored, kind: str, shape: tuple[int, ...]) -> None:
    """Raise LoadFailed unless these are the blocks of a weight of this shape."""
    expected = blocks_shape(shape, kind)
    if tensor.entry.dtype != BLOCKS_DTYPE or tensor.entry.shape != expected:
        raise LoadFailed(
            f"tensor {tensor.name!r} is {tensor.entry.dtype} {list(tensor.entry.shape)}, which are no {kind} blocks of "
            f"a {list(shape)} weight; import the model again"
        )
