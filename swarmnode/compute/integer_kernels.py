"""Products of few rows with packed weights, compiled at load by llvmlite where that is installed and the CPU fits.

torch's packed kernels are written for AVX-512; on CPUs without it they take as long as the product in bfloat16 does.
`integer_code.py` says what these compute and how their weights lie.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Product = Callable[[torch.Tensor], torch.Tensor]
    """Keeps no memory: it lives as long as the weights it was made for do."""

KINDS = ("int8", "int4")
MAX_ROWS = 8
"""Of x in one call."""
TILE = 4
"""Output rows whose weights lie side by side."""
PADDED = 8
"""Zeros of a row's groups are filled up to a multiple of so many."""
_NEEDED = ("avx2", "fma")
_OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
"""What torch's own OpenMP brings into the process."""

_log = logging.getLogger("swarmnode.compute.kernels")


class IntegerKernels:
    """The compiled products; their code lives as long as this does."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        prototype = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 2, ctypes.c_int32)
        self._functions: dict[str, list[Callable[..., None]]] = {
            kind: [prototype(engine.get_function_address(f"{kind}_{rows}")) for rows in range(1, MAX_ROWS + 1)]
            for kind in KINDS
        }

    def product(self, kind: str, weights: torch.Tensor, beside: torch.Tensor) -> Product:
        """(n, in) rows in bfloat16 → (n, out). `weights` are (out / TILE, in / 32, …), `beside` (out / TILE, TILE, …):
        scales of eight bits, zeros of four."""
        functions, outputs = self._functions[kind], weights.shape[0] * TILE
        # Asked for once: a small matrix takes little longer than these questions.
        fixed = weights.data_ptr(), beside.data_ptr(), weights.shape[0], weights.shape[1]

        def multiply(rows: torch.Tensor) -> torch.Tensor:
            rows = rows.contiguous()
            count, inputs = rows.shape
            out = torch.empty((count, outputs), dtype=torch.bfloat16)
            source, target, threads = rows.data_ptr(), out.data_ptr(), torch.get_num_threads()
            for begin in range(0, count, MAX_ROWS):
                function = functions[min(MAX_ROWS, count - begin) - 1]
                function(source + 2 * begin * inputs, target + 2 * begin * outputs, *fixed, threads)
            return out

        return multiply


@functools.cache
def integer_kernels() -> IntegerKernels | None:
    """Takes a second the first time. None where they cannot be: the log says why."""
    try:
        import llvmlite.binding as llvm
    except ImportError:
        _log.info("torch's packed kernels serve; on CPUs without AVX-512 'swarmnode[fastcpu]' brings faster ones")
        return None
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
    from swarmnode.compute.integer_code import write_module

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(write_module())
    module.verify()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(cpu=llvm.get_host_cpu_name(), features=features, opt=2)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine
