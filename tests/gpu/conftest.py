"""What the checks on a card share. `GPU_CHECK_DEVICE=cpu` runs them without one, to see that they themselves work."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

NEEDED = ("torch", "transformers", "safetensors", "pydantic")
"""What every check imports that an interpreter may lack; bitsandbytes and others are asked for where they are used."""

sys.path.insert(0, str(Path(__file__).parents[1] / "compute"))


@pytest.fixture(scope="session")
def device() -> str:
    """The device to check: "cuda" where there is a card; skips where there is none."""
    torch, *_ = [pytest.importorskip(name) for name in NEEDED]
    asked = os.environ.get("GPU_CHECK_DEVICE", "")
    if not asked and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA card here")
    return asked or "cuda"
