"""Packed weights for the kernels that are compiled at load, and the choice between those and torch's.

Codes, scales and zeros are the same as for torch's kernels; only how they lie differs, and how rows are rounded:
`integer_code.py` says both. Which kernel is faster for one row is measured at load.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from swarmnode.compute.cpu_kernels import MAX_INPUTS, PADDED, TILE, CpuKernels, cpu_kernels
from swarmnode.compute.projections import (
    GROUP,
    MEASURED_ELEMENTS,
    QUANTIZED_ROWS,
    Int4Projection,
    Int8Projection,
    PackedProjection,
    encode,
    quantize_int8,
    takes_int4,
    timed,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarmnode.compute.projections import Matrix, Placed

_SCALE_BYTES = 2 * TILE
_CODE_BYTES = GROUP // 2
_TRIED_ELEMENTS = 1 << 21
"""Of a weight, to see which kernel is faster: more than a core's own cache holds."""
_TRIES = 5

_log = logging.getLogger("swarmnode.compute.kernels")


class TiledProjection(PackedProjection):
    """Weights in tiles, and what lies beside them: scales of eight bits, zeros of four."""

    __slots__ = ("_beside", "_product", "_weight")
    kernels = "fastcpu"
    kind = ""

    def __init__(
        self,
        shape: torch.Size,
        bias: torch.Tensor | None,
        kernels: CpuKernels,
        weight: torch.Tensor,
        beside: torch.Tensor,
    ) -> None:
        self._weight, self._beside = weight, beside
        self._product = kernels.product(self.kind, weight, beside)
        super().__init__(shape, bias)

    @property
    def inputs(self) -> int:
        return self._weight.shape[1] * GROUP

    @property
    def dtype(self) -> torch.dtype:
        """Of rows."""
        return self._product.dtype

    @property
    def outputs(self) -> int:
        return self._out

    def slots(self) -> dict[str, int]:
        """What the compiled block is told of this matrix; raises ValueError for a bias that it would misread."""
        return self._product.slots(self._bias)

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        return self._product(rows)

    def size_bytes(self) -> int:
        return self._weight.nbytes + self._beside.nbytes


