"""How much memory this machine has to give now: what the kernel, and the cgroups around this process, leave, and what
share of that, and of a card's, stages may take."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MEMORY_SHARE = 0.8
"""Of what is available, what a stage may take unless its peer was told otherwise."""
CARD_SHARE = 0.85
"""Of a card's free memory: the rest is for fragmentation and for what others take later."""
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_V2 = "memory.max", "memory.current", "inactive_file"
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
"""Files with a cgroup's limit and its use, and what of its use is file pages that the kernel gives back first."""


def available_memory_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes that could be taken now without swapping."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
    return max(0, min((available, *_left_by_cgroups(proc, cgroups))))


def offered_memory_bytes() -> int:
    """What may be taken of it where nobody said how much."""
    return int(available_memory_bytes() * MEMORY_SHARE)


def _left_by_cgroups(proc: Path, cgroups: Path) -> Iterator[int]:
    """By each that has a limit: the process's own, and all around it."""
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, names = (cgroups / "memory", _V1) if controllers else (cgroups, _V2)
        own = mount / path.lstrip("/")  # in a container a path from outside, of which the mount alone is there
        for folder in (own, *own.parents):
            left = _left(folder, *names)
            if left is not None:
                yield left
            if folder == mount:
                break


def _left(folder: Path, limit_file: str, used_file: str, cache_name: str) -> int | None:
    """File pages that are not in use are no use of memory: those of a model that was just fetched fill a container."""
    limit, used = "".join(_lines(folder / limit_file)), "".join(_lines(folder / used_file))
    if not limit.isdigit() or not used.isdigit():
        return None
    stat = (line.split() for line in _lines(folder / "memory.stat"))
    cached = sum(int(count) for name, count in stat if name == cache_name)
    return int(limit) - max(0, int(used) - cached)


def _lines(path: Path) -> list[str]:
    """None of a file that is not there, or not for this user to read."""
    try:
        return path.read_text().splitlines()
    except (OSError, ValueError):
        return []
