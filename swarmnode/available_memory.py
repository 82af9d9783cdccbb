"""How much memory this machine has to give now: what the kernel, and a cgroup where there is one, leaves, and what
share of that, and of a card's, stages may take."""

from __future__ import annotations

import os
from pathlib import Path

MEMORY_SHARE = 0.8
"""Of what is available, what a stage may take unless its peer was told otherwise."""
CARD_SHARE = 0.85
"""Of a card's free memory: the rest is for fragmentation and for what others take later."""


def available_memory_bytes() -> int:
    """Bytes that could be taken now without swapping."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) << 10
    except OSError:
        pass
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        available = min(available, int(limit) - used) if limit.isdigit() else available
    except (OSError, ValueError):
        pass
    return max(available, 0)


def offered_memory_bytes() -> int:
    """What may be taken of it where nobody said how much."""
    return int(available_memory_bytes() * MEMORY_SHARE)
