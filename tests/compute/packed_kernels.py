"""Whose kernels packed weights are made for, in tests that hold whichever it is."""

from __future__ import annotations

import pytest

from swarmnode.compute import tiled_projections
from swarmnode.compute.integer_kernels import integer_kernels

ALL_KERNELS = ("torch", *(["compiled"] if integer_kernels() is not None else []))
"""The compiled ones where llvmlite and AVX2 are."""
NEEDS_COMPILED = pytest.mark.skipif("compiled" not in ALL_KERNELS, reason="needs llvmlite and a CPU with AVX2")


def take_kernels(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on `packed` uses these, whatever is faster."""
    if which == "torch":
        monkeypatch.setattr(tiled_projections, "integer_kernels", lambda: None)
    else:
        monkeypatch.setattr(tiled_projections, "_tiles_are_faster", lambda *_: True)
