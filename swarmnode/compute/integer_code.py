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

OpenMP's team is torch's own, asked for by the functions that a compiler's code would call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llvmlite import ir

from swarmnode.compute.integer_kernels import KINDS, MAX_ROWS, PADDED, TILE
from swarmnode.compute.projections import GROUP

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Value = Any
    """llvmlite is untyped: a value of the code that is written, not a number."""

_AT_ONCE = {1: 4, 2: 4, 3: 2}
"""Output rows that are multiplied at once, by rows of x: as many sums as an AVX2 core has registers for."""
_LIMIT = 32767.0
_SMALLEST = 1e-30
"""A group below this is one of zeros: its inverse would not be a number."""

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_POINTER, _VOID = _I8.as_pointer(), ir.VoidType()
_HALVES, _INTS, _FLOATS = ir.VectorType(_I16, 16), ir.VectorType(_I32, 8), ir.VectorType(_F32, 8)
_BFLOATS = ir.VectorType(_I16, 8)
_LANES = 8


def write_module() -> str:
    """Functions `int8_R` and `int4_R` for R of 1 to MAX_ROWS rows: (x, out, weights, scales or zeros, tiles, groups,
    threads), x and out in bfloat16, (R, groups * GROUP) and (R, tiles * TILE)."""
    module = ir.Module("integer_products")
    library = _Library(module)
    quantize = _write_quantize(library)
    for kind in KINDS:
        for rows in range(1, MAX_ROWS + 1):
            _write_entry(library, f"{kind}_{rows}", rows, quantize, _write_part(library, kind, rows))
    return str(module)


class _Library:
    """What the code calls."""

    def __init__(self, module: Any) -> None:
        def declare(name: str, result: Any, *arguments: Any) -> Any:
            return ir.Function(module, ir.FunctionType(result, arguments), name)

        self.module = module
        self.multiply_add_pairs = declare("llvm.x86.avx2.pmadd.wd", _INTS, _HALVES, _HALVES)
        self.to_ints = declare("llvm.x86.avx.cvt.ps2dq.256", _INTS, _FLOATS)
        self.larger = declare("llvm.maximum.v8f32", _FLOATS, _FLOATS, _FLOATS)
        self.magnitude = declare("llvm.fabs.v8f32", _FLOATS, _FLOATS)
        self.fma = declare("llvm.fma.v8f32", _FLOATS, _FLOATS, _FLOATS, _FLOATS)
        self.thread = declare("omp_get_thread_num", _I32)
        self.team = declare("omp_get_num_threads", _I32)
        self.in_parallel = declare("GOMP_parallel", _VOID, _POINTER, _POINTER, _I32, _I32)

    def function(self, name: str, *arguments: Any, internal: bool = True) -> tuple[Any, Any]:
        """A function to write, and a builder at its start."""
        function = ir.Function(self.module, ir.FunctionType(_VOID, arguments), name)
        function.linkage = "internal" if internal else "external"
        return function, ir.IRBuilder(function.append_basic_block())


def _write_quantize(library: _Library) -> Any:
    """quantize(x, codes, sums, scales, rows, groups): of rows of x the 16-bit codes as (groups, rows, GROUP), the sums
    of each group's, scaled, as (rows, PADDED groups) floats, the scales as (groups, rows) floats."""
    function, b = library.function("quantize", *[_POINTER] * 4, *[_I64] * 2)
    x, codes, sums, scales, rows, groups = function.args

    def of_row(row: Value, _: Sequence[Value]) -> None:
        source = b.gep(x, [b.mul(b.mul(row, groups), _I64(2 * GROUP))])
        own_sums = b.gep(sums, [b.mul(b.mul(row, _padded(b, groups)), _I64(4))])

        def of_group(group: Value, _: Sequence[Value]) -> None:
            place = b.add(b.mul(group, rows), row)
            target = b.gep(codes, [b.mul(place, _I64(2 * GROUP))])
            scale, total = _encode_group(library, b, _group_floats(b, source, group), target)
            _store(b, scale, scales, b.mul(place, _I64(4)))
            _store(b, b.fmul(total, scale), own_sums, b.mul(group, _I64(4)))

        def fill(group: Value, _: Sequence[Value]) -> None:
            _store(b, _F32(0), own_sums, b.mul(group, _I64(4)))

        _loop(b, _I64(0), groups, 1, of_group)
        _loop(b, groups, _padded(b, groups), 1, fill)

    _loop(b, _I64(0), rows, 1, of_row)
    b.ret_void()
    return function


