from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.compute.chains import Parity

if TYPE_CHECKING:
    from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def parity() -> Iterator[Parity]:
    """Shared by all parity tests, so that near ties are counted over everything that was compared."""
    counted = Parity()
    yield counted
    print(f"\nparity: {counted.tokens} tokens compared, {counted.excused} near ties excused")
    assert counted.excused * 10_000 <= max(counted.tokens, 10_000)
