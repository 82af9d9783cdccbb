"""The matrix products of a lean block: dense, or over weights packed to eight or four bits by torch's CPU kernels.

Packed kernels take bfloat16 rows and are made for few of them. From some row count on it is faster to unpack the whole
weight to float32 and multiply; where that lies depends on the CPU and the shape, so it is measured at load
(`crossover_rows`). The same holds for bfloat16 weights on CPUs without bfloat16 arithmetic. `tiled_projections.py` has
the kernels that are compiled at load, and chooses.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch
from torch.nn.functional import linear, pad

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from swarmnode.compute.gguf_blocks import Q4Blocks

    Placed = tuple[int, Q4Blocks]
    """Blocks of some of a matrix's rows, and the first of those."""

_Argument = TypeVar("_Argument")

GROUP = 32
"""Weights that share a scale and a zero in four bits; also llama.cpp's block, whose codes are taken as they are."""
_LEVELS = 15
_ROWS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Tried in turn: up to what the longest prompt pieces have."""
MEASURED_ELEMENTS = 1 << 18
"""Smaller weights are not worth measuring: they take defaults."""
_MEASURE_S = 0.5
"""Per shape; a measurement that would take longer ends with what it knows so far."""
DEFAULT_ROWS = 32
CHUNK_ROWS = 128
"""Weights are unpacked in multiples of this many output rows: whole blocks of every packed layout."""
QUANTIZED_ROWS = CHUNK_ROWS
"""Rows of a weight that are quantized at a time: for each of their weights some 20 bytes are held beside the block."""
_CHUNK_ELEMENTS = 1 << 20
"""4 MiB of float32 at a time: little beside any slice, and it stays in the CPU's cache."""


class Matrix(Protocol):
    """A weight that is packed some of its rows at a time: in memory, or in a file."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def device(self) -> torch.device: ...

    def __getitem__(self, rows: slice, /) -> torch.Tensor: ...


class Projection(Protocol):
    """x (…, in) → (…, out)."""

    @property
    def kernels(self) -> str:
        """Whose multiply it: `dense`, `torch` (packed), `fastcpu` (compiled at load) or `torchao`."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...

    def size_bytes(self) -> int: ...


class Way(NamedTuple):
    """How a dense product of few rows is computed."""

    rows: int
    """Multiplied in the company of zeros, so many together."""
    turned: bool
    """The weight is the left factor."""


class DenseProjection:
    """`linear` over a weight in the serving dtype; once `measure` was called, many bfloat16 rows on a CPU go through
    float32 where that is faster. Few rows may have a way of their own, see `few_rows.py`."""

    __slots__ = ("_bias", "_float_from", "_ways", "_weight")
    kernels = "dense"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self._float_from = 1 << 62
        self._ways: Mapping[int, Way] = {}

    def measure(self) -> None:
        if self._weight.dtype == torch.bfloat16 and self._weight.device.type == "cpu":
            self._float_from = crossover_rows(self._direct, self._through_float, self._weight.shape, "bfloat16")

    def take_ways(self, ways: Mapping[int, Way]) -> None:
        """From here on these row counts are multiplied so."""
        self._ways = ways

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        count = rows.numel() // rows.shape[-1]
        if count >= self._float_from:
            return self._through_float(rows)
        way = self._ways.get(count)
        if way is None:
            return self._direct(rows)
        return self.multiply(rows.reshape(count, rows.shape[-1]), way).view(*rows.shape[:-1], self._weight.shape[0])

    def multiply(self, rows: torch.Tensor, way: Way) -> torch.Tensor:
        """(rows, in) → (rows, out), contiguous."""
        count = rows.shape[0]
        if count < way.rows:
            rows = pad(rows, (0, 0, 0, way.rows - count))
        return (self._turned if way.turned else self._direct)(rows)[:count]

    @property
    def weight(self) -> torch.Tensor:
        return self._weight

    @property
    def inputs(self) -> int:
        return self._weight.shape[1]

    def size_bytes(self) -> int:
        return self._weight.nbytes + (self._bias.nbytes if self._bias is not None else 0)

    def _direct(self, rows: torch.Tensor) -> torch.Tensor:
        return linear(rows, self._weight, self._bias)

    def _turned(self, rows: torch.Tensor) -> torch.Tensor:
        out = torch.mm(self._weight, rows.T).T.contiguous()
        return out if self._bias is None else out.add_(self._bias)

    def _through_float(self, rows: torch.Tensor) -> torch.Tensor:
        out = multiply_in_float(rows, self._weight.shape[0], lambda begin, end: self._weight[begin:end].float())
        return out if self._bias is None else out.add_(self._bias)


