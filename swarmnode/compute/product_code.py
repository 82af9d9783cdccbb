"""What the compiled products have in common: their arguments, and what they make of rows on the way in and out.

Rows may be made on the way in (PREPARED) and added to on the way out, so that nothing between two products of a block
takes a pass of its own. OpenMP's team is torch's own, asked for by the functions that a compiler's code would call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir

from swarmnode.compute.cpu_kernels import PLAIN, PREPARED
from swarmnode.compute.llvm_code import F32, FLOATS, I32, I64, LANES, POINTER, VOID, at, floats, load, loop, where_given
from swarmnode.compute.projections import GROUP

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from swarmnode.compute.llvm_code import Library, Numbers, Value

ENTRY = ir.FunctionType(VOID, [POINTER] * 7 + [I64] * 2 + [F32, I32, I32])
"""Of a function for R rows: (x, out, weights, beside, bias, residual, gain, tiles, groups, eps, prepared, threads).

x is (R, groups * GROUP), out (R, tiles * TILE). What x is, is said by PREPARED's number `prepared`: `plain` rows; rows
to be `normed`, with a `gain` for each input in float32; or `gated` ones, twice as wide: silu of the first half times
the second. `bias` (tiles * TILE) and `residual`, of out's shape and maybe out itself, are added where they are not
null.
"""


def call_prepared(b: Any, prepared: Value, functions: Mapping[str, Any], arguments: Sequence[Value]) -> None:
    """Calls the function of PREPARED's name that the number stands for."""
    for number, name in enumerate(PREPARED):
        with b.if_then(b.icmp_signed("==", prepared, I32(number))):
            b.call(functions[name], arguments)


def passes(rows: int, most: int) -> list[range]:
    """Rows of x that meet a weight together: at most so many, and nearly as many each time."""
    count = -(-rows // -(-rows // most))
    return [range(begin, min(begin + count, rows)) for begin in range(0, rows, count)]


def row_reader(
    library: Library,
    b: Any,
    numbers: Numbers,
    prepared: str,
    x: Value,
    row: Value,
    gain: Value,
    groups: Value,
    eps: Value,
) -> Callable[[Value], list[Value]]:
    """Gives a group of the row's floats, as they are to be multiplied."""
    group_bytes = numbers.size * GROUP
    start = at(b, x, b.mul(row, b.mul(groups, I64(2 if prepared == "gated" else 1))), group_bytes)

    def stored(half: Value, group: Value) -> list[Value]:
        place = at(b, half, group, group_bytes)
        return [numbers.eight(b, place, numbers.size * LANES * n) for n in range(GROUP // LANES)]

    if prepared == PLAIN:
        return lambda group: stored(start, group)
    if prepared == "gated":
        up = at(b, start, groups, group_bytes)
        return lambda group: [
            b.fdiv(b.fmul(gate, factor), b.fadd(floats(1.0), library.exp(b, b.fneg(gate))))
            for gate, factor in zip(stored(start, group), stored(up, group), strict=True)
        ]

    def add_squares(group: Value, sums: Sequence[Value]) -> list[Value]:
        return [b.call(library.fma, [part, part, old]) for part, old in zip(stored(start, group), sums, strict=True)]

    zero = FLOATS(None)
    one, two, three, four = loop(b, I64(0), groups, 1, add_squares, [zero] * (GROUP // LANES))
    squares = b.fadd(b.fadd(one, two), b.fadd(three, four))
    inverse = library.inverse_norm(b, squares, b.mul(groups, I64(GROUP)), eps)

    def normed(group: Value) -> list[Value]:
        gains = at(b, gain, group, 4 * GROUP)
        return [
            b.fmul(b.fmul(part, inverse), load(b, gains, 4 * LANES * n, FLOATS))
            for n, part in enumerate(stored(start, group))
        ]

    return normed


def store_number(
    b: Any,
    numbers: Numbers,
    value: Value,
    out: Value,
    bias: Value,
    residual: Value,
    row: Value,
    column: Value,
    outputs: Value,
) -> None:
    """A row's product with the weight's row `column`, of so many outputs; bias and residual are added where given."""
    place = b.add(b.mul(outputs, row), column)
    for added, index in ((bias, column), (residual, place)):
        value = _plus(b, numbers, value, added, index)
    numbers.store_one(b, value, at(b, out, place, numbers.size))


def _plus(b: Any, numbers: Numbers, value: Value, added: Value, index: Value) -> Value:
    """With the number at `index` of `added`, where there is such."""
    number = at(b, added, index, numbers.size)
    (value,) = where_given(b, added, [value], lambda: [b.fadd(value, numbers.one(b, number))])
    return value
