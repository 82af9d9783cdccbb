"""The LLVM code of products of few rows with packed weights, for x86 CPUs with AVX2: written here, compiled at load.

Each GROUP of a row is turned into 16-bit integers over its largest value, multiplied with the weights' codes in
integers (`pmaddwd`), and scaled in float32. A code is off by at most 2^-16 of its group's largest value; bfloat16
rounds each number by 2^-9 of its own, the result among them. So what rounding the codes costs is lost in the result's
own rounding, unless a value is thousands of times the others and its weights hide that from the result; then its own
group's 31 others are coarse, and no further ones. Weights lie tile by tile, so that memory is read once and in order:

- eight bits: (out / TILE, groups, TILE, 32) codes; bfloat16 scales by output row.
- four bits: (out / TILE, groups, 8 + 64) bytes: TILE bfloat16 scales, then of each of TILE rows 16 bytes, the low
  halves its first 16 codes, the high halves the next, as signed numbers; (out / TILE, TILE, PADDED groups) bfloat16
  zeros apart.

Rows are made on the way in and added to on the way out, see `product_code.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from llvmlite import ir

from swarmnode.compute.cpu_kernels import MAX_ROWS, PADDED, PREPARED, TILE
from swarmnode.compute.llvm_code import (
    BFLOATS,
    F32,
    FLOATS,
    HALVES,
    I8,
    I32,
    I64,
    INTS,
    LANES,
    NUMBERS,
    POINTER,
    Library,
    across,
    at,
    floats,
    handed,
    load,
    loop,
    splat,
    store,
)
from swarmnode.compute.product_code import ENTRY, call_prepared, passes, row_reader, store_number
from swarmnode.compute.projections import GROUP

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from swarmnode.compute.llvm_code import Value

_AT_ONCE = {
    "int8": {1: 4, 2: 4, 3: 2, 4: 2},
    "int4": {1: 4, 2: 4, 3: 2, 4: 1, 5: 1, 6: 1, 7: 1, 8: 1},
}
"""Output rows that are multiplied at once, by rows of x: what was fastest. More rows of x than are named pass over a
tile's weights again, which then lie in the core's own cache. In eight bits two output rows share what is read of x; in
four, two more registers hold scales, and codes are dear to take apart, so one output row meets all rows of x."""
_LIMIT = 32767.0
_ROWS = NUMBERS["bfloat16"]
_SMALLEST = 1e-30
"""A group below this is one of zeros: its inverse would not be a number."""


def write_integer_products(kind: str) -> str:
    """A module of functions `int8_R` or `int4_R`, as ENTRY: x and out in bfloat16, `beside` scales or zeros."""
    library = Library(ir.Module(kind))
    quantize = {name: _write_quantize(library, name) for name in PREPARED}
    for rows in range(1, MAX_ROWS + 1):
        _write_entry(library, f"{kind}_{rows}", rows, quantize, _write_part(library, kind, rows))
    return str(library.module)


def _write_quantize(library: Library, prepared: str) -> Any:
    """quantize(x, codes, sums, scales, gain, rows, groups, eps): of rows of x the 16-bit codes as (groups, rows,
    GROUP), the sums of each group's, scaled, as (rows, PADDED groups) floats, the scales as (groups, rows) floats."""
    function, b = library.function(f"quantize_{prepared}", *[POINTER] * 5, *[I64] * 2, F32)
    x, codes, sums, scales, gain, rows, groups, eps = function.args

    def of_row(row: Value, _: Sequence[Value]) -> None:
        own_sums = at(b, sums, b.mul(row, _padded(b, groups)), 4)
        read = row_reader(library, b, _ROWS, prepared, x, row, gain, groups, eps)

        def of_group(group: Value, _: Sequence[Value]) -> None:
            place = b.add(b.mul(group, rows), row)
            scale, total = _encode_group(library, b, read(group), at(b, codes, place, 2 * GROUP))
            store(b, scale, scales, b.mul(place, I64(4)))
            store(b, b.fmul(total, scale), own_sums, b.mul(group, I64(4)))

        def fill(group: Value, _: Sequence[Value]) -> None:
            store(b, F32(0), own_sums, b.mul(group, I64(4)))

        loop(b, I64(0), groups, 1, of_group)
        loop(b, groups, _padded(b, groups), 1, fill)

    loop(b, I64(0), rows, 1, of_row)
    b.ret_void()
    return function


