"""A decode step of few rows through compiled blocks: one call for each block, from its input to its result.

What torch does between two products takes longer than a small model's products do, each operation some microseconds.
`block_code.py` computes the same in one function. It serves Llama-shaped blocks whose matrices the compiled kernels
multiply; torch's way stays for all others, for prompt pieces and for many rows. `lean_loading.py` proves it block by
block.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from swarmnode.compute.block_layout import BLOCK_SLOTS, MATRIX_NAMES, SESSION_SLOTS, STEP_SLOTS
from swarmnode.compute.cpu_kernels import MAX_ROWS, cpu_kernels, readable
from swarmnode.errors import StageFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarmnode.compute.cpu_kernels import CpuKernels
    from swarmnode.compute.kv_cache import SessionCache

_HEAD_MULTIPLE = 16
"""Head sizes that the code reads whole."""


class CompiledMatrix(Protocol):
    """A weight of which the compiled kernels multiply few rows."""

    many_rows: int
    """From so many on another way is faster."""

    @property
    def dtype(self) -> torch.dtype:
        """Of rows."""

    @property
    def outputs(self) -> int: ...

    @property
    def inputs(self) -> int: ...

    def slots(self) -> dict[str, int]:
        """By MATRIX_SLOTS; raises ValueError for what the code would misread."""


@dataclass(frozen=True, slots=True)
class Gain:
    """Of an RMS norm: (n,) float32, and what it adds to the mean of squares."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class BlockParts:
    """All that a compiled block computes with. `query_gain` and `key_gain` norm each head."""

    qkv: CompiledMatrix
    o: CompiledMatrix
    gate_up: CompiledMatrix
    down: CompiledMatrix
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    scaling: float
    rotates: bool
    input_gain: Gain
    mlp_gain: Gain
    query_gain: Gain | None
    key_gain: Gain | None

    @property
    def matrices(self) -> tuple[CompiledMatrix, ...]:
        return self.qkv, self.o, self.gate_up, self.down

    @property
    def dtype(self) -> torch.dtype:
        """Of rows, keys and values."""
        return self.qkv.dtype

    def fits(self) -> bool:
        """Whether the code reads and writes what is there and no more: it trusts every size."""
        hidden, attended = self.qkv.inputs, self.heads * self.head_dim
        sizes = (
            (attended + 2 * self.kv_heads * self.head_dim, hidden),
            (hidden, attended),
            (2 * self.down.inputs, hidden),
            (hidden, self.down.inputs),
        )
        gains = [(self.input_gain, hidden), (self.mlp_gain, hidden)]
        gains += [(gain, self.head_dim) for gain in (self.query_gain, self.key_gain) if gain is not None]
        return (
            self.head_dim % _HEAD_MULTIPLE == 0
            and self.kv_heads > 0
            and self.heads % self.kv_heads == 0
            and all((m.outputs, m.inputs) == size for m, size in zip(self.matrices, sizes, strict=True))
            and all(matrix.dtype == self.dtype for matrix in self.matrices)
            and all(gain.weight.shape == (size,) and readable(gain.weight, torch.float32) for gain, size in gains)
        )

    def record(self) -> list[int]:
        """The numbers of BLOCK_SLOTS; they hold as long as this does."""
        slots = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        slots |= {"window": self.window or 0, "scaling": _bits(self.scaling), "rotates": int(self.rotates)}
        for matrix in MATRIX_NAMES:
            slots |= {f"{matrix}_{name}": value for name, value in getattr(self, matrix).slots().items()}
        for norm in ("input", "mlp", "query", "key"):
            gain: Gain | None = getattr(self, f"{norm}_gain")
            slots[f"{norm}_gain"] = 0 if gain is None else gain.weight.data_ptr()
            slots[f"{norm}_eps"] = _bits(0.0 if gain is None else gain.eps)
        return [slots[name] for name in BLOCK_SLOTS]


