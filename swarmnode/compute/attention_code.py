"""The LLVM code of attention of one position of each of a few sessions, over their own keys and values.

First each row's query and key heads are normed where a gain says so and turned, and key and value written behind the
session's past. Then every thread takes its share of (row, head): scores, softmax and sum of values block by block of
positions, rescaled whenever a block holds a larger score, so that nothing grows with the past.

Of sixteen bfloat16, read as eight numbers of 32 bits, the odd entries are the upper halves and the even ones the lower:
two instructions make floats of them. So queries lie with the even ones of sixteen first, then the odd ones, and so do
the sums of values until they are rounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir

from swarmnode.compute.block_layout import BLOCK_SLOTS, SESSION_SLOTS, STEP_SLOTS
from swarmnode.compute.llvm_code import (
    BFLOATS,
    F32,
    FLOATS,
    I32,
    I64,
    INTS,
    LANES,
    POINTER,
    Record,
    across,
    at,
    floats,
    load,
    loop,
    rounded,
    splat,
    store,
    where_given,
    widened,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarmnode.compute.llvm_code import Library, Value

_PAIRS = 2 * LANES
"""Entries of a head that are read at once; head sizes are multiples of it."""
_POSITIONS = 32
"""Of a block between two rescalings."""
_AT_ONCE = 4
"""Positions scored together: their sums end in one vector."""
_LARGE_PAIRS = 4
"""Sixteens of a head whose sums of values are held in registers together; of a rest one by one."""
_LOWEST = -1e30
"""Below every score, and not so low that a difference of two is no number."""
_FOUR = ir.VectorType(F32, _AT_ONCE)


def write_attention(library: Library) -> Any:
    """attend(block, step): records of BLOCK_SLOTS and STEP_SLOTS; from `qkv` to `attended`."""
    place, part = _write_place(library), _write_part(library)
    function, b = library.function("attend", POINTER, POINTER)
    block, step = function.args
    asked = Record(b, step, STEP_SLOTS)

    def of_row(row: Value, _: Sequence[Value]) -> None:
        b.call(place, [block, step, row])

    loop(b, I64(0), asked("count"), 1, of_row)
    library.run(b, part, (block, step), asked("threads", I32))
    b.ret_void()
    return function


def _write_place(library: Library) -> Any:
    """place(block, step, row): the row's queries turned and scaled, its key and value written behind the past."""
    function, b = library.function("place", POINTER, POINTER, I64)
    pointers, row = function.args[:2], function.args[2]
    block, step = (
        Record(b, pointer, names) for pointer, names in zip(pointers, (BLOCK_SLOTS, STEP_SLOTS), strict=True)
    )
    dim, heads, kv_heads = block("head_dim"), block("heads"), block("kv_heads")
    session = Record(b, at(b, step.pointer("sessions"), row, 8 * len(SESSION_SLOTS)), SESSION_SLOTS)
    cos, sin = (at(b, step.pointer(name), b.mul(row, dim), 2) for name in ("cos", "sin"))
    turn = _Turn(library, b, dim, block("rotates"), cos, sin)
    own = at(b, step.pointer("qkv"), b.mul(row, b.mul(dim, b.add(heads, b.mul(kv_heads, I64(2))))), 2)
    queries = at(b, step.pointer("queries"), b.mul(row, b.mul(heads, dim)), 4)

    def of_query(head: Value, _: Sequence[Value]) -> None:
        source, target = at(b, own, b.mul(head, dim), 2), at(b, queries, b.mul(head, dim), 4)
        turn.head(source, target, block.pointer("query_gain"), block("query_eps", F32))
        _part_pairs(b, target, dim, splat(b, block("scaling", F32), FLOATS))

    def of_key(head: Value, _: Sequence[Value]) -> None:
        place = b.mul(b.add(b.mul(head, session("capacity")), session("length")), dim)
        key_source = at(b, own, b.mul(b.add(heads, head), dim), 2)
        value_source = at(b, own, b.mul(b.add(b.add(heads, kv_heads), head), dim), 2)
        turn.head(key_source, turn.room, block.pointer("key_gain"), block("key_eps", F32))
        keys, values = (at(b, session.pointer(name), place, 2) for name in ("keys", "values"))

        def of_eight(n: Value, _: Sequence[Value]) -> None:
            store(b, rounded(b, load(b, at(b, turn.room, n, 4), 0, FLOATS)), at(b, keys, n, 2), 0)
            store(b, load(b, at(b, value_source, n, 2), 0, BFLOATS), at(b, values, n, 2), 0)

        loop(b, I64(0), dim, LANES, of_eight)

    loop(b, I64(0), heads, 1, of_query)
    loop(b, I64(0), kv_heads, 1, of_key)
    b.ret_void()
    return function


