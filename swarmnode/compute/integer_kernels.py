"""Products of few rows with packed weights, compiled at load by llvmlite where that is installed and the CPU fits.

torch's packed kernels are written for AVX-512; on CPUs without it they take as long as the product in bfloat16 does.
`integer_code.py` says what these compute and how their weights lie, `block_code.py` what else is compiled.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import TYPE_CHECKING, Any

import torch

from swarmnode.compute.projections import GROUP

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KINDS = ("int8", "int4")
PREPARED = ("plain", "normed", "gated")
"""What a product may make of its rows first, see `write_products`; a call gives the place in this list."""
PLAIN = PREPARED[0]
MAX_ROWS = 8
"""Of x in one call."""
TILE = 4
"""Output rows whose weights lie side by side."""
PADDED = 8
"""Zeros of a row's groups are filled up to a multiple of so many."""
MAX_INPUTS = 1 << 16
"""A call keeps its rows' codes on its thread's stack: 1 MiB for MAX_ROWS of so many, where threads have 8 MiB and the
widest models' matrices 53,248 inputs."""
_NEEDED = ("avx2", "fma")
_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
"""What torch's own OpenMP brings into the process."""

_log = logging.getLogger("swarmnode.compute.kernels")


class IntegerKernels:
    """The compiled products; their code lives as long as this does."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        pointers, sizes = [ctypes.c_void_p] * 7, [ctypes.c_int64] * 2
        prototype = ctypes.CFUNCTYPE(None, *pointers, *sizes, ctypes.c_float, ctypes.c_int32, ctypes.c_int32)
        addresses = {
            kind: [engine.get_function_address(f"{kind}_{rows}") for rows in range(1, MAX_ROWS + 1)] for kind in KINDS
        }
        self._functions: dict[str, list[Callable[..., None]]] = {
            kind: [prototype(address) for address in of_rows] for kind, of_rows in addresses.items()
        }
        self._entries = {kind: (ctypes.c_int64 * MAX_ROWS)(*of_rows) for kind, of_rows in addresses.items()}
        self.block = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2)(engine.get_function_address("block"))
        """One block's step of up to MAX_ROWS rows: addresses of records as `block_layout.py` has them."""

    def functions(self, kind: str) -> Sequence[Callable[..., None]]:
        """A kind's functions for one row, two rows, …: see `write_products`."""
        return self._functions[kind]

    def entries(self, kind: str) -> int:
        """The address of the addresses of a kind's functions, by rows."""
        return ctypes.addressof(self._entries[kind])

    def product(self, kind: str, weights: torch.Tensor, beside: torch.Tensor) -> Product:
        """With `weights` of (out / TILE, in / GROUP, …) and, `beside` them, scales of eight bits or zeros of four, of
        (out / TILE, TILE, …). Raises ValueError where they do not lie as the code reads them."""
        tiles, groups = weights.shape[:2]
        expected = _layout(kind, tiles, groups)
        found = [(each.dtype, tuple(each.shape)) for each in (weights, beside)]
        if found != expected or not all(each.is_cpu and each.is_contiguous() for each in (weights, beside)):
            raise ValueError(f"{kind} weights as {found}: the kernel reads {expected}, whole and in the CPU's memory")
        if groups * GROUP > MAX_INPUTS:
            raise ValueError(f"{groups * GROUP:,} inputs: the kernel's stack has room for {MAX_INPUTS:,}")
        return Product(self, kind, weights, beside)


