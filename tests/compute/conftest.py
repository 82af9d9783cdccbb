from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from stage_chains import Parity

if TYPE_CHECKING:
    from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

COUNTED = Parity()


@pytest.fixture(scope="session")
def parity() -> Iterator[Parity]:
    """Shared by all parity tests, so that near ties are counted over everything that was compared."""
    yield COUNTED
    assert COUNTED.excused * 10_000 <= max(COUNTED.tokens, 10_000)


@pytest.fixture
def compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The compiled kernels multiply few rows, and torch has one thread."""
    import torch
    from packed_kernels import take_kernels

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    take_kernels("compiled", monkeypatch)
    yield
    torch.set_num_threads(threads)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if COUNTED.tokens:
        terminalreporter.write_line(
            f"parity with transformers: {COUNTED.tokens} tokens compared, {COUNTED.excused} near ties excused"
        )
