"""What torch, Python and the linker raise where memory is short is one error that tells what to do."""

from __future__ import annotations

import mmap
import resource
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from swarmnode.compute.memory_errors import lacks_memory, out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TOO_MUCH = 1 << 46
"""Bytes; no process has that much address space to give."""


@contextmanager
def no_more_memory() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (TOO_MUCH, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize(
    "ask",
    [lambda: torch.empty(TOO_MUCH, dtype=torch.uint8), lambda: bytearray(TOO_MUCH), lambda: mmap.mmap(-1, TOO_MUCH)],
    ids=["torch", "python", "kernel"],
)
def test_what_is_raised_is_told_as_a_lack_of_memory(ask: Callable[[], object]) -> None:
    with no_more_memory(), pytest.raises((MemoryError, OSError, RuntimeError)) as raised:
        ask()
    assert lacks_memory(raised.value)
    told = out_of_memory(1, raised.value)
    assert told.code == "out_of_memory"
    assert told.message.startswith("stage 1's machine ran out of memory while it loaded")
    assert "--memory" in told.message


def test_a_card_and_the_linker_say_it_in_their_own_words() -> None:
    assert lacks_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert lacks_memory(ImportError("libtorch_cpu.so: failed to map segment from shared object"))


@pytest.mark.parametrize(
    "error", [ValueError("out of memory"), OSError(2, "No such file"), RuntimeError("shape mismatch"), ImportError("x")]
)
def test_other_faults_are_none_of_it(error: Exception) -> None:
    assert not lacks_memory(error)
