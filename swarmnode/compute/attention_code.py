"""The LLVM code of attention of one position of each of a few sessions, over their own keys and values.

First each row's query and key heads are normed where a gain says so and turned, and key and value written behind the
session's past. Then every thread takes its share of (row, head): scores, softmax and sum of values block by block of
positions, rescaled whenever a block holds a larger score, so that nothing grows with the past.

Keys and values are read by sixteen numbers in the order that is fastest (`Numbers.sixteen`). So queries lie in that
order, and so do the sums of values until they are stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir

from swarmnode.compute.block_layout import BLOCK_SLOTS, SESSION_SLOTS, STEP_SLOTS
from swarmnode.compute.llvm_code import (
    F32,
    FLOATS,
    I32,
    I64,
    LANES,
    POINTER,
    Record,
    across,
    at,
    floats,
    handed,
    load,
    loop,
    splat,
    store,
    where_given,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarmnode.compute.llvm_code import Library, Numbers, Value

_SIXTEEN = 2 * LANES
"""Entries of a head that are read at once; head sizes are multiples of it."""
_POSITIONS = 32
"""Of a block between two rescalings."""
_AT_ONCE = 4
"""Positions scored together: their sums end in one vector."""
_LARGE = 4
"""Sixteens of a head whose sums of values are held in registers together; of a rest one by one."""
_LOWEST = -1e30
"""Below every score, and not so low that a difference of two is no number."""
_FOUR = ir.VectorType(F32, _AT_ONCE)


def write_attention(library: Library, numbers: Numbers) -> Any:
    """attend(block, step): records of BLOCK_SLOTS and STEP_SLOTS; from `qkv` to `attended`."""
    place, part = _write_place(library, numbers), _write_part(library, numbers)
    function, b = library.function("attend", POINTER, POINTER)
    block, step = function.args
    asked = Record(b, step, STEP_SLOTS)

    def of_row(row: Value, _: Sequence[Value]) -> None:
        b.call(place, [block, step, row])

    loop(b, I64(0), asked("count"), 1, of_row)
    library.run(b, part, (block, step), asked("threads", I32))
    b.ret_void()
    return function


def _write_place(library: Library, numbers: Numbers) -> Any:
    """place(block, step, row): the row's queries turned and scaled, its key and value written behind the past."""
    function, b = library.function("place", POINTER, POINTER, I64)
    pointers, row = function.args[:2], function.args[2]
    block, step = (
        Record(b, pointer, names) for pointer, names in zip(pointers, (BLOCK_SLOTS, STEP_SLOTS), strict=True)
    )
    dim, heads, kv_heads = block("head_dim"), block("heads"), block("kv_heads")
    session = Record(b, at(b, step.pointer("sessions"), row, 8 * len(SESSION_SLOTS)), SESSION_SLOTS)
    cos, sin = (at(b, step.pointer(name), b.mul(row, dim), numbers.size) for name in ("cos", "sin"))
    turn = _Turn(library, b, numbers, dim, block("rotates"), cos, sin)
    own = at(b, step.pointer("qkv"), b.mul(row, b.mul(dim, b.add(heads, b.mul(kv_heads, I64(2))))), numbers.size)
    queries = at(b, step.pointer("queries"), b.mul(row, b.mul(heads, dim)), 4)

    def of_query(head: Value, _: Sequence[Value]) -> None:
        source, target = at(b, own, b.mul(head, dim), numbers.size), at(b, queries, b.mul(head, dim), 4)
        turn.head(source, target, block.pointer("query_gain"), block("query_eps", F32))
        _order(b, numbers, target, dim, splat(b, block("scaling", F32), FLOATS))

    def of_key(head: Value, _: Sequence[Value]) -> None:
        place = b.mul(b.add(b.mul(head, session("capacity")), session("length")), dim)
        key_source = at(b, own, b.mul(b.add(heads, head), dim), numbers.size)
        value_source = at(b, own, b.mul(b.add(b.add(heads, kv_heads), head), dim), numbers.size)
        turn.head(key_source, turn.room, block.pointer("key_gain"), block("key_eps", F32))
        keys, values = (at(b, session.pointer(name), place, numbers.size) for name in ("keys", "values"))

        def of_eight(n: Value, _: Sequence[Value]) -> None:
            numbers.store_eight(b, load(b, at(b, turn.room, n, 4), 0, FLOATS), at(b, keys, n, numbers.size))
            value = numbers.eight(b, at(b, value_source, n, numbers.size))
            numbers.store_eight(b, value, at(b, values, n, numbers.size))

        loop(b, I64(0), dim, LANES, of_eight)

    loop(b, I64(0), heads, 1, of_query)
    loop(b, I64(0), kv_heads, 1, of_key)
    b.ret_void()
    return function


class _Turn:
    """Writes what norms and turns one head. `room`: for a head in float32, the function's own."""

    def __init__(
        self, library: Library, b: Any, numbers: Numbers, dim: Value, rotates: Value, cos: Value, sin: Value
    ) -> None:
        self._library, self._b, self._numbers, self._dim = library, b, numbers, dim
        self._rotates, self._cos, self._sin = rotates, cos, sin
        self._normed, self.room = (b.bitcast(b.alloca(F32, dim), POINTER) for _ in range(2))

    def head(self, source: Value, target: Value, gain: Value, eps: Value) -> None:
        """A head → in float32, normed where the gain is not null, turned where the block rotates."""
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
        return self._numbers.eight(self._b, at(self._b, head, index, self._numbers.size))


