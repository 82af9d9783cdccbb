"""The LLVM code of products of few rows with dense weights, in float32 or bfloat16, for x86 CPUs with AVX2.

A weight is read once, as torch holds it, and as fast as memory gives it: that is what few rows cost. Rows are laid out
first as floats, (groups, GROUP / 8, R, 8), so that eight inputs of all of them lie together. A few output rows are
multiplied at once, so that what is read of x serves all of them; they lie far apart, because memory that is read at two
places near each other is not fetched ahead. Each sum is built in the same order however many rows there are: a row's
result is the same alone and in any group.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from llvmlite import ir

from swarmnode.compute.cpu_kernels import MAX_ROWS, PREPARED, TILE
from swarmnode.compute.llvm_code import (
    F32,
    FLOATS,
    I8,
    I32,
    I64,
    LANES,
    NUMBERS,
    POINTER,
    Library,
    across,
    at,
    handed,
    load,
    loop,
    store,
)
from swarmnode.compute.product_code import ENTRY, call_prepared, passes, row_reader, store_number
from swarmnode.compute.projections import GROUP

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from swarmnode.compute.llvm_code import Numbers, Value

_AT_ONCE = {1: 4, 2: 4, 3: 3, 4: 3, 5: 2, 6: 2}
"""Output rows that are multiplied at once, by rows of x: twelve registers hold sums at most, the rest weights and x.
For more rows of x half of them pass first, then the others, while the weights lie in the core's own cache."""
_FETCHED_FROM = 3
"""From so many rows of x on computing takes so long that what is multiplied next is asked for meanwhile."""
_EIGHTS = GROUP // LANES
_CACHE_LINE = 64


def write_dense_products(dtype: str) -> str:
    """A module of functions `dense_R`, as ENTRY: x, out and weights, (tiles * TILE, groups * GROUP), in `dtype`;
    `beside` is null."""
    library, numbers = Library(ir.Module("dense")), NUMBERS[dtype]
    arrange = {name: _write_arrange(library, numbers, name) for name in PREPARED}
    for rows in range(1, MAX_ROWS + 1):
        _write_entry(library, rows, arrange, _write_part(library, numbers, rows))
    return str(library.module)


def _write_arrange(library: Library, numbers: Numbers, prepared: str) -> Any:
    """arrange(x, arranged, gain, rows, groups, eps)."""
    function, b = library.function(f"arrange_{prepared}", *[POINTER] * 3, *[I64] * 2, F32)
    x, arranged, gain, rows, groups, eps = function.args

    def of_row(row: Value, _: Sequence[Value]) -> None:
        read = row_reader(library, b, numbers, prepared, x, row, gain, groups, eps)

        def of_group(group: Value, _: Sequence[Value]) -> None:
            for n, part in enumerate(read(group)):
                eight = b.add(b.mul(group, I64(_EIGHTS)), I64(n))
                store(b, part, at(b, arranged, b.add(b.mul(eight, rows), row), 4 * LANES), 0)

        loop(b, I64(0), groups, 1, of_group)

    loop(b, I64(0), rows, 1, of_row)
    b.ret_void()
    return function


def _write_entry(library: Library, rows: int, arrange: Mapping[str, Any], part: Any) -> None:
    function, b = library.function(f"dense_{rows}", *ENTRY.args, internal=False)
    x, out, weights, _, bias, residual, gain, tiles, groups, eps, prepared, threads = function.args
    arranged = b.alloca(I8, b.mul(groups, I64(4 * GROUP * rows)))
    arranged.align = 64
    call_prepared(b, prepared, arrange, [x, arranged, gain, I64(rows), groups, eps])
    library.run(b, part, (out, weights, bias, residual, arranged, b.mul(tiles, I64(TILE)), groups), threads)
    b.ret_void()


def _write_part(library: Library, numbers: Numbers, rows: int) -> Any:
    """part(arguments): one thread's output rows, all rows of x; the arguments are those that the entry stores."""
    function, b = library.function(f"dense_{rows}_part", POINTER)
    part = _Part(library, b, numbers, rows, *handed(b, function.args[0], pointers=5, sizes=2))
    at_once = part.at_once
    apart = b.sdiv(part.outputs, I64(at_once))
    begin, end = library.own_share(b, apart)

    def of_column(column: Value, _: Sequence[Value]) -> None:
        part.multiply([b.add(column, b.mul(apart, I64(n))) for n in range(at_once)])

    def of_rest(column: Value, _: Sequence[Value]) -> None:
        part.multiply([column])

    loop(b, begin, end, 1, of_column)
    with b.if_then(b.icmp_signed("==", end, apart)):  # the last thread
        loop(b, b.mul(apart, I64(at_once)), part.outputs, 1, of_rest)
    b.ret_void()
    return function


@dataclass(frozen=True, slots=True)
class _Part:
    """Writes what one thread does."""

    library: Library
    b: Any
    numbers: Numbers
    rows: int
    out: Value
    weights: Value
    bias: Value
    residual: Value
    arranged: Value
    outputs: Value
    groups: Value

    @property
    def at_once(self) -> int:
        return _AT_ONCE[len(self._passes[0])]

    @property
    def _passes(self) -> list[range]:
        return passes(self.rows, max(_AT_ONCE))

    def multiply(self, columns: Sequence[Value]) -> None:
        """The weight's rows `columns` with every row of x."""
        b, numbers = self.b, self.numbers
        row_bytes = b.mul(self.groups, I64(numbers.size * GROUP))
        weights = [b.gep(self.weights, [b.mul(column, row_bytes)]) for column in columns]
        for n, rows in enumerate(self._passes, 1):
            following = row_bytes if self.rows >= _FETCHED_FROM and n == len(self._passes) else None
            sums = self._sums(weights, rows, following)
            for (row, column), total in zip(product(rows, columns), sums, strict=True):
                value = across(b, total, b.fadd)
                store_number(b, numbers, value, self.out, self.bias, self.residual, I64(row), column, self.outputs)

    def _sums(self, weights: Sequence[Value], rows: range, following: Value | None) -> list[Value]:
        """Of each row of x with each of the weight's rows eight floats that add up to the product. `following`: so many
        bytes behind each weight lies what comes next."""
        b = self.b
        group_bytes = self.numbers.size * GROUP

        def of_group(group: Value, old: Sequence[Value]) -> list[Value]:
            sums = list(old)
            own = [at(b, weight, group, group_bytes) for weight in weights]
            if following is not None:
                self._fetch([b.gep(place, [following]) for place in own], group_bytes)
            x = at(b, self.arranged, group, 4 * GROUP * self.rows)
            for n in range(_EIGHTS):
                eights = [self.numbers.eight(b, place, self.numbers.size * LANES * n) for place in own]
                for m, row in enumerate(rows):
                    part = load(b, x, 4 * LANES * (n * self.rows + row), FLOATS)
                    for k, eight in enumerate(eights):
                        which = m * len(eights) + k
                        sums[which] = b.call(self.library.fma, [part, eight, sums[which]])
            return sums

        return loop(b, I64(0), self.groups, 1, of_group, [FLOATS(None)] * (len(rows) * len(weights)))

    def _fetch(self, places: Sequence[Value], size: int) -> None:
        """Asks for so many bytes of each place, into the second cache."""
        for place, offset in product(places, range(0, size, _CACHE_LINE)):
            self.b.call(self.library.prefetch, [self.b.gep(place, [I64(offset)]), I32(0), I32(2), I32(1)])