def _encode_group(library: Library, b: Any, parts: Sequence[Value], target: Value) -> tuple[Value, Value]:
    """Stores the codes; gives their scale, and their sum as a float."""
    best = FLOATS(None)
    for part in parts:
        best = b.call(library.larger, [best, b.call(library.magnitude, [part])])
    for shift in (4, 2, 1):
        turned = b.shuffle_vector(best, best, INTS([(lane + shift) % LANES for lane in range(LANES)]))
        best = b.call(library.larger, [best, turned])
    limit = floats(_LIMIT)
    counts = b.fcmp_ordered(">", best, floats(_SMALLEST))
    inverse = b.select(counts, b.fdiv(limit, best), FLOATS(None))
    whole = [b.call(library.to_ints, [b.fmul(part, inverse)]) for part in parts]
    for n, part in enumerate(whole):
        store(b, b.trunc(part, BFLOATS), target, 2 * LANES * n)
    total = across(b, b.add(b.add(whole[0], whole[1]), b.add(whole[2], whole[3])), b.add)
    return b.extract_element(b.fdiv(best, limit), I32(0)), b.sitofp(total, F32)


def _write_part(library: Library, kind: str, rows: int) -> Any:
    """part(arguments): one thread's tiles, all rows; the arguments are those that the entry stores."""
    function, b = library.function(f"{kind}_{rows}_part", POINTER)
    part = _Part(library, b, kind, rows, *handed(b, function.args[0], pointers=8, sizes=2))
    loop(b, *library.own_share(b, part.tiles), 1, part.write_tile)
    b.ret_void()
    return function


