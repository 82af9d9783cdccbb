"""What a ring on one machine takes of its processors beside its stages: nodes, coordinator, proxies, users, threads."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_STAGES = ("swarmnode worker", "benchmarks.stage_times")
"""Processes whose main thread computes; it has no helpers where a stage has one thread."""


def host_cpu_s() -> float:
    """CPU seconds so far of this process and of all it started that live, with their threads that have ended, but for
    those that compute a stage of one thread. 0.0 where the system does not tell (it is Linux's /proc that does)."""
    return sum(map(_cpu_s, _family()))


def _family() -> list[Path]:
    """This process and its descendants."""
    parents = {}
    for process in _PROC.glob("[0-9]*"):
        with suppress(OSError):
            parents[int(process.name)] = int(_fields(process)[1])
    family = {os.getpid()}
    while found := {child for child, parent in parents.items() if parent in family} - family:
        family |= found
    return [_PROC / str(pid) for pid in family]


def _cpu_s(process: Path) -> float:
    with suppress(OSError):
        command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        computing = [process / "task" / process.name] if any(f"-m {stage} " in command for stage in _STAGES) else []
        return _ticks(process) - sum(map(_ticks, computing))
    return 0.0


def _ticks(task: Path) -> float:
    """Seconds in user and system mode."""
    user, system = _fields(task)[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _fields(task: Path) -> list[str]:
    """Of `stat`, from the state on."""
    return (task / "stat").read_text().rpartition(")")[2].split()
