"""K3: what there is to offer where nobody says how much: the kernel's word, or less where a cgroup has a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from swarmnode import available_memory
from swarmnode.available_memory import available_memory_bytes, offered_memory_bytes

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
UNLIMITED = 9223372036854771712
"""What version 1 says where there is no limit."""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """`/proc` of a machine with 8 GiB available, and its cgroups."""
    write(tmp_path / "proc" / "meminfo", f"MemTotal: {16 << 20} kB\nMemAvailable: {8 << 20} kB\n")
    return tmp_path / "proc", tmp_path / "cgroup"


def version_2(folder: Path, limit: int | str, used: int, cached: int = 0) -> None:
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{used}\n")
    write(folder / "memory.stat", f"anon {used - cached}\ninactive_file {cached}\nactive_file 5\n")


def test_without_a_limit_it_is_what_the_kernel_has(machine: tuple[Path, Path]) -> None:
    proc, cgroups = machine
    assert available_memory_bytes(proc, cgroups) == 8 * GIB
    write(proc / "self" / "cgroup", "0::/user.slice\n")
    version_2(cgroups / "user.slice", "max", 3 * GIB)
    assert available_memory_bytes(proc, cgroups) == 8 * GIB


@pytest.mark.parametrize("limited", ["", "system.slice", "system.slice/swarmnode.service"])
def test_a_limit_of_any_cgroup_around_the_process_holds(machine: tuple[Path, Path], limited: str) -> None:
    proc, cgroups = machine
    write(proc / "self" / "cgroup", "0::/system.slice/swarmnode.service\n")
    version_2(cgroups / limited, 4 * GIB, GIB)
    assert available_memory_bytes(proc, cgroups) == 3 * GIB


def test_pages_of_files_that_were_read_are_room(machine: tuple[Path, Path]) -> None:
    proc, cgroups = machine
    write(proc / "self" / "cgroup", "0::/\n")
    version_2(cgroups, 4 * GIB, 4 * GIB, cached=3 * GIB)
    assert available_memory_bytes(proc, cgroups) == 3 * GIB
    version_2(cgroups, 4 * GIB, 5 * GIB)
    assert available_memory_bytes(proc, cgroups) == 0


def test_version_1_in_a_container_whose_path_is_the_hosts(machine: tuple[Path, Path]) -> None:
    proc, cgroups = machine
    write(proc / "self" / "cgroup", "9:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n")
    for name, text in (("limit_in_bytes", f"{2 * GIB}"), ("usage_in_bytes", f"{GIB}")):
        write(cgroups / "memory" / f"memory.{name}", text)
    write(cgroups / "memory" / "memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB // 2}\n")
    assert available_memory_bytes(proc, cgroups) == 3 * GIB // 2
    write(cgroups / "memory" / "memory.limit_in_bytes", f"{UNLIMITED}")
    assert available_memory_bytes(proc, cgroups) == 8 * GIB


def test_this_machine_has_something_and_offers_a_share_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available_memory_bytes() > 0
    monkeypatch.setattr(available_memory, "available_memory_bytes", lambda: 10 * GIB)
    assert offered_memory_bytes() == 8 * GIB