class CompiledStep:
    """Blocks of one shape, in order. Takes any number of rows, MAX_ROWS at a time."""

    def __init__(self, kernels: CpuKernels, blocks: Sequence[BlockParts]) -> None:
        first = blocks[0]
        self._kernels, self._blocks = kernels, tuple(blocks)
        """Held: the code and the memory that it reads by address."""
        self._call, self._dtype = kernels.block, kernels.dtype
        self._records = [(ctypes.c_int64 * len(BLOCK_SLOTS))(*block.record()) for block in blocks]
        self._hidden, self._head_dim = first.qkv.inputs, first.head_dim
        self._position = torch.empty((1, first.kv_heads, 1, first.head_dim), dtype=first.dtype)
        self._widths = first.qkv.outputs, first.o.inputs, first.gate_up.outputs
        self.many_rows = min(matrix.many_rows for block in blocks for matrix in block.matrices)
        """From so many on some matrix is multiplied faster in another way."""

    def run(
        self,
        rows: torch.Tensor,
        rotations: Sequence[tuple[torch.Tensor, torch.Tensor]],
        caches: Sequence[SessionCache],
    ) -> torch.Tensor:
        """(sessions, 1, hidden) rows and (sessions, 1, 1, head_dim) tables for each block → (sessions, 1, hidden), each
        session's keys and values appended; `rows` stay as they are. Raises StageFailed for what it would misread."""
        count = len(caches)
        self._check(rows, rotations, count)
        out = rows.clone(memory_format=torch.contiguous_format)
        for begin in range(0, count, MAX_ROWS):
            part = slice(begin, begin + MAX_ROWS)
            self._run_few(out[part], [(cos[part], sin[part]) for cos, sin in rotations], caches[part])
        return out

    def _check(self, rows: torch.Tensor, rotations: Sequence[tuple[torch.Tensor, torch.Tensor]], count: int) -> None:
        fits = rows.shape == (count, 1, self._hidden) and rows.dtype == self._dtype and rows.is_cpu
        tables = {id(table): table for rotation in rotations for table in rotation}.values()
        if not (
            fits
            and len(rotations) == len(self._records)
            and all(table.shape == (count, 1, 1, self._head_dim) and readable(table, self._dtype) for table in tables)
        ):
            taken = f"{self._kernels.dtype_name} rows of {self._hidden} and heads of {self._head_dim}"
            raise StageFailed(
                f"a step of {count} sessions got rows {list(rows.shape)} {rows.dtype} and {len(rotations)} rotations: "
                f"the compiled blocks take {taken}"
            )

    def _run_few(
        self,
        rows: torch.Tensor,
        rotations: Sequence[tuple[torch.Tensor, torch.Tensor]],
        caches: Sequence[SessionCache],
    ) -> None:
        """In place."""
        count, (qkv, attended, gate_up) = len(caches), self._widths
        room = torch.empty(count * (qkv + attended + gate_up), dtype=self._dtype)
        queries = torch.empty(count * attended, dtype=torch.float32)
        sessions = (ctypes.c_int64 * (len(SESSION_SLOTS) * count))()
        address = room.data_ptr()
        slots = {
            "rows": rows.data_ptr(),
            "qkv": address,
            "attended": address + room.itemsize * count * qkv,
            "gate_up": address + room.itemsize * count * (qkv + attended),
            "queries": queries.data_ptr(),
            "sessions": ctypes.addressof(sessions),
            "count": count,
            "threads": torch.get_num_threads(),
        }
        step = (ctypes.c_int64 * len(STEP_SLOTS))(*(slots.get(name, 0) for name in STEP_SLOTS))
        cos_at, sin_at = STEP_SLOTS.index("cos"), STEP_SLOTS.index("sin")
        for layer, (record, (cos, sin)) in enumerate(zip(self._records, rotations, strict=True)):
            step[cos_at], step[sin_at] = cos.data_ptr(), sin.data_ptr()
            sessions[:] = [number for cache in caches for number in cache.extend(layer, self._position)]
            self._call(record, step)


def compiled_step(blocks: Sequence[BlockParts | None]) -> CompiledStep | None:
    """None where some block is not what the code computes, or not of the others' shape."""
    found = [block for block in blocks if block is not None and block.fits()]
    if not found or len(found) != len(blocks):
        return None
    shapes = {(b.dtype, b.qkv.inputs, b.heads, b.kv_heads, b.head_dim, b.down.inputs) for b in found}
    kernels = cpu_kernels(found[0].dtype)
    return CompiledStep(kernels, found) if kernels is not None and len(shapes) == 1 else None


def _bits(number: float) -> int:
    """Of a float32."""
    return int.from_bytes(struct.pack("<f", number), "little")