def _group_floats(b: Any, row: Value, group: Value) -> list[Value]:
    at = b.gep(row, [b.mul(group, _I64(2 * GROUP))])
    return [_widened(b, _load(b, at, 2 * _LANES * n, _BFLOATS)) for n in range(GROUP // _LANES)]


def _encode_group(library: _Library, b: Any, floats: Sequence[Value], target: Value) -> tuple[Value, Value]:
    """Stores the codes; gives their scale, and their sum as a float."""
    best = _FLOATS(None)
    for part in floats:
        best = b.call(library.larger, [best, b.call(library.magnitude, [part])])
    for shift in (4, 2, 1):
        turned = b.shuffle_vector(best, best, _INTS([(lane + shift) % _LANES for lane in range(_LANES)]))
        best = b.call(library.larger, [best, turned])
    limit = _FLOATS([_LIMIT] * _LANES)
    counts = b.fcmp_ordered(">", best, _FLOATS([_SMALLEST] * _LANES))
    inverse = b.select(counts, b.fdiv(limit, best), _FLOATS(None))
    whole = [b.call(library.to_ints, [b.fmul(part, inverse)]) for part in floats]
    for n, part in enumerate(whole):
        _store(b, b.trunc(part, _BFLOATS), target, 2 * _LANES * n)
    total = _across(b, b.add(b.add(whole[0], whole[1]), b.add(whole[2], whole[3])), b.add)
    return b.extract_element(b.fdiv(best, limit), _I32(0)), b.sitofp(total, _F32)


def _write_part(library: _Library, kind: str, rows: int) -> Any:
    """part(arguments): one thread's tiles, all rows; the arguments are those that the entry stores."""
    function, b = library.function(f"{kind}_{rows}_part", _POINTER)
    fields = [_load(b, function.args[0], 8 * n, t, 8) for n, t in enumerate([_POINTER] * 6 + [_I64] * 2)]
    part = _Part(library, b, kind, rows, *fields)
    thread, team = (b.sext(b.call(asked, []), _I64) for asked in (library.thread, library.team))
    begin = b.sdiv(b.mul(part.tiles, thread), team)
    end = b.sdiv(b.mul(part.tiles, b.add(thread, _I64(1))), team)
    _loop(b, begin, end, 1, part.write_tile)
    b.ret_void()
    return function


@dataclass(frozen=True, slots=True)
class _Part:
    """Writes what one thread does; the values are the entry's arguments and what `quantize` made of the rows."""

    library: _Library
    b: Any
    kind: str
    rows: int
    out: Value
    weights: Value
    beside: Value
    codes: Value
    sums: Value
    scales: Value
    tiles: Value
    groups: Value

    def write_tile(self, tile: Value, _: Sequence[Value]) -> None:
        at_once = _AT_ONCE.get(self.rows, 1)
        for first in range(0, TILE, at_once):
            lanes = range(first, first + at_once)
            found = self._products(tile, lanes)
            if self.kind == "int4":
                found = self._with_zeros(tile, lanes, found)
            for n, total in enumerate(found):
                lane, row = divmod(n, self.rows)
                self._store_number(tile, first + lane, row, total)

    def _products(self, tile: Value, lanes: range) -> list[Value]:
        """For each of a tile's `lanes` and each row eight floats that add up to weights · row; in eight bits without
        the output row's scale, in four without the zeros."""
        b = self.b
        group_bytes = _I64(TILE * (GROUP if self.kind == "int8" else 2 + GROUP // 2))
        weights = b.gep(self.weights, [b.mul(tile, b.mul(self.groups, group_bytes))])
        read: Callable[[Value, int], tuple[list[Value], Value | None]] = (
            self._read_8 if self.kind == "int8" else self._read_4
        )

        def of_group(group: Value, floats: Sequence[Value]) -> list[Value]:
            at = b.gep(weights, [b.mul(group, group_bytes)])
            found = []
            for n, lane in enumerate(lanes):
                pair, weight_scale = read(at, lane)
                for row in range(self.rows):
                    old = floats[n * self.rows + row]
                    found.append(self._add_product(pair, weight_scale, group, row, old))
            return found

        return _loop(b, _I64(0), self.groups, 1, of_group, [_FLOATS(None)] * (len(lanes) * self.rows))

    def _read_8(self, at: Value, lane: int) -> tuple[list[Value], None]:
        halves = [_load(self.b, at, lane * GROUP + half, ir.VectorType(_I8, 16)) for half in (0, 16)]
        return [self.b.sext(half, _HALVES) for half in halves], None

    def _read_4(self, at: Value, lane: int) -> tuple[list[Value], Value]:
        """A lane's codes, and its scale in eight floats."""
        b = self.b
        two_scales = _splat(b, _load(b, at, 4 * (lane // 2), _I32, 4), _INTS)
        scale = b.shl(two_scales, _INTS([16] * 8)) if lane % 2 == 0 else b.and_(two_scales, _INTS([-65536] * 8))
        both = b.sext(_load(b, at, 2 * TILE + lane * GROUP // 2, ir.VectorType(_I8, 16)), _HALVES)
        low = b.ashr(b.shl(both, _HALVES([12] * 16)), _HALVES([12] * 16))
        return [low, b.ashr(both, _HALVES([4] * 16))], b.bitcast(scale, _FLOATS)

    def _add_product(self, pair: list[Value], weight_scale: Value | None, group: Value, row: int, old: Value) -> Value:
        b = self.b
        place = b.add(b.mul(group, _I64(self.rows)), _I64(row))
        at = b.gep(self.codes, [b.mul(place, _I64(2 * GROUP))])
        halves = [_load(b, at, GROUP * n, _HALVES) for n in range(2)]
        low, high = (b.call(self.library.multiply_add_pairs, [w, x]) for w, x in zip(pair, halves, strict=True))
        scale = _splat(b, _load(b, self.scales, b.mul(place, _I64(4)), _F32, 4), _FLOATS)
        if weight_scale is not None:
            scale = b.fmul(scale, weight_scale)
        return b.call(self.library.fma, [b.sitofp(b.add(low, high), _FLOATS), scale, old])

    def _with_zeros(self, tile: Value, lanes: range, products: list[Value]) -> list[Value]:
        """Each group's zero times the row's sum added."""
        b = self.b
        padded = _padded(b, self.groups)
        zeros = b.gep(self.beside, [b.mul(tile, b.mul(padded, _I64(2 * TILE)))])

        def of_groups(group: Value, floats: Sequence[Value]) -> list[Value]:
            found = list(floats)
            for n, lane in enumerate(lanes):
                at = b.mul(b.add(b.mul(padded, _I64(lane)), group), _I64(2))
                own = _widened(b, _load(b, zeros, at, _BFLOATS))
                for row in range(self.rows):
                    place = b.mul(b.add(b.mul(padded, _I64(row)), group), _I64(4))
                    which = n * self.rows + row
                    sums = _load(b, self.sums, place, _FLOATS, 4)
                    found[which] = b.call(self.library.fma, [own, sums, found[which]])
            return found

        return _loop(b, _I64(0), self.groups, PADDED, of_groups, products)

    def _store_number(self, tile: Value, lane: int, row: int, total: Value) -> None:
        b = self.b
        column = b.add(b.mul(tile, _I64(TILE)), _I64(lane))
        value = _across(b, total, b.fadd)
        if self.kind == "int8":
            value = b.fmul(value, _widened_one(b, _load(b, self.beside, b.mul(column, _I64(2)), _I16)))
        place = b.add(b.mul(b.mul(self.tiles, _I64(TILE)), _I64(row)), column)
        _store(b, _rounded(b, value), self.out, b.mul(place, _I64(2)))


def _write_entry(library: _Library, name: str, rows: int, quantize: Any, part: Any) -> None:
    function, b = library.function(name, *[_POINTER] * 4, *[_I64] * 2, _I32, internal=False)
    x, out, weights, beside, tiles, groups, threads = function.args
    codes = b.alloca(_I8, b.mul(groups, _I64(2 * GROUP * rows)))
    codes.align = 64
    sums = b.alloca(_I8, b.mul(_padded(b, groups), _I64(4 * rows)))
    scales = b.alloca(_I8, b.mul(groups, _I64(4 * rows)))
    b.call(quantize, [x, codes, sums, scales, _I64(rows), groups])
    arguments = b.bitcast(b.alloca(_I64, 8), _POINTER)
    for n, value in enumerate((out, weights, beside, codes, sums, scales, tiles, groups)):
        _store(b, value, arguments, 8 * n, 8)
    with b.if_else(b.icmp_signed(">", threads, _I32(1))) as (several, one):
        with several:
            b.call(library.in_parallel, [b.bitcast(part, _POINTER), arguments, threads, _I32(0)])
        with one:
            b.call(part, [arguments])
    b.ret_void()


def _loop(
    b: Any,
    begin: Value,
    end: Value,
    step: int,
    body: Callable[[Value, Sequence[Value]], Sequence[Value] | None],
    carried: Sequence[Value] = (),
) -> list[Value]:
    """for i in range(begin, end, step): carried = body(i, carried). Gives what is carried out of it."""
    before, inside, after = b.block, b.append_basic_block(), b.append_basic_block()
    b.cbranch(b.icmp_signed("<", begin, end), inside, after)
    b.position_at_end(inside)
    index = b.phi(_I64)
    entering = [b.phi(value.type) for value in carried]
    leaving = body(index, entering) or ()
    following, last = b.add(index, _I64(step)), b.block
    b.cbranch(b.icmp_signed("<", following, end), inside, after)
    for phi, first, next_one in zip([index, *entering], [begin, *carried], [following, *leaving], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(next_one, last)
    b.position_at_end(after)
    results = []
    for first, final in zip(carried, leaving, strict=True):
        result = b.phi(first.type)
        result.add_incoming(first, before)
        result.add_incoming(final, last)
        results.append(result)
    return results


def _padded(b: Any, groups: Value) -> Value:
    return b.and_(b.add(groups, _I64(PADDED - 1)), _I64(-PADDED))


def _place(b: Any, pointer: Value, offset: Value | int, kind: Any) -> Value:
    moved = b.gep(pointer, [_I64(offset) if isinstance(offset, int) else offset])
    return b.bitcast(moved, kind.as_pointer())


def _load(b: Any, pointer: Value, offset: Value | int, kind: Any, align: int = 1) -> Value:
    return b.load(_place(b, pointer, offset, kind), align=align)


def _store(b: Any, value: Value, pointer: Value, offset: Value | int, align: int = 1) -> None:
    b.store(value, _place(b, pointer, offset, value.type), align=align)


def _splat(b: Any, value: Value, kind: Any) -> Value:
    nothing = kind(ir.Undefined)
    return b.shuffle_vector(b.insert_element(nothing, value, _I32(0)), nothing, _INTS(None))


def _across(b: Any, vector: Value, add: Callable[[Value, Value], Value]) -> Value:
    """The eight lanes' sum."""
    count = _LANES
    while count > 1:
        count //= 2
        low, high = ([_I32(lane) for lane in range(start, start + count)] for start in (0, count))
        mask = ir.VectorType(_I32, count)
        vector = add(*(b.shuffle_vector(vector, vector, mask(half)) for half in (low, high)))
    return b.extract_element(vector, _I32(0))


def _widened(b: Any, bfloats: Value) -> Value:
    return b.bitcast(b.shl(b.zext(bfloats, _INTS), _INTS([16] * _LANES)), _FLOATS)


def _widened_one(b: Any, bfloat: Value) -> Value:
    return b.bitcast(b.shl(b.zext(bfloat, _I32), _I32(16)), _F32)


def _rounded(b: Any, value: Value) -> Value:
    """float32 → bfloat16's 16 bits, to the nearest, ties to even."""
    bits = b.bitcast(value, _I32)
    odd = b.and_(b.lshr(bits, _I32(16)), _I32(1))
    return b.trunc(b.lshr(b.add(bits, b.add(odd, _I32(0x7FFF))), _I32(16)), _I16)