class _Turn:
    """Writes what norms and turns one head. `room`: for a head in float32, the function's own."""

    def __init__(self, library: Library, b: Any, dim: Value, rotates: Value, cos: Value, sin: Value) -> None:
        self._library, self._b, self._dim = library, b, dim
        self._rotates, self._cos, self._sin = rotates, cos, sin
        self._normed, self.room = (b.bitcast(b.alloca(F32, dim), POINTER) for _ in range(2))

    def head(self, source: Value, target: Value, gain: Value, eps: Value) -> None:
        """A head in bfloat16 → in float32, normed where the gain is not null, turned where the block rotates."""
        b, dim = self._b, self._dim
        unchanged = floats(1.0)
        (inverse,) = where_given(b, gain, [unchanged], lambda: [self._inverse_norm(source, eps)])

        def norm(n: Value, _: Sequence[Value]) -> None:
            value = b.fmul(self._eight(source, n), inverse)
            own_gain = where_given(b, gain, [unchanged], lambda: [load(b, at(b, gain, n, 4), 0, FLOATS)])
            store(b, b.fmul(value, own_gain[0]), at(b, self._normed, n, 4), 0)

        def turn(n: Value, _: Sequence[Value]) -> None:
            other = b.add(n, half)
            low, high = (load(b, at(b, self._normed, index, 4), 0, FLOATS) for index in (n, other))
            for index, value, partner in ((n, low, high), (other, high, low)):
                turned = b.fmul(partner, self._eight(self._sin, index))
                turned = b.call(self._library.fma, [value, self._eight(self._cos, index), turned])
                store(b, turned, at(b, target, index, 4), 0)

        def keep(n: Value, _: Sequence[Value]) -> None:
            store(b, load(b, at(b, self._normed, n, 4), 0, FLOATS), at(b, target, n, 4), 0)

        loop(b, I64(0), dim, LANES, norm)
        half = b.sdiv(dim, I64(2))
        with b.if_else(b.icmp_signed("!=", self._rotates, I64(0))) as (rotates, stays):
            with rotates:
                loop(b, I64(0), half, LANES, turn)
            with stays:
                loop(b, I64(0), dim, LANES, keep)

    def _inverse_norm(self, source: Value, eps: Value) -> Value:
        b = self._b

        def add(n: Value, sums: Sequence[Value]) -> list[Value]:
            value = self._eight(source, n)
            return [b.call(self._library.fma, [value, value, sums[0]])]

        (squares,) = loop(b, I64(0), self._dim, LANES, add, [FLOATS(None)])
        return self._library.inverse_norm(b, squares, self._dim, eps)

    def _eight(self, head: Value, index: Value) -> Value:
        return widened(self._b, load(self._b, at(self._b, head, index, 2), 0, BFLOATS))


def _part_pairs(b: Any, head: Value, dim: Value, scaling: Value) -> None:
    """In place: of each sixteen floats the even ones first, all times `scaling`."""

    def of_pairs(n: Value, _: Sequence[Value]) -> None:
        place = at(b, head, n, 4)
        two = [b.fmul(load(b, place, 4 * LANES * half, FLOATS), scaling) for half in range(2)]
        for odd in range(2):
            store(b, b.shuffle_vector(*two, INTS([2 * lane + odd for lane in range(LANES)])), place, 4 * LANES * odd)

    loop(b, I64(0), dim, _PAIRS, of_pairs)


def _read_pairs(b: Any, place: Value, offset: int = 0) -> list[Value]:
    """Sixteen bfloat16 as floats: the even ones, the odd ones."""
    both = load(b, place, offset, INTS)
    halves = b.shl(both, INTS([16] * LANES)), b.and_(both, INTS([-65536] * LANES))
    return [b.bitcast(half, FLOATS) for half in halves]


def _write_part(library: Library) -> Any:
    """part([block, step]): one thread's share of (row, head)."""
    function, b = library.function("attend_part", POINTER)
    block, step = (
        Record(b, load(b, function.args[0], 8 * n, POINTER, 8), names)
        for n, names in enumerate((BLOCK_SLOTS, STEP_SLOTS))
    )
    dim, heads = block("head_dim"), block("heads")
    group = b.sdiv(heads, block("kv_heads"))
    scores, sums = (b.bitcast(b.alloca(F32, size), POINTER) for size in (I64(_POSITIONS), dim))

    def of_unit(unit: Value, _: Sequence[Value]) -> None:
        row, head = b.sdiv(unit, heads), b.srem(unit, heads)
        session = Record(b, at(b, step.pointer("sessions"), row, 8 * len(SESSION_SLOTS)), SESSION_SLOTS)
        end, window = b.add(session("length"), I64(1)), block("window")
        windowed = b.and_(b.icmp_signed(">", window, I64(0)), b.icmp_signed(">", end, window))
        begin = b.select(windowed, b.sub(end, window), I64(0))
        first = b.mul(b.mul(b.sdiv(head, group), session("capacity")), dim)
        keys, values = (at(b, session.pointer(name), first, 2) for name in ("keys", "values"))
        query = at(b, step.pointer("queries"), b.mul(unit, dim), 4)
        head_part = _Head(library, b, dim, query, keys, values, scores, sums)
        total = head_part.sum_up(begin, end)
        head_part.finish(at(b, step.pointer("attended"), b.mul(unit, dim), 2), total)

    loop(b, *library.own_share(b, b.mul(step("count"), heads)), 1, of_unit)
    b.ret_void()
    return function


