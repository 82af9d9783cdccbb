"""Whose kernels multiply few rows, in tests that hold whichever it is."""

from __future__ import annotations

import pytest
import torch

from swarmnode.compute import compiled_dense, few_rows, tiled_projections
from swarmnode.compute.cpu_kernels import cpu_kernels

ALL_KERNELS = ("torch", *(["compiled"] if cpu_kernels(torch.bfloat16) is not None else []))
"""The compiled ones where llvmlite and AVX2 are."""
NEEDS_COMPILED = pytest.mark.skipif("compiled" not in ALL_KERNELS, reason="needs llvmlite and a CPU with AVX2")


def take_kernels(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on `packed` and `dense` use these, whatever is faster."""
    if which == "torch":
        for module in (tiled_projections, compiled_dense):
            monkeypatch.setattr(module, "cpu_kernels", lambda *_: None)
    else:
        monkeypatch.setattr(tiled_projections, "_tiles_are_faster", lambda *_: True)
        monkeypatch.setattr(few_rows, "crossover", lambda _: 1 << 62)
