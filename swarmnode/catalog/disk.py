"""Ask for disk space before using it, and name its lack as NoSpace."""

from __future__ import annotations

import errno
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from swarmnode.errors import NoSpace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RESERVE_BYTES = 64 << 20
"""Left free beside what a job needs: logs and the state document must still find room."""
_FULL = {errno.ENOSPC, errno.EDQUOT}


def free_bytes(folder: Path) -> int:
    """Bytes an unprivileged process may still write under `folder`."""
    return shutil.disk_usage(folder).free


def check_space(folder: Path, needed_bytes: int, purpose: str) -> None:
    """Raise NoSpace with the numbers unless `needed_bytes` and the reserve fit on the disk of `folder`."""
    free = free_bytes(folder)
    if needed_bytes + RESERVE_BYTES > free:
        raise NoSpace(
            f"{purpose} needs {megabytes(needed_bytes)} and {megabytes(RESERVE_BYTES)} kept free, "
            f"but the disk of {folder} has {megabytes(free)} left; free some or choose another folder"
        )


@contextmanager
def full_disk_as_no_space(purpose: str) -> Iterator[None]:
    """Map the system's "disk full" and "quota exceeded" to NoSpace."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise NoSpace(f"{purpose}: the disk is full ({error.strerror}); free some space and try again") from error
        raise


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
