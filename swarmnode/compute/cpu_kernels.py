"""Products of few rows, compiled at load by llvmlite where that is installed and the CPU fits.

torch's packed kernels are written for AVX-512; on CPUs without it they take as long as the product in bfloat16 does.
Its dense ones read the weight of two to eight rows at a third of the speed that memory has. `integer_code.py` and
`dense_code.py` say what these compute and how their weights lie, `block_code.py` what else is compiled.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
from typing import TYPE_CHECKING, Any

import torch

from swarmnode.compute.projections import GROUP

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KINDS = {torch.bfloat16: ("int8", "int4", "dense"), torch.float32: ("dense",)}
"""Of weights, by the dtype of rows."""
PREPARED = ("plain", "normed", "gated")
"""What a product may make of its rows first, see ENTRY in `product_code.py`; a call gives the place in this list."""
PLAIN = PREPARED[0]
MAX_ROWS = 8
"""Of x in one call."""
TILE = 4
"""Output rows whose weights lie side by side."""
PADDED = 8
"""Zeros of a row's groups are filled up to a multiple of so many."""
MAX_INPUTS = {"int8": 1 << 16, "int4": 1 << 16, "dense": 1 << 15}
"""A call keeps its rows on its thread's stack, as codes of 16 bits or floats: 1 MiB for MAX_ROWS of so many inputs,
where threads have 8 MiB. The widest models' matrices have 53,248 and more than 32,768 stay torch's where dense."""
_NEEDED = ("avx2", "fma")
_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
"""What torch's own OpenMP brings into the process."""

_log = logging.getLogger("swarmnode.compute.kernels")


class CpuKernels:
    """The compiled code for rows of one dtype; it lives as long as this does. `compile_code` takes a module's text and
    gives what then finds the addresses of its functions by their names."""

    def __init__(self, compile_code: Callable[[str], Callable[[str], int]], dtype: torch.dtype) -> None:
        from swarmnode.compute.block_code import write_block

        self._compile = compile_code
        self.dtype, self.dtype_name = dtype, str(dtype).removeprefix("torch.")
        self._functions: dict[str, list[Callable[..., None]]] = {}
        self._entries: dict[str, ctypes.Array[ctypes.c_int64]] = {}
        self.block = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2)(compile_code(write_block(self.dtype_name))("block"))
        """One block's step of up to MAX_ROWS rows: addresses of records as `block_layout.py` has them."""

    def add(self, kind: str) -> None:
        """Compile a kind's products where they are not yet: a module of their own, because writing one takes up to
        40 MiB for a moment."""
        from swarmnode.compute.dense_code import write_dense_products
        from swarmnode.compute.integer_code import write_integer_products

        if kind not in KINDS[self.dtype]:
            raise ValueError(f"no kernel multiplies {kind} weights with rows in {self.dtype_name}")
        if kind in self._functions:
            return
        text = write_dense_products(self.dtype_name) if kind == "dense" else write_integer_products(kind)
        address = self._compile(text)
        addresses = [address(f"{kind}_{rows}") for rows in range(1, MAX_ROWS + 1)]
        pointers, sizes = [ctypes.c_void_p] * 7, [ctypes.c_int64] * 2
        prototype = ctypes.CFUNCTYPE(None, *pointers, *sizes, ctypes.c_float, ctypes.c_int32, ctypes.c_int32)
        self._functions[kind] = [prototype(address) for address in addresses]
        self._entries[kind] = (ctypes.c_int64 * MAX_ROWS)(*addresses)

    def functions(self, kind: str) -> Sequence[Callable[..., None]]:
        """A kind's functions for one row, two rows, …: see ENTRY in `product_code.py`."""
        return self._functions[kind]

    def entries(self, kind: str) -> int:
        """The address of the addresses of a kind's functions, by rows."""
        return ctypes.addressof(self._entries[kind])

    def product(self, kind: str, weights: torch.Tensor, beside: torch.Tensor | None = None) -> Product:
        """With dense `weights` (out, in), or packed ones of (out / TILE, in / GROUP, …) and, `beside` them, scales of
        eight bits or zeros of four, of (out / TILE, TILE, …). Raises ValueError where they do not lie as the code reads
        them."""
        tiles, groups = weights.shape[:2]
        if kind == "dense":
            tiles, groups = tiles // TILE, groups // GROUP
        expected = self._layout(kind, tiles, groups)
        given = [weights] if beside is None else [weights, beside]
        found = [(each.dtype, tuple(each.shape)) for each in given]
        if found != expected or not all(each.is_cpu and each.is_contiguous() for each in given):
            raise ValueError(f"{kind} weights as {found}: the kernel reads {expected}, whole and in the CPU's memory")
        if groups * GROUP > MAX_INPUTS[kind]:
            raise ValueError(f"{groups * GROUP:,} inputs: the kernel's stack has room for {MAX_INPUTS[kind]:,}")
        return Product(self, kind, weights, beside, tiles, groups)

    def _layout(self, kind: str, tiles: int, groups: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
        """Of weights and of what is beside them; `integer_code.py` and `dense_code.py` say what it means."""
        if kind == "dense":
            return [(self.dtype, (tiles * TILE, groups * GROUP))]
        if kind == "int8":
            return [(torch.int8, (tiles, groups, TILE, GROUP)), (torch.bfloat16, (tiles, TILE))]
        padded = -(-groups // PADDED) * PADDED
        record = TILE * (2 + GROUP // 2)
        return [(torch.uint8, (tiles, groups, record)), (torch.bfloat16, (tiles, TILE, padded))]


class Product:
    """(n, in) rows in the code's dtype → (n, out). Holds the code and the memory that it calls and reads by address."""

    __slots__ = ("_fixed", "_functions", "_held", "_kind", "_shape", "dtype", "inputs", "outputs")

    def __init__(
        self,
        kernels: CpuKernels,
        kind: str,
        weights: torch.Tensor,
        beside: torch.Tensor | None,
        tiles: int,
        groups: int,
    ) -> None:
        self._held = kernels, weights, beside
        self._kind, self._functions, self._shape = kind, kernels.functions(kind), (tiles, groups)
        self.dtype, self.outputs, self.inputs = kernels.dtype, tiles * TILE, groups * GROUP
        # Asked for once: a small matrix takes little longer than these questions.
        addresses = weights.data_ptr(), _address(beside), None, None, None
        self._fixed = *addresses, tiles, groups, 0.0, PREPARED.index(PLAIN)

    def slots(self, bias: torch.Tensor | None) -> dict[str, int]:
        """For a block's record, by MATRIX_SLOTS; `bias` (out,) in the code's dtype is to live as long as that is used.
        Raises ValueError for a bias that the code would misread."""
        kernels, weights, beside = self._held
        if bias is not None and not (bias.shape == (self.outputs,) and readable(bias, self.dtype)):
            found = f"a bias of {list(bias.shape)} {bias.dtype}"
            raise ValueError(f"{found}: the kernel reads {self.outputs} in {kernels.dtype_name}")
        tiles, groups = self._shape
        return {
            "entries": kernels.entries(self._kind),
            "weights": weights.data_ptr(),
            "beside": _address(beside),
            "bias": _address(bias),
            "tiles": tiles,
            "groups": groups,
        }

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Raises ValueError for rows that the code would misread."""
        count, inputs = rows.shape
        if inputs != self.inputs or rows.dtype != self.dtype or not rows.is_cpu:
            found = f"rows of {inputs} {rows.dtype} on {rows.device}"
            raise ValueError(f"{found}: the weight takes {self.inputs} in {self._held[0].dtype_name} on the CPU")
        rows = rows.contiguous()
        out = torch.empty((count, self.outputs), dtype=self.dtype)
        source, target, threads = rows.data_ptr(), out.data_ptr(), torch.get_num_threads()
        row_bytes, out_bytes = rows.itemsize * inputs, rows.itemsize * self.outputs
        for begin in range(0, count, MAX_ROWS):
            function = self._functions[min(MAX_ROWS, count - begin) - 1]
            function(source + begin * row_bytes, target + begin * out_bytes, *self._fixed, threads)
        return out


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def readable(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether it can be read by its address alone, as numbers of `dtype`."""
    return tensor.dtype == dtype and tensor.is_cpu and tensor.is_contiguous()


@functools.cache
def cpu_kernels(dtype: torch.dtype, *kinds: str) -> CpuKernels | None:
    """For rows of `dtype` and weights of these of its KINDS. Takes a second the first time. None where they cannot be:
    the log says why, but for a dtype that has none."""
    if dtype not in KINDS:
        return None
    try:
        kernels = _kernels_for(dtype)
        if kernels is not None:
            for kind in kinds:
                kernels.add(kind)
        return kernels
    except ImportError:
        _log.info("torch's kernels serve; 'swarmnode[fastcpu]' brings faster ones")
    except (OSError, RuntimeError) as error:
        # llvmlite's library does not load, this process may not make memory executable, …
        _log.warning("torch's kernels serve: none can be compiled here: %s", error)
    return None


@functools.cache
def _kernels_for(dtype: torch.dtype) -> CpuKernels | None:
    """Raises ImportError, OSError or RuntimeError where llvmlite is not there or does not work."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    process = ctypes.CDLL(None)
    lacking = [name for name in _NEEDED if not features.get(name)]
    lacking += [name for name in _OPENMP if not hasattr(process, name)]
    if lacking:
        _log.info("torch's kernels serve: this machine lacks %s", ", ".join(lacking))
        return None
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return CpuKernels(_Compiler(llvm, features.flatten()), dtype)


class _Compiler:
    """LLVM, without a pass of its optimizer: the code is written as it is to run, and those take longer than all the
    rest."""

    def __init__(self, llvm: Any, features: str) -> None:
        target = llvm.Target.from_default_triple()
        machine = target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=2)
        self._llvm = llvm
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)

    def __call__(self, text: str) -> Callable[[str], int]:
        gc.collect()  # of what the text was written from: objects that know each other
        module = self._llvm.parse_assembly(text)
        module.verify()
        self._engine.add_module(module)
        self._engine.finalize_object()
        return self._engine.get_function_address  # type: ignore[no-any-return]
