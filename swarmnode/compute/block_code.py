"""The LLVM code of one block's decode step of a few rows, from its input to its result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir

from swarmnode.compute.attention_code import write_attention
from swarmnode.compute.block_layout import BLOCK_SLOTS, STEP_SLOTS
from swarmnode.compute.cpu_kernels import PLAIN, PREPARED
from swarmnode.compute.llvm_code import F32, I32, I64, NUMBERS, POINTER, Library, Record
from swarmnode.compute.product_code import ENTRY

if TYPE_CHECKING:
    from swarmnode.compute.llvm_code import Value


def write_block(dtype: str) -> str:
    """A module of block(block, step): records of BLOCK_SLOTS and STEP_SLOTS, for rows in `dtype`, one of NUMBERS."""
    library = Library(ir.Module("block"))
    _write_block(library, write_attention(library, NUMBERS[dtype]))
    return str(library.module)


def _write_block(library: Library, attend: Any) -> None:
    function, b = library.function("block", POINTER, POINTER, internal=False)
    block, step = (
        Record(b, pointer, names) for pointer, names in zip(function.args, (BLOCK_SLOTS, STEP_SLOTS), strict=True)
    )
    rows, qkv, attended, gate_up = (step.pointer(name) for name in ("rows", "qkv", "attended", "gate_up"))
    nothing = POINTER(None)

    def multiply(name: str, x: Value, out: Value, prepared: str, norm: str = "", residual: Value = nothing) -> None:
        weights, beside, bias = (block.pointer(f"{name}_{slot}") for slot in ("weights", "beside", "bias"))
        gain, eps = (block.pointer(f"{norm}_gain"), block(f"{norm}_eps", F32)) if norm else (nothing, F32(0))
        entries = b.bitcast(block.pointer(f"{name}_entries"), POINTER.as_pointer())
        entry = b.load(b.gep(entries, [b.sub(step("count"), I64(1))]))
        sizes = block(f"{name}_tiles"), block(f"{name}_groups")
        way, threads = I32(PREPARED.index(prepared)), step("threads", I32)
        arguments = [x, out, weights, beside, bias, residual, gain, *sizes, eps, way, threads]
        b.call(b.bitcast(entry, ENTRY.as_pointer()), arguments)

    multiply("qkv", rows, qkv, "normed", "input")
    b.call(attend, function.args)
    multiply("o", attended, rows, PLAIN, residual=rows)
    multiply("gate_up", rows, gate_up, "normed", "mlp")
    multiply("down", gate_up, rows, "gated", residual=rows)
    b.ret_void()