def _layout(kind: str, tiles: int, groups: int) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Of weights and of what is beside them; `integer_code.py` says what it means."""
    if kind == "int8":
        return [(torch.int8, (tiles, groups, TILE, GROUP)), (torch.bfloat16, (tiles, TILE))]
    padded = -(-groups // PADDED) * PADDED
    record = TILE * (2 + GROUP // 2)
    return [(torch.uint8, (tiles, groups, record)), (torch.bfloat16, (tiles, TILE, padded))]


class Product:
    """(n, in) rows in bfloat16 → (n, out). Holds the code and the memory that it calls and reads by address."""

    __slots__ = ("_fixed", "_functions", "_held", "_kind", "inputs", "outputs")

    def __init__(self, kernels: IntegerKernels, kind: str, weights: torch.Tensor, beside: torch.Tensor) -> None:
        self._held = kernels, weights, beside
        self._kind, self._functions = kind, kernels.functions(kind)
        self.outputs, self.inputs = weights.shape[0] * TILE, weights.shape[1] * GROUP
        # Asked for once: a small matrix takes little longer than these questions.
        addresses = weights.data_ptr(), beside.data_ptr(), None, None, None
        self._fixed = *addresses, *weights.shape[:2], 0.0, PREPARED.index(PLAIN)

    def slots(self, bias: torch.Tensor | None) -> dict[str, int]:
        """For a block's record, by MATRIX_SLOTS; `bias` (out,) in bfloat16 is to live as long as that is used. Raises
        ValueError for a bias that the code would misread."""
        if bias is not None and not (bias.shape == (self.outputs,) and plain_bfloat16(bias)):
            raise ValueError(f"a bias of {list(bias.shape)} {bias.dtype}: the kernel reads {self.outputs} in bfloat16")
        kernels, weights, beside = self._held
        return {
            "entries": kernels.entries(self._kind),
            "weights": weights.data_ptr(),
            "beside": beside.data_ptr(),
            "bias": 0 if bias is None else bias.data_ptr(),
            "tiles": weights.shape[0],
            "groups": weights.shape[1],
        }

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Raises ValueError for rows that the code would misread."""
        count, inputs = rows.shape
        if inputs != self.inputs or rows.dtype != torch.bfloat16 or not rows.is_cpu:
            raise ValueError(
                f"rows of {inputs} {rows.dtype} on {rows.device}: the weight takes {self.inputs} in bfloat16 on the CPU"
            )
        rows = rows.contiguous()
        out = torch.empty((count, self.outputs), dtype=torch.bfloat16)
        source, target, threads = rows.data_ptr(), out.data_ptr(), torch.get_num_threads()
        for begin in range(0, count, MAX_ROWS):
            function = self._functions[min(MAX_ROWS, count - begin) - 1]
            function(source + 2 * begin * inputs, target + 2 * begin * self.outputs, *self._fixed, threads)
        return out


def plain_bfloat16(tensor: torch.Tensor) -> bool:
    """Whether it can be read by its address alone."""
    return tensor.dtype == torch.bfloat16 and tensor.is_cpu and tensor.is_contiguous()


@functools.cache
def integer_kernels() -> IntegerKernels | None:
    """Takes a second the first time. None where they cannot be: the log says why."""
    try:
        return _kernels_of_this_cpu()
    except ImportError:
        _log.info("torch's packed kernels serve; on CPUs without AVX-512 'swarmnode[fastcpu]' brings faster ones")
    except (OSError, RuntimeError) as error:
        # llvmlite's library does not load, this process may not make memory executable, …
        _log.warning("torch's packed kernels serve: none can be compiled here: %s", error)
    return None


def _kernels_of_this_cpu() -> IntegerKernels | None:
    """Raises ImportError, OSError or RuntimeError where llvmlite is not there or does not work."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    process = ctypes.CDLL(None)
    lacking = [name for name in _NEEDED if not features.get(name)]
    lacking += [name for name in _OPENMP if not hasattr(process, name)]
    if lacking:
        _log.info("torch's packed kernels serve: this machine lacks %s", ", ".join(lacking))
        return None
    return IntegerKernels(_compiled(llvm, features.flatten()))


def _compiled(llvm: Any, features: str) -> Any:
    """No pass of LLVM's optimizer: the code is written as it is to run, and those take longer than all the rest."""
    from swarmnode.compute.block_code import write_module

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(write_module())
    module.verify()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=2)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine
