"""Checked files are sealed: one whose time says that somebody wrote to it since is checked again before it counts.

The seal is the modification time itself: whatever writes to a file or cuts it off moves that on, and nothing has to be
kept beside it. What a failing disk turns over beneath the file system it does not show.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_SEALED_NS = 0


def seal(file: int | Path) -> None:
    """Of a file, or a descriptor, whose content was just checked. One that cannot be sealed, for it is another user's,
    is checked again each time."""
    with suppress(OSError):
        os.utime(file, ns=(_SEALED_NS, _SEALED_NS))


def is_sealed(file: int | Path) -> bool:
    """Whether nobody wrote to it since; raises OSError."""
    return os.stat(file).st_mtime_ns == _SEALED_NS