@dataclass(frozen=True, slots=True)
class _Part:
    """Writes what one thread does; the values are the entry's arguments and what `quantize` made of the rows."""

    library: Library
    b: Any
    kind: str
    rows: int
    out: Value
    weights: Value
    beside: Value
    bias: Value
    residual: Value
    codes: Value
    sums: Value
    scales: Value
    tiles: Value
    groups: Value

    def write_tile(self, tile: Value, _: Sequence[Value]) -> None:
        for rows in passes(self.rows, max(_AT_ONCE[self.kind])):
            at_once = _AT_ONCE[self.kind][len(rows)]
            for first in range(0, TILE, at_once):
                lanes = range(first, first + at_once)
                found = self._products(tile, lanes, rows)
                if self.kind == "int4":
                    found = self._with_zeros(tile, lanes, rows, found)
                for (lane, row), total in zip(product(lanes, rows), found, strict=True):
                    self._store_number(tile, lane, row, total)

    def _products(self, tile: Value, lanes: range, rows: range) -> list[Value]:
        """For each of a tile's `lanes` and each row eight floats that add up to weights · row; in eight bits without
        the output row's scale, in four without the zeros."""
        b = self.b
        group_bytes = I64(TILE * (GROUP if self.kind == "int8" else 2 + GROUP // 2))
        weights = b.gep(self.weights, [b.mul(tile, b.mul(self.groups, group_bytes))])
        read: Callable[[Value, int], tuple[list[Value], Value | None]] = (
            self._read_8 if self.kind == "int8" else self._read_4
        )

        def of_group(group: Value, old: Sequence[Value]) -> list[Value]:
            record = b.gep(weights, [b.mul(group, group_bytes)])
            found = []
            for n, lane in enumerate(lanes):
                pair, weight_scale = read(record, lane)
                for m, row in enumerate(rows):
                    sums = old[n * len(rows) + m]
                    found.append(self._add_product(pair, weight_scale, group, row, sums))
            return found

        return loop(b, I64(0), self.groups, 1, of_group, [FLOATS(None)] * (len(lanes) * len(rows)))

    def _read_8(self, record: Value, lane: int) -> tuple[list[Value], None]:
        halves = [load(self.b, record, lane * GROUP + half, ir.VectorType(I8, 16)) for half in (0, 16)]
        return [self.b.sext(half, HALVES) for half in halves], None

    def _read_4(self, record: Value, lane: int) -> tuple[list[Value], Value]:
        """A lane's codes, and its scale in eight floats."""
        b = self.b
        two_scales = splat(b, load(b, record, 4 * (lane // 2), I32, 4), INTS)
        scale = b.shl(two_scales, INTS([16] * 8)) if lane % 2 == 0 else b.and_(two_scales, INTS([-65536] * 8))
        both = b.sext(load(b, record, 2 * TILE + lane * GROUP // 2, ir.VectorType(I8, 16)), HALVES)
        low = b.ashr(b.shl(both, HALVES([12] * 16)), HALVES([12] * 16))
        return [low, b.ashr(both, HALVES([4] * 16))], b.bitcast(scale, FLOATS)

    def _add_product(self, pair: list[Value], weight_scale: Value | None, group: Value, row: int, old: Value) -> Value:
        b = self.b
        place = b.add(b.mul(group, I64(self.rows)), I64(row))
        codes = at(b, self.codes, place, 2 * GROUP)
        halves = [load(b, codes, GROUP * n, HALVES) for n in range(2)]
        low, high = (b.call(self.library.multiply_add_pairs, [w, x]) for w, x in zip(pair, halves, strict=True))
        scale = splat(b, load(b, self.scales, b.mul(place, I64(4)), F32, 4), FLOATS)
        if weight_scale is not None:
            scale = b.fmul(scale, weight_scale)
        return b.call(self.library.fma, [b.sitofp(b.add(low, high), FLOATS), scale, old])

    def _with_zeros(self, tile: Value, lanes: range, rows: range, products: list[Value]) -> list[Value]:
        """Each group's zero times the row's sum added."""
        b = self.b
        padded = _padded(b, self.groups)
        zeros = b.gep(self.beside, [b.mul(tile, b.mul(padded, I64(2 * TILE)))])

        def of_groups(group: Value, old: Sequence[Value]) -> list[Value]:
            found = list(old)
            for n, lane in enumerate(lanes):
                place = b.mul(b.add(b.mul(padded, I64(lane)), group), I64(2))
                own = _ROWS.eight(b, zeros, place)
                for m, row in enumerate(rows):
                    place = b.mul(b.add(b.mul(padded, I64(row)), group), I64(4))
                    which = n * len(rows) + m
                    sums = load(b, self.sums, place, FLOATS, 4)
                    found[which] = b.call(self.library.fma, [own, sums, found[which]])
            return found

        return loop(b, I64(0), self.groups, PADDED, of_groups, products)

    def _store_number(self, tile: Value, lane: int, row: int, total: Value) -> None:
        b = self.b
        column = b.add(b.mul(tile, I64(TILE)), I64(lane))
        value = across(b, total, b.fadd)
        if self.kind == "int8":
            value = b.fmul(value, _ROWS.one(b, at(b, self.beside, column, _ROWS.size)))
        outputs = b.mul(self.tiles, I64(TILE))
        store_number(b, _ROWS, value, self.out, self.bias, self.residual, I64(row), column, outputs)


def _write_entry(library: Library, name: str, rows: int, quantize: Mapping[str, Any], part: Any) -> None:
    function, b = library.function(name, *ENTRY.args, internal=False)
    x, out, weights, beside, bias, residual, gain, tiles, groups, eps, prepared, threads = function.args
    codes = b.alloca(I8, b.mul(groups, I64(2 * GROUP * rows)))
    codes.align = 64
    sums = b.alloca(I8, b.mul(_padded(b, groups), I64(4 * rows)))
    scales = b.alloca(I8, b.mul(groups, I64(4 * rows)))
    call_prepared(b, prepared, quantize, [x, codes, sums, scales, gain, I64(rows), groups, eps])
    fields = (out, weights, beside, bias, residual, codes, sums, scales, tiles, groups)
    library.run(b, part, fields, threads)
    b.ret_void()


def _padded(b: Any, groups: Value) -> Value:
    return b.and_(b.add(groups, I64(PADDED - 1)), I64(-PADDED))