def _order(b: Any, numbers: Numbers, head: Value, dim: Value, scaling: Value) -> None:
    """In place: floats in the order in which keys are read, all times `scaling`."""

    def of_sixteen(n: Value, _: Sequence[Value]) -> None:
        place = at(b, head, n, 4)
        two = [b.fmul(load(b, place, 4 * LANES * half, FLOATS), scaling) for half in range(2)]
        for half, part in enumerate(numbers.in_that_order(b, *two)):
            store(b, part, place, 4 * LANES * half)

    loop(b, I64(0), dim, _SIXTEEN, of_sixteen)


def _write_part(library: Library, numbers: Numbers) -> Any:
    """part([block, step]): one thread's share of (row, head)."""
    function, b = library.function("attend_part", POINTER)
    records = zip(handed(b, function.args[0], pointers=2), (BLOCK_SLOTS, STEP_SLOTS), strict=True)
    block, step = (Record(b, pointer, names) for pointer, names in records)
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
        keys, values = (at(b, session.pointer(name), first, numbers.size) for name in ("keys", "values"))
        query = at(b, step.pointer("queries"), b.mul(unit, dim), 4)
        head_part = _Head(library, b, numbers, dim, query, keys, values, scores, sums)
        total = head_part.sum_up(begin, end)
        head_part.finish(at(b, step.pointer("attended"), b.mul(unit, dim), numbers.size), total)

    loop(b, *library.own_share(b, b.mul(step("count"), heads)), 1, of_unit)
    b.ret_void()
    return function


class _Head:
    """Writes what one head of one row does. `scores`: room for a block of positions; `sums`: for a head's values."""

    def __init__(
        self,
        library: Library,
        b: Any,
        numbers: Numbers,
        dim: Value,
        query: Value,
        keys: Value,
        values: Value,
        scores: Value,
        sums: Value,
    ) -> None:
        self._library, self._b, self._numbers, self._dim = library, b, numbers, dim
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
        size = self._numbers.size
        keys = [at(b, self._keys, b.mul(b.add(position, I64(n)), self._dim), size) for n in range(count)]

        def of_sixteen(n: Value, sums: Sequence[Value]) -> list[Value]:
            query = [load(b, at(b, self._query, n, 4), 4 * LANES * half, FLOATS) for half in range(2)]
            found = []
            for key, sum_ in zip(keys, sums, strict=True):
                for own, other in zip(query, self._numbers.sixteen(b, at(b, key, n, size)), strict=True):
                    sum_ = b.call(self._library.fma, [own, other, sum_])
                found.append(sum_)
            return found

        return loop(b, I64(0), self._dim, _SIXTEEN, of_sixteen, [FLOATS(None)] * count)

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
        large = b.mul(b.sdiv(self._dim, I64(_LARGE * _SIXTEEN)), I64(_LARGE * _SIXTEEN))
        for begin, end, sixteens in ((I64(0), large, _LARGE), (large, self._dim, 1)):
            self._add_values(begin, end, sixteens, first, count, factor)
        return [best_one, total]

    def _larger(self, one: Value, two: Value) -> Value:
        """Without care for NaN, which the weights and so the sums become anyway."""
        return self._b.select(self._b.fcmp_ordered(">", one, two), one, two)

    def _add_values(self, begin: Value, end: Value, sixteens: int, first: Value, count: Value, factor: Value) -> None:
        """To the entries begin … end-1 of the sums, so many sixteens at a time, those of before times `factor`."""
        b, size = self._b, self._numbers.size

        def of_entries(entry: Value, _: Sequence[Value]) -> None:
            sums = at(b, self._sums, entry, 4)
            values = at(b, self._values, b.add(b.mul(first, self._dim), entry), size)

            def of_position(n: Value, old: Sequence[Value]) -> list[Value]:
                weight = splat(b, load(b, at(b, self._scores, n, 4), 0, F32), FLOATS)
                own = at(b, values, b.mul(n, self._dim), size)
                offsets = (size * _SIXTEEN * n for n in range(sixteens))
                read = [part for offset in offsets for part in self._numbers.sixteen(b, own, offset)]
                return [b.call(self._library.fma, [weight, part, sum_]) for part, sum_ in zip(read, old, strict=True)]

            before = [b.fmul(load(b, sums, 4 * LANES * n, FLOATS), factor) for n in range(2 * sixteens)]
            for n, sum_ in enumerate(loop(b, I64(0), count, 1, of_position, before)):
                store(b, sum_, sums, 4 * LANES * n)

        loop(b, begin, end, sixteens * _SIXTEEN, of_entries)

    def finish(self, target: Value, total: Value) -> None:
        """The sums over `total`, in the order of the head."""
        b = self._b
        inverse = splat(b, b.fdiv(F32(1.0), total), FLOATS)

        def of_sixteen(n: Value, _: Sequence[Value]) -> None:
            sums = at(b, self._sums, n, 4)
            parts = [b.fmul(load(b, sums, 4 * LANES * half, FLOATS), inverse) for half in range(2)]
            self._numbers.store_sixteen(b, parts, at(b, target, n, self._numbers.size))

        loop(b, I64(0), self._dim, _SIXTEEN, of_sixteen)
