"""What the modules that write LLVM code for x86 CPUs with AVX2 share: types, loops, loads and stores, exp.

`Numbers` is how rows, keys and values lie in memory, in bfloat16 or in float32; all is computed in float32.

Whatever is called on a builder here is code that is written, in the order in which it is to run: LLVM's optimizer does
not pass over it. A vector has LANES numbers of 32 bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from llvmlite import ir

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Value = Any
    """llvmlite is untyped: a value of the code that is written, not a number."""

LANES = 8
I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
POINTER, VOID = I8.as_pointer(), ir.VoidType()
INTS, FLOATS = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
HALVES, BFLOATS = ir.VectorType(I16, 2 * LANES), ir.VectorType(I16, LANES)
_EXP_RANGE = -87.3, 88.3
"""Beyond these e^x is no normal number of 32 bits; it is computed as if x were the nearest of them."""
_LOG2_E = 1.44269504088896341
_LN2 = 0.693359375, -2.12194440e-4
"""In two parts, so that n * ln 2 is exact."""
_EXP_TERMS = 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1
"""Cephes' polynomial for (e^x - 1 - x) / x² within half of ln 2, highest power first: off by 2^-23 of e^x."""


class Library:
    """What the code calls."""

    def __init__(self, module: Any) -> None:
        def declare(name: str, result: Any, *arguments: Any) -> Any:
            return ir.Function(module, ir.FunctionType(result, arguments), name)

        self.module = module
        self.multiply_add_pairs = declare("llvm.x86.avx2.pmadd.wd", INTS, HALVES, HALVES)
        self.to_ints = declare("llvm.x86.avx.cvt.ps2dq.256", INTS, FLOATS)
        self.add_neighbours = declare("llvm.x86.avx.hadd.ps.256", FLOATS, FLOATS, FLOATS)
        self.larger = declare("llvm.maximum.v8f32", FLOATS, FLOATS, FLOATS)
        self.magnitude = declare("llvm.fabs.v8f32", FLOATS, FLOATS)
        self.fma = declare("llvm.fma.v8f32", FLOATS, FLOATS, FLOATS, FLOATS)
        self.root = declare("llvm.sqrt.f32", F32, F32)
        self.prefetch = declare("llvm.prefetch.p0i8", VOID, POINTER, I32, I32, I32)
        self.thread = declare("omp_get_thread_num", I32)
        self.team = declare("omp_get_num_threads", I32)
        self.in_parallel = declare("GOMP_parallel", VOID, POINTER, POINTER, I32, I32)

    def function(self, name: str, *arguments: Any, internal: bool = True) -> tuple[Any, Any]:
        """A function to write, and a builder at its start."""
        function = ir.Function(self.module, ir.FunctionType(VOID, arguments), name)
        function.linkage = "internal" if internal else "external"
        return function, ir.IRBuilder(function.append_basic_block())

    def own_share(self, b: Any, count: Value) -> tuple[Value, Value]:
        """Begin and end of what this thread of the team does of `count`."""
        thread, team = (b.sext(b.call(asked, []), I64) for asked in (self.thread, self.team))
        return b.sdiv(b.mul(count, thread), team), b.sdiv(b.mul(count, b.add(thread, I64(1))), team)

    def run(self, b: Any, part: Any, values: Sequence[Value], threads: Value) -> None:
        """Calls part(record) in each of a team's threads, the record of `values`, 64 bits each, which the part has from
        `handed`; one thread alone needs no team."""
        arguments = b.bitcast(b.alloca(I64, len(values)), POINTER)
        for n, value in enumerate(values):
            store(b, value, arguments, 8 * n, 8)
        with b.if_else(b.icmp_signed(">", threads, I32(1))) as (several, one):
            with several:
                b.call(self.in_parallel, [b.bitcast(part, POINTER), arguments, threads, I32(0)])
            with one:
                b.call(part, [arguments])

    def exp(self, b: Any, x: Value) -> Value:
        """e^x of eight floats, to two units in the last place; NaN stays NaN."""
        low, high = (floats(limit) for limit in _EXP_RANGE)
        x = b.select(b.fcmp_ordered("<", x, low), low, x)
        x = b.select(b.fcmp_ordered(">", x, high), high, x)
        whole = b.call(self.to_ints, [b.fmul(x, floats(_LOG2_E))])
        count = b.sitofp(whole, FLOATS)
        for part in _LN2:
            x = b.call(self.fma, [count, floats(-part), x])
        sum_ = floats(_EXP_TERMS[0])
        for term in _EXP_TERMS[1:]:
            sum_ = b.call(self.fma, [sum_, x, floats(term)])
        sum_ = b.fadd(b.call(self.fma, [sum_, b.fmul(x, x), x]), floats(1.0))
        power = b.shl(b.add(whole, INTS([127] * LANES)), INTS([23] * LANES))
        return b.fmul(sum_, b.bitcast(power, FLOATS))

    def inverse_norm(self, b: Any, squares: Value, count: Value, eps: Value) -> Value:
        """1 / √(mean + eps) in eight lanes, of `squares` that add up to the sum over `count` numbers."""
        mean = b.fdiv(across(b, squares, b.fadd), b.sitofp(count, F32))
        return splat(b, b.fdiv(F32(1.0), b.call(self.root, [b.fadd(mean, eps)])), FLOATS)


