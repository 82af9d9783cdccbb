"""Give memory that was freed back to the system, where the C library would keep it."""

from __future__ import annotations

import ctypes
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's parameters for `mallopt`."""
LOAD_MAPPED_BYTES = 256 << 10
"""While a stage loads: far below any matrix, far above what Python asks for."""
SERVE_MAPPED_BYTES = 32 << 20
"""Then: where glibc's own rule ends, having seen large blocks freed; a step then reuses its memory."""


def return_freed_memory() -> None:
    """glibc keeps what lies between blocks that are still used: the dense blocks of a quantized load, caches of
    conversations that are over. Takes a few milliseconds per 100 MiB."""
    if (trim := _of_glibc("malloc_trim")) is not None:
        trim(0)


@contextmanager
def returning_large_blocks() -> Iterator[None]:
    """Blocks of LOAD_MAPPED_BYTES or more are mapped, and so returned the moment they are freed. Left alone, glibc
    keeps blocks as large as the largest that was freed before, and a load's dense matrices lie between what stays."""
    tune = _of_glibc("mallopt")
    if tune is None:
        yield
        return
    tune(_M_MMAP_THRESHOLD, LOAD_MAPPED_BYTES)
    try:
        yield
    finally:
        tune(_M_MMAP_THRESHOLD, SERVE_MAPPED_BYTES)
        tune(_M_TRIM_THRESHOLD, 2 * SERVE_MAPPED_BYTES)


def _of_glibc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
