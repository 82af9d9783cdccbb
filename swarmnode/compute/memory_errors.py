"""How a lack of memory shows itself to a worker, said as one error that tells what to do."""

from __future__ import annotations

import errno

from swarmnode.errors import OutOfMemory

_SAID = ("out of memory", "cannot allocate memory", "can't allocate memory", "failed to map segment")
"""By torch's allocators, which raise RuntimeError, and by the dynamic linker."""


def lacks_memory(error: BaseException) -> bool:
    """Whether that is what an exception of Python, torch or the linker means."""
    if isinstance(error, (RuntimeError, ImportError)):
        return any(words in str(error).lower() for words in _SAID)
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def out_of_memory(stage: int, error: BaseException) -> OutOfMemory:
    """What a client of the API hears of it."""
    said = f" ({str(error)[:300]})" if str(error) else ""
    return OutOfMemory(f"stage {stage}'s machine ran out of memory while it loaded{said}. {OutOfMemory.advice}")