class PackedProjection(ABC):
    """What the packed kernels have in common: bfloat16 in and out, the bias added after, and once `measure` was called,
    many rows through float32."""

    __slots__ = ("_bias", "_out", "many_rows")
    name = ""
    kernels = "torch"

    def __init__(self, shape: torch.Size, bias: torch.Tensor | None) -> None:
        self._out = shape[0]
        self._bias = bias.clone() if bias is not None else None  # a view would keep the block's dense memory
        self.many_rows = 1 << 62
        """From so many on they go through float32."""

    def measure(self) -> None:
        self.many_rows = crossover_rows(self._packed, self._unpacked, (self._out, self.inputs), self.name)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        out = (self._packed if flat.shape[0] < self.many_rows else self._unpacked)(flat)
        if self._bias is not None:
            out = out + self._bias
        return out.view(*rows.shape[:-1], self._out)

    def _packed(self, rows: torch.Tensor) -> torch.Tensor:
        return self.multiply(rows.to(torch.bfloat16)).to(rows.dtype)

    def _unpacked(self, rows: torch.Tensor) -> torch.Tensor:
        return multiply_in_float(rows, self._out, self.unpack)

    @property
    @abstractmethod
    def inputs(self) -> int: ...

    @abstractmethod
    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """(rows, in) in bfloat16 through the packed kernel."""

    @abstractmethod
    def unpack(self, begin: int, end: int) -> torch.Tensor:
        """Output rows begin … end-1 of the weight that the kernel multiplies by, in float32; `begin` is a multiple of
        CHUNK_ROWS."""

    @abstractmethod
    def size_bytes(self) -> int:
        """Bytes that the packed weight and its scales take."""


