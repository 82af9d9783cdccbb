"""What a ring on one machine takes of its processors beside its stages: nodes, coordinator, proxies, users, threads."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROC = Path("/proc")
_STAGES = ("swarmnode worker", "benchmarks.stage_times")
"""Processes whose main thread computes."""


def host_cpu_s() -> float:
    """CPU seconds so far of this process and of all it started that live, but for threads that compute a stage. 0.0
    where the system does not tell (it is Linux's /proc that does)."""
    return sum(map(_cpu_s, _threads()))


def _threads() -> Iterator[Path]:
    for process in _family():
        with suppress(OSError):
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            computes = any(f"-m {stage} " in command for stage in _STAGES)
            yield from (t for t in (process / "task").iterdir() if not computes or t.name != process.name)


def _family() -> list[Path]:
    """This process and its descendants."""
    parents = {}
    for process in _PROC.glob("[0-9]*"):
        with suppress(OSError):
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
    family = {os.getpid()}
    while found := {child for child, parent in parents.items() if parent in family} - family:
        family |= found
    return [_PROC / str(pid) for pid in family]


def _cpu_s(thread: Path) -> float:
    with suppress(OSError, ValueError):
        return int((thread / "schedstat").read_text().split()[0]) / 1e9
    return 0.0