def handed(b: Any, record: Value, pointers: int, sizes: int = 0) -> list[Value]:
    """The values of which `Library.run` made a record: so many pointers, then so many integers."""
    return [load(b, record, 8 * n, kind, 8) for n, kind in enumerate([POINTER] * pointers + [I64] * sizes)]


class Record:
    """Numbers of 64 bits one after the other, by their names: pointers, sizes, and floats in the lower half."""

    def __init__(self, b: Any, pointer: Value, names: Sequence[str]) -> None:
        self._b, self._pointer, self._names = b, pointer, names

    def __call__(self, name: str, kind: Any = I64) -> Value:
        return load(self._b, self._pointer, 8 * self._names.index(name), kind, 4)

    def pointer(self, name: str) -> Value:
        return self(name, POINTER)


def loop(
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
    index = b.phi(I64)
    entering = [b.phi(value.type) for value in carried]
    leaving = body(index, entering) or ()
    following, last = b.add(index, I64(step)), b.block
    b.cbranch(b.icmp_signed("<", following, end), inside, after)
    for phi, first, next_one in zip([index, *entering], [begin, *carried], [following, *leaving], strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(next_one, last)
    b.position_at_end(after)
    return _joined(b, carried, before, leaving, last)


def where_given(b: Any, pointer: Value, old: Sequence[Value], make: Callable[[], Sequence[Value]]) -> list[Value]:
    """What `make` gives where the pointer is not null, else `old`."""
    before = b.block
    with b.if_then(b.icmp_unsigned("!=", pointer, POINTER(None))):
        made, last = make(), b.block
    return _joined(b, old, before, made, last)


def _joined(b: Any, values: Sequence[Value], before: Value, others: Sequence[Value], behind: Value) -> list[Value]:
    """`values` where the code came from block `before`, `others` where it came from `behind`."""
    results = []
    for value, other in zip(values, others, strict=True):
        result = b.phi(value.type)
        result.add_incoming(value, before)
        result.add_incoming(other, behind)
        results.append(result)
    return results


def at(b: Any, pointer: Value, index: Value, size: int) -> Value:
    """The address of the entry `index` of so many bytes each."""
    return b.gep(pointer, [b.mul(index, I64(size))])


def load(b: Any, pointer: Value, offset: Value | int, kind: Any, align: int = 1) -> Value:
    """Of type `kind`, so many bytes behind the pointer."""
    return b.load(_place(b, pointer, offset, kind), align=align)


def store(b: Any, value: Value, pointer: Value, offset: Value | int, align: int = 1) -> None:
    b.store(value, _place(b, pointer, offset, value.type), align=align)


def _place(b: Any, pointer: Value, offset: Value | int, kind: Any) -> Value:
    return b.bitcast(_moved(b, pointer, offset), kind.as_pointer())


def _moved(b: Any, pointer: Value, offset: Value | int) -> Value:
    return b.gep(pointer, [I64(offset) if isinstance(offset, int) else offset])


def floats(number: float) -> Value:
    """It in every lane."""
    return FLOATS([number] * LANES)


def splat(b: Any, value: Value, kind: Any) -> Value:
    nothing = kind(ir.Undefined)
    return b.shuffle_vector(b.insert_element(nothing, value, I32(0)), nothing, INTS(None))


def across(b: Any, vector: Value, add: Callable[[Value, Value], Value]) -> Value:
    """All lanes' sum."""
    count = vector.type.count
    while count > 1:
        count //= 2
        low, high = ([I32(lane) for lane in range(start, start + count)] for start in (0, count))
        mask = ir.VectorType(I32, count)
        vector = add(*(b.shuffle_vector(vector, vector, mask(half)) for half in (low, high)))
    return b.extract_element(vector, I32(0))


class Numbers(ABC):
    """How numbers lie in memory; of every pointer the offset counts bytes."""

    size: int
    """Bytes of one."""

    @abstractmethod
    def eight(self, b: Any, pointer: Value, offset: Value | int = 0) -> Value:
        """Eight numbers one after the other, as floats."""

    @abstractmethod
    def store_eight(self, b: Any, value: Value, pointer: Value, offset: Value | int = 0) -> None: ...

    @abstractmethod
    def one(self, b: Any, pointer: Value, offset: Value | int = 0) -> Value: ...

    @abstractmethod
    def store_one(self, b: Any, value: Value, pointer: Value, offset: Value | int = 0) -> None: ...

    @abstractmethod
    def sixteen(self, b: Any, pointer: Value, offset: Value | int = 0) -> list[Value]:
        """Sixteen numbers as floats, eight and eight in the order in which they are read fastest."""

    @abstractmethod
    def in_that_order(self, b: Any, first: Value, last: Value) -> list[Value]:
        """Of sixteen floats the first eight and the last, in the order of `sixteen`."""

    @abstractmethod
    def store_sixteen(self, b: Any, parts: Sequence[Value], pointer: Value, offset: Value | int = 0) -> None:
        """Parts as `sixteen` gives them."""


class _Floats(Numbers):
    size = 4

    def eight(self, b: Any, pointer: Value, offset: Value | int = 0) -> Value:
        return load(b, pointer, offset, FLOATS)

    def store_eight(self, b: Any, value: Value, pointer: Value, offset: Value | int = 0) -> None:
        store(b, value, pointer, offset)

    def one(self, b: Any, pointer: Value, offset: Value | int = 0) -> Value:
        return load(b, pointer, offset, F32)

    def store_one(self, b: Any, value: Value, pointer: Value, offset: Value | int = 0) -> None:
        store(b, value, pointer, offset)

    def sixteen(self, b: Any, pointer: Value, offset: Value | int = 0) -> list[Value]:
        place = _moved(b, pointer, offset)
        return [load(b, place, 4 * LANES * half, FLOATS) for half in range(2)]

    def in_that_order(self, b: Any, first: Value, last: Value) -> list[Value]:
        return [first, last]

    def store_sixteen(self, b: Any, parts: Sequence[Value], pointer: Value, offset: Value | int = 0) -> None:
        place = _moved(b, pointer, offset)
        for half, part in enumerate(parts):
            store(b, part, place, 4 * LANES * half)


class _Bfloats(Numbers):
    """Of sixteen, read as eight numbers of 32 bits, the odd entries are the upper halves and the even ones the lower:
    two instructions make floats of them. So the even ones come first."""

    size = 2

    def eight(self, b: Any, pointer: Value, offset: Value | int = 0) -> Value:
        return b.bitcast(b.shl(b.zext(load(b, pointer, offset, BFLOATS), INTS), INTS([16] * LANES)), FLOATS)

    def store_eight(self, b: Any, value: Value, pointer: Value, offset: Value | int = 0) -> None:
        store(b, _rounded(b, value), pointer, offset)

    def one(self, b: Any, pointer: Value, offset: Value | int = 0) -> Value:
        return b.bitcast(b.shl(b.zext(load(b, pointer, offset, I16), I32), I32(16)), F32)

    def store_one(self, b: Any, value: Value, pointer: Value, offset: Value | int = 0) -> None:
        store(b, _rounded(b, value), pointer, offset)

    def sixteen(self, b: Any, pointer: Value, offset: Value | int = 0) -> list[Value]:
        both = load(b, pointer, offset, INTS)
        halves = b.shl(both, INTS([16] * LANES)), b.and_(both, INTS([-65536] * LANES))
        return [b.bitcast(half, FLOATS) for half in halves]

    def in_that_order(self, b: Any, first: Value, last: Value) -> list[Value]:
        return [b.shuffle_vector(first, last, INTS([2 * lane + odd for lane in range(LANES)])) for odd in range(2)]

    def store_sixteen(self, b: Any, parts: Sequence[Value], pointer: Value, offset: Value | int = 0) -> None:
        even, odd = (b.zext(_rounded(b, part), INTS) for part in parts)
        store(b, b.or_(b.shl(odd, INTS([16] * LANES)), even), pointer, offset)


NUMBERS: Mapping[str, Numbers] = {"bfloat16": _Bfloats(), "float32": _Floats()}
"""By the name of torch's dtype."""


def _rounded(b: Any, value: Value) -> Value:
    """float32 → bfloat16's 16 bits, to the nearest, ties to even; one number or a vector."""
    vector = value.type == FLOATS
    whole, short = (INTS, BFLOATS) if vector else (I32, I16)

    def number(n: int) -> Value:
        return INTS([n] * LANES) if vector else I32(n)

    bits = b.bitcast(value, whole)
    odd = b.and_(b.lshr(bits, number(16)), number(1))
    return b.trunc(b.lshr(b.add(bits, b.add(odd, number(0x7FFF))), number(16)), short)