class TiledInt8Projection(TiledProjection):
    """As Int8Projection, in tiles."""

    __slots__ = ()
    name, kind = "tiled int8", "int8"

    def __init__(self, weight: Matrix, bias: torch.Tensor | None, kernels: CpuKernels) -> None:
        out, inputs = weight.shape
        laid = torch.empty((out // TILE, inputs // GROUP, TILE, GROUP), dtype=torch.int8)
        laid_scales = torch.empty((out // TILE, TILE), dtype=torch.bfloat16)
        for begin in range(0, out, QUANTIZED_ROWS):
            codes, scales = quantize_int8(weight[begin : begin + QUANTIZED_ROWS])
            tiles = slice(begin // TILE, (begin + len(codes)) // TILE)
            laid[tiles] = codes.view(-1, TILE, inputs // GROUP, GROUP).transpose(1, 2)
            laid_scales[tiles] = scales.view(-1, TILE)
        super().__init__(weight.shape, bias, kernels, laid, laid_scales)

    def unpack(self, begin: int, end: int) -> torch.Tensor:
        tiles = slice(begin // TILE, -(-end // TILE))
        weights = self._weight[tiles].transpose(1, 2).float().mul_(self._beside[tiles].float()[..., None, None])
        return weights.reshape(-1, self.inputs)


class TiledInt4Projection(TiledProjection):
    """As Int4Projection, in tiles."""

    __slots__ = ()
    name, kind = "tiled int4-fast", "int4"

    def __init__(
        self,
        weight: Matrix,
        bias: torch.Tensor | None,
        kernels: CpuKernels,
        blocks: Sequence[Placed] = (),
    ) -> None:
        out, groups = weight.shape[0], weight.shape[1] // GROUP
        padded = -(-groups // PADDED) * PADDED
        laid = torch.empty((out // TILE, groups, _SCALE_BYTES + TILE * _CODE_BYTES), dtype=torch.uint8)
        laid_zeros = torch.zeros((out // TILE, TILE, padded), dtype=torch.bfloat16)
        for begin in range(0, out, QUANTIZED_ROWS):
            codes, scales_zeros = encode(weight[begin : begin + QUANTIZED_ROWS], begin, blocks)
            tiles = slice(begin // TILE, (begin + len(codes)) // TILE)
            signed = codes.bitwise_xor_(8).to(torch.uint8).view(-1, TILE, groups, 2, _CODE_BYTES).transpose(1, 2)
            bytes_ = signed[..., 0, :] | signed[..., 1, :] << 4
            laid[tiles, :, _SCALE_BYTES:] = bytes_.reshape(-1, groups, TILE * _CODE_BYTES)
            scales, zeros = scales_zeros.view(groups, -1, TILE, 2).permute(3, 1, 0, 2)
            laid[tiles, :, :_SCALE_BYTES] = scales.contiguous().view(torch.uint8)
            laid_zeros[tiles, :, :groups] = zeros.transpose(1, 2)
        super().__init__(weight.shape, bias, kernels, laid, laid_zeros)

    def unpack(self, begin: int, end: int) -> torch.Tensor:
        tiles = slice(begin // TILE, -(-end // TILE))
        records, groups = self._weight[tiles], self._weight.shape[1]
        scales = records[..., :_SCALE_BYTES].contiguous().view(torch.bfloat16).float()
        pairs = records[..., _SCALE_BYTES:].reshape(-1, groups, TILE, _CODE_BYTES)
        codes = torch.cat((pairs & 15, pairs >> 4), -1).bitwise_xor_(8).float().sub_(8)
        zeros = self._beside[tiles, :, :groups].float().transpose(1, 2)
        weights = codes.mul_(scales[..., None]).add_(zeros[..., None])
        return weights.transpose(1, 2).reshape(-1, self.inputs)


def packed(method: str, weight: Matrix, bias: torch.Tensor | None, blocks: Sequence[Placed] = ()) -> PackedProjection:
    """`weight` by `method`, for the kernel that is faster here; a shape that no 4-bit kernel takes is served in 8 bits.
    `blocks`: what rows of `weight` were dequantized from."""
    tiled = _kernels(method) is not None and _takes_tiles(weight) and _serves_tiles(method, weight)
    projection = (_tiled if tiled else _by_torch)(method, weight, bias, blocks)
    projection.measure()
    return projection


def _tiled(method: str, weight: Matrix, bias: torch.Tensor | None, blocks: Sequence[Placed] = ()) -> PackedProjection:
    kernels = _kernels(method)
    assert kernels is not None
    if method == "int4-fast":
        return TiledInt4Projection(weight, bias, kernels, blocks)
    return TiledInt8Projection(weight, bias, kernels)


def _kernels(method: str) -> CpuKernels | None:
    return cpu_kernels(torch.bfloat16, "int4" if method == "int4-fast" else "int8")


def _by_torch(
    method: str, weight: Matrix, bias: torch.Tensor | None, blocks: Sequence[Placed] = ()
) -> PackedProjection:
    if method == "int4-fast" and takes_int4(weight.shape[0], weight.shape[1]):
        return Int4Projection(weight, bias, blocks)
    return Int8Projection(weight, bias)


def _takes_tiles(weight: Matrix) -> bool:
    out, inputs = weight.shape
    return out % TILE == 0 and inputs % GROUP == 0 and inputs <= MAX_INPUTS["int8"]


def _serves_tiles(method: str, weight: Matrix) -> bool:
    """Only kernels of one width are timed against each other, so that the same shape has as many bits in every load."""
    if method == "int4-fast" and not takes_int4(weight.shape[0], weight.shape[1]):
        return True
    return _tiles_are_faster(method, weight)


_faster: dict[tuple[str, int, int, int], bool] = {}
"""By method, rows that were tried, inputs and thread count."""


def _tiles_are_faster(method: str, weight: Matrix) -> bool:
    """Measured on some rows of the weight; a small one takes tiles unseen."""
    out, inputs = weight.shape
    rows = min(out, max(QUANTIZED_ROWS, _TRIED_ELEMENTS // inputs // QUANTIZED_ROWS * QUANTIZED_ROWS))
    if rows * inputs < MEASURED_ELEMENTS:
        return True
    key = (method, rows, inputs, torch.get_num_threads())
    if key not in _faster:
        probe, sample = torch.ones((1, inputs), dtype=torch.bfloat16), weight[:rows]
        ours, theirs = (
            min(timed(made.multiply, probe) for _ in range(_TRIES))
            for made in (make(method, sample, None) for make in (_tiled, _by_torch))
        )
        _faster[key] = ours < theirs
        how = f"one row takes {1e6 * ours:.0f} µs by the compiled kernel, {1e6 * theirs:.0f} by torch's"
        _log.info("%s, %d rows of %d inputs: %s", method, rows, inputs, how)
    return _faster[key]