class _Head:
    """Writes what one head of one row does. `scores`: room for a block of positions; `sums`: for a head's values."""

    def __init__(
        self, library: Library, b: Any, dim: Value, query: Value, keys: Value, values: Value, scores: Value, sums: Value
    ) -> None:
        self._library, self._b, self._dim = library, b, dim
        self._query, self._keys, self._values, self._scores, self._sums = query, keys, values, scores, sums

    def sum_up(self, begin: Value, end: Value) -> Value:
        """Adds e^score times value of each position; gives the sum of e^score. Both over e^(the largest score)."""
        b = self._b

        def clear(n: Value, _: Sequence[Value]) -> None:
            store(b, FLOATS(None), at(b, self._sums, n, 4), 0)

        def of_block(first: Value, carried: Sequence[Value]) -> list[Value]:
            largest, total = carried
            left = b.sub(end, first)
            count = b.select(b.icmp_signed("<", left, I64(_POSITIONS)), left, I64(_POSITIONS))
            self._score(first, count)
            return self._add_block(first, count, largest, total)

        loop(b, I64(0), self._dim, LANES, clear)
        _, total = loop(b, begin, end, _POSITIONS, of_block, [F32(_LOWEST), FLOATS(None)])
        return across(b, total, b.fadd)

    def _score(self, first: Value, count: Value) -> None:
        b = self._b
        for n in range(0, _POSITIONS, LANES):
            store(b, floats(_LOWEST), self._scores, 4 * n)
        whole = b.and_(count, I64(-_AT_ONCE))

        def of_four(n: Value, _: Sequence[Value]) -> None:
            one, two, three, four = self._products(b.add(first, n), _AT_ONCE)
            near = [b.call(self._library.add_neighbours, pair) for pair in ([one, two], [three, four])]
            sums = b.call(self._library.add_neighbours, near)
            low, high = (
                b.shuffle_vector(sums, sums, ir.VectorType(I32, _AT_ONCE)(list(range(start, start + _AT_ONCE))))
                for start in (0, _AT_ONCE)
            )
            store(b, b.fadd(low, high), self._scores, b.mul(n, I64(4)))

        def of_one(n: Value, _: Sequence[Value]) -> None:
            (product,) = self._products(b.add(first, n), 1)
            store(b, across(b, product, b.fadd), self._scores, b.mul(n, I64(4)))

        loop(b, I64(0), whole, _AT_ONCE, of_four)
        loop(b, whole, count, 1, of_one)

    def _products(self, position: Value, count: int) -> list[Value]:
        """Of the query and so many keys, eight floats each that add up to their product."""
        b = self._b
        keys = [at(b, self._keys, b.mul(b.add(position, I64(n)), self._dim), 2) for n in range(count)]

        def of_pairs(n: Value, sums: Sequence[Value]) -> list[Value]:
            even, odd = (load(b, at(b, self._query, n, 4), 4 * LANES * half, FLOATS) for half in range(2))
            found = []
            for key, old in zip(keys, sums, strict=True):
                key_even, key_odd = _read_pairs(b, at(b, key, n, 2))
                partly = b.call(self._library.fma, [even, key_even, old])
                found.append(b.call(self._library.fma, [odd, key_odd, partly]))
            return found

        return loop(b, I64(0), self._dim, _PAIRS, of_pairs, [FLOATS(None)] * count)

    def _add_block(self, first: Value, count: Value, largest: Value, total: Value) -> list[Value]:
        b = self._b
        parts = [load(b, self._scores, 4 * n, FLOATS) for n in range(0, _POSITIONS, LANES)]
        best = parts[0]
        for part in parts[1:]:
            best = self._larger(best, part)
        best_one = self._larger(largest, across(b, best, self._larger))
        factor = self._library.exp(b, splat(b, b.fsub(largest, best_one), FLOATS))
        total = b.fmul(total, factor)
        for n, part in enumerate(parts):
            weights = self._library.exp(b, b.fsub(part, splat(b, best_one, FLOATS)))
            store(b, weights, self._scores, 4 * LANES * n)
            total = b.fadd(total, weights)
        large = b.mul(b.sdiv(self._dim, I64(_LARGE_PAIRS * _PAIRS)), I64(_LARGE_PAIRS * _PAIRS))
        for begin, end, pairs in ((I64(0), large, _LARGE_PAIRS), (large, self._dim, 1)):
            self._add_values(begin, end, pairs, first, count, factor)
        return [best_one, total]

    def _larger(self, one: Value, two: Value) -> Value:
        """Without care for NaN, which the weights and so the sums become anyway."""
        return self._b.select(self._b.fcmp_ordered(">", one, two), one, two)

    def _add_values(self, begin: Value, end: Value, pairs: int, first: Value, count: Value, factor: Value) -> None:
        """To the entries begin … end-1 of the sums, so many sixteens at a time, those of before times `factor`."""
        b = self._b

        def of_entries(entry: Value, _: Sequence[Value]) -> None:
            sums = at(b, self._sums, entry, 4)
            values = at(b, self._values, b.add(b.mul(first, self._dim), entry), 2)

            def of_position(n: Value, old: Sequence[Value]) -> list[Value]:
                weight = splat(b, load(b, at(b, self._scores, n, 4), 0, F32), FLOATS)
                own = at(b, values, b.mul(n, self._dim), 2)
                read = [part for pair in range(pairs) for part in _read_pairs(b, own, 2 * _PAIRS * pair)]
                return [b.call(self._library.fma, [weight, part, sum_]) for part, sum_ in zip(read, old, strict=True)]

            before = [b.fmul(load(b, sums, 4 * LANES * n, FLOATS), factor) for n in range(2 * pairs)]
            for n, sum_ in enumerate(loop(b, I64(0), count, 1, of_position, before)):
                store(b, sum_, sums, 4 * LANES * n)

        loop(b, begin, end, pairs * _PAIRS, of_entries)

    def finish(self, target: Value, total: Value) -> None:
        """The sums over `total` in bfloat16, in the order of the head."""
        b = self._b
        inverse = splat(b, b.fdiv(F32(1.0), total), FLOATS)

        def of_pairs(n: Value, _: Sequence[Value]) -> None:
            even, odd = (
                b.zext(rounded(b, b.fmul(load(b, at(b, self._sums, n, 4), 4 * LANES * half, FLOATS), inverse)), INTS)
                for half in range(2)
            )
            store(b, b.or_(b.shl(odd, INTS([16] * LANES)), even), at(b, target, n, 2), 0)

        loop(b, I64(0), self._dim, _PAIRS, of_pairs)
