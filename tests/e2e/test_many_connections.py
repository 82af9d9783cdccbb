"""Thousands of connections that say nothing, and a node without descriptors: others are served, then or later."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from local_swarms import Swarm, open_descriptors, start_swarm, wait_until

from swarmnode.cli.local_swarm import NodeProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.e2e
MORE_RSS_BYTES = 150 << 20
ANSWER_S = 5.0
"""Far more than an answer takes, for a machine that runs other tests; `benchmarks.attack` measures how much longer."""
CALLS = 20
DESCRIPTORS = 96
"""More than a coordinator without peers needs, and fewer than its port would take connections."""
OPEN_MOST = 1024
"""Descriptors that a process usually may have."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@contextmanager
def idle_connections(address: str, count: int) -> Iterator[None]:
    """As many as said, held by another process while inside."""
    host, port = address.rpartition("/")[2].rsplit(":", 1)
    script = Path(__file__).parents[1] / "idle_connections.py"
    command = [sys.executable, str(script), host, port, str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline().strip() == str(count), "that many are open"
        yield
        process.stdin.close()


def rss_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def busy_share(pid: int) -> float:
    """Of one processor, over a second in which nobody asks anything."""

    def ticks() -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    before = ticks()
    time.sleep(1.0)
    return (ticks() - before) / TICKS_PER_S


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory, models_root: Path) -> Iterator[Swarm]:
    swarm = start_swarm(tmp_path_factory.mktemp("lone"), models_root, peers=0)
    yield swarm
    swarm.close()


@pytest.mark.parametrize("port", ["api", "swarm"])
@pytest.mark.parametrize("count", [1100, pytest.param(10_000, marks=pytest.mark.soak)])
def test_scenario_15_idle_connections_cost_little_and_keep_nobody_out(lone: Swarm, port: str, count: int) -> None:
    local = lone.local
    assert local.coordinator is not None
    pid = local.coordinator.process.pid
    rss_before, open_before = rss_bytes(pid), open_descriptors(pid)
    with idle_connections(local.api if port == "api" else local.swarm, count):
        assert open_descriptors(pid) < OPEN_MOST
        for _ in range(CALLS):
            assert httpx.get(f"{local.api}/v1/models", timeout=ANSWER_S, trust_env=False).status_code == 200
        assert busy_share(pid) < 0.5
        assert rss_bytes(pid) - rss_before < MORE_RSS_BYTES
    wait_until(lambda: open_descriptors(pid) <= open_before + 2, "they are gone here, too", 30.0)


def test_scenario_15_without_descriptors_accepting_pauses_and_goes_on(tmp_path: Path, models_root: Path) -> None:
    arguments = ["--role", "coordinator", "--name", "lone", "--data-dir", str(tmp_path / "lone")]
    arguments += ["--api-listen", "127.0.0.1:0", "--swarm-listen", "127.0.0.1:0"]
    few = ("sh", "-c", f'ulimit -n {DESCRIPTORS}; exec "$@"', "sh")
    node = NodeProcess(arguments, {"SWARM_SERVABLE_MODELS_ROOT": str(models_root)}, few)
    try:
        api = node.wait_for("ready")["api"]
        pid = node.process.pid
        before = open_descriptors(pid)
        with idle_connections(api, DESCRIPTORS):
            wait_until(lambda: open_descriptors(pid) >= DESCRIPTORS - 1, "it has no descriptor left")
            assert busy_share(pid) < 0.5, "it does not spin"
            assert node.process.poll() is None
        wait_until(lambda: open_descriptors(pid) <= before + 2, "they are gone here, too", 30.0)
        assert httpx.get(f"{api}/v1/models", timeout=ANSWER_S, trust_env=False).status_code == 200
    finally:
        node.stop()