def multiply_in_float(rows: torch.Tensor, out: int, unpack: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
    """rows · weightᵀ in float32, the weight unpacked a chunk of its rows at a time, so that little of it is held."""
    inputs = rows.shape[-1]
    step = max(CHUNK_ROWS, _CHUNK_ELEMENTS // inputs // CHUNK_ROWS * CHUNK_ROWS)
    exact = rows.float()
    result = torch.empty((*rows.shape[:-1], out), dtype=rows.dtype, device=rows.device)
    for begin in range(0, out, step):
        end = min(begin + step, out)
        result[..., begin:end] = linear(exact, unpack(begin, end))
    return result


class Int8Projection(PackedProjection):
    """One scale per output row, symmetric."""

    __slots__ = ("_scales", "_weight")
    name = "int8"

    def __init__(self, weight: Matrix, bias: torch.Tensor | None) -> None:
        self._weight, self._scales = quantize_int8(weight)
        super().__init__(weight.shape, bias)

    @property
    def inputs(self) -> int:
        return self._weight.shape[1]

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        return torch._weight_int8pack_mm(rows, self._weight, self._scales)

    def unpack(self, begin: int, end: int) -> torch.Tensor:
        return self._weight[begin:end].float().mul_(self._scales[begin:end].float()[:, None])

    def size_bytes(self) -> int:
        return self._weight.nbytes + self._scales.nbytes


class Int4Projection(PackedProjection):
    """A scale and a zero per GROUP inputs of each output row, asymmetric. Rows of which there are `blocks` are packed
    from those, the others are quantized."""

    __slots__ = ("_scales_zeros", "_weight")
    name = "int4-fast"

    def __init__(self, weight: Matrix, bias: torch.Tensor | None, blocks: Sequence[Placed] = ()) -> None:
        self._weight = torch.empty((weight.shape[0], weight.shape[1] // 2), dtype=torch.uint8)
        self._scales_zeros = torch.empty((weight.shape[1] // GROUP, weight.shape[0], 2), dtype=torch.bfloat16)
        for begin in range(0, weight.shape[0], QUANTIZED_ROWS):  # bounds what is held in 32 bits
            part = slice(begin, begin + QUANTIZED_ROWS)
            codes, self._scales_zeros[:, part] = encode(weight[part], begin, blocks)
            self._weight[part] = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
        super().__init__(weight.shape, bias)

    @property
    def inputs(self) -> int:
        return self._weight.shape[1] * 2

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        return torch._weight_int4pack_mm_for_cpu(rows, self._weight, GROUP, self._scales_zeros)

    def unpack(self, begin: int, end: int) -> torch.Tensor:
        codes = unpack_codes(self._weight[begin:end], self.inputs)
        scales, zeros = self._scales_zeros[:, begin:end].float().transpose(0, 1).unbind(-1)
        grouped = codes.view(end - begin, -1, GROUP).to(torch.float32)
        return grouped.sub_(8).mul_(scales[..., None]).add_(zeros[..., None]).view(end - begin, self.inputs)

    def size_bytes(self) -> int:
        return self._weight.nbytes + self._scales_zeros.nbytes


def takes_int4(out: int, inputs: int) -> bool:
    """Whole groups, whole blocks of rows, and a layout that can be read back."""
    block = code_block_rows()
    return inputs % GROUP == 0 and block is not None and out % block == 0


def quantize_int8(weight: Matrix) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, in) → codes and bfloat16 scales by row. Codes are rounded against the scale as stored."""
    scales = torch.empty(weight.shape[0], dtype=torch.bfloat16, device=weight.device)
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    for begin in range(0, weight.shape[0], QUANTIZED_ROWS):  # bounds what is held beside the weight
        part = slice(begin, begin + QUANTIZED_ROWS)
        exact = weight[part].float()
        scales[part] = (exact.abs().amax(1) / 127).clamp_(min=torch.finfo(torch.float32).tiny)
        codes[part] = (exact / scales[part].float()[:, None]).round_().clamp_(-127, 127)
    return codes, scales


def quantize_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, in) → int32 codes 0…15 and (in / GROUP, out, 2) bfloat16 scales and zeros: w ≈ (code - 8) * scale + zero.

    Codes are rounded against scale and zero as stored, so that storing those in 16 bits costs nothing twice.
    """
    out, inputs = weight.shape
    grouped = weight.float().view(out, inputs // GROUP, GROUP)
    low, high = grouped.aminmax(dim=-1)
    scales = ((high - low) / _LEVELS).clamp_(min=1e-8).to(torch.bfloat16)
    zeros = (low + scales.float() * 8).to(torch.bfloat16)
    codes = ((grouped - zeros.float()[..., None]) / scales.float()[..., None]).round_().add_(8).clamp_(0, _LEVELS)
    return codes.to(torch.int32).view(out, inputs), torch.stack((scales, zeros), -1).transpose(0, 1).contiguous()


def encode(weight: torch.Tensor, first: int, blocks: Sequence[Placed]) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_int4` of a matrix's rows from `first` on, but of rows in blocks those blocks' own codes."""
    end = first + weight.shape[0]
    spans = [(max(first, begin), min(end, begin + part.rows), begin, part) for begin, part in blocks]
    found = [(a - first, b - first, part.encode(a - begin, b - begin)) for a, b, begin, part in spans if a < b]
    if len(found) == 1 and found[0][1] - found[0][0] == weight.shape[0]:
        return found[0][2]
    codes, scales_zeros = quantize_int4(weight)
    for begin, stop, (own_codes, own_scales_zeros) in found:
        codes[begin:stop], scales_zeros[:, begin:stop] = own_codes, own_scales_zeros
    return codes, scales_zeros


def unpack_codes(stored: torch.Tensor, inputs: int) -> torch.Tensor:
    """The (out, in) codes of a packed weight: blocks of rows, inputs outermost, row r with row r + block / 2 a byte."""
    block = code_block_rows()
    assert block is not None
    pairs = stored.view(-1, inputs, block // 2)
    return torch.cat((pairs & 15, pairs >> 4), -1).transpose(1, 2).reshape(-1, inputs)


@functools.cache
def code_block_rows() -> int | None:
    """Rows per block in this CPU's layout (it follows the vector width), found by packing known codes; None where the
    layout is another one."""
    codes = torch.randint(0, 16, (128, GROUP), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    stored = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
    for block in (16, 32, 64, 128):
        pairs = stored.view(-1, GROUP, block // 2)
        if torch.equal(torch.cat((pairs & 15, pairs >> 4), -1).transpose(1, 2).reshape(128, GROUP), codes):
            return block
    return None


_measured: dict[tuple[str, int, int, int], int] = {}
"""By method, shape and thread count: a model has four shapes, not thirty times four."""


def crossover_rows(
    few: Callable[[torch.Tensor], torch.Tensor],
    many: Callable[[torch.Tensor], torch.Tensor],
    shape: tuple[int, ...],
    name: str,
) -> int:
    """The row count from which `many` is the faster of two ways to multiply; measured once per shape."""
    out, inputs = shape
    if out * inputs < MEASURED_ELEMENTS:
        return DEFAULT_ROWS
    key = (name, out, inputs, torch.get_num_threads())
    if key not in _measured:
        _measured[key] = _measure_crossover(few, many, inputs)
    return _measured[key]


def _measure_crossover(
    few: Callable[[torch.Tensor], torch.Tensor], many: Callable[[torch.Tensor], torch.Tensor], inputs: int
) -> int:
    started = time.perf_counter()
    few(torch.zeros((1, inputs), dtype=torch.bfloat16))
    for rows in _ROWS:
        probe = torch.zeros((rows, inputs), dtype=torch.bfloat16)
        unpacked_s = min(timed(many, probe), timed(many, probe))
        packed_s = min(timed(few, probe), timed(few, probe))
        if unpacked_s < packed_s:
            return rows
        # Twice the rows take either way at most twice as long, and each is run twice.
        if time.perf_counter() - started + 4 * (unpacked_s + packed_s) > _MEASURE_S:
            break
    # So many times the rows take the packed kernel at most so many times as long, and the other one no less than now.
    return max(2 * rows, int(rows * unpacked_s / packed_s))


def timed(run: Callable[[_Argument], object], argument: _Argument) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    run(argument)
    return time.perf_counter() - started
