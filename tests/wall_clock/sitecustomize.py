"""A wall clock that is off: Python loads this in every process with its folder in PYTHONPATH.

`WALL_CLOCKS` names a folder; the file there with a node's name holds by how many seconds it is off, and may change at
any time; `NAME.read` holds what the node went by last. Only what Python code reads is off: OpenSSL, the kernel and the
file system keep the right time.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path


def be_off_by(file: Path) -> None:
    right, went_by = time.time, file.with_suffix(".read")
    last = ""

    def shifted() -> float:
        nonlocal last
        text = file.read_text() if file.exists() else "0"
        if text != last:
            went_by.write_text(text)
            last = text
        return right() + float(text)

    time.time = shifted


if "--name" in sys.orig_argv:
    be_off_by(Path(os.environ["WALL_CLOCKS"], sys.orig_argv[sys.orig_argv.index("--name") + 1]))
