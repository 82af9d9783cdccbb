"""Real swarms for tests: coordinator and peers as processes, each with its own directory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai

from swarmnode.cli.client import ApiClient
from swarmnode.cli.local_swarm import LocalSwarm, NodeProcess

if TYPE_CHECKING:
    from collections.abc import Callable

WAIT_S = 15.0
COMMAND_S = 60.0
"""No command of the tests takes this long, a demo over a model that is there included."""

REPLY = "Bees swarm in spring. 蜂の群れ 🐝 and that is all there is to say about it."
SCRIPT = {
    "replies": [
        {"when": list(b"long"), "ids": list(b"abcdefghij") * 400},
        {"when": list(b"medium"), "ids": list(b"abcdefghij") * 40},
        {"when": list(b"broken"), "ids": list(b"this will fail"), "fail_at": 5},
        {"when": list(b"early"), "ids": list(b"never"), "fail_at": 0},
    ],
    "default": list(REPLY.encode()),
    "decode_ms": 1,
    "prefill_ms_per_token": 0.2,
}


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S) -> None:
    """Poll until `condition` holds; a test that waits for another process has no event to wait for."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


def process_state(pid: int) -> str:
    """The letter that the kernel gives a process (R, S, T, Z …); X where there is none."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "X"


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    return process_state(pid) not in ("Z", "X")


class Swarm:
    """A local swarm with the calls the tests make often."""

    def __init__(self, local: LocalSwarm) -> None:
        self.local = local
        self.client = ApiClient(local.api)
        self.http = httpx.Client(base_url=local.api, timeout=30, trust_env=False)
        self.openai = openai.OpenAI(base_url=f"{local.api}/v1", api_key="none", max_retries=0)

    def load(self, model: str, **options: Any) -> dict[str, Any]:
        return self.client.post(f"/api/v1/models/{model}/load", {"wait": True, **options})

    def unload(self, model: str, *, force: bool = True) -> dict[str, Any]:
        return self.client.post(f"/api/v1/models/{model}/unload", {"force": force})

    def ask(self, model: str, text: str = "hello") -> str | None:
        """The reply to one chat, by the real client."""
        reply = self.openai.chat.completions.create(model=model, messages=[{"role": "user", "content": text}])
        return reply.choices[0].message.content

    def status(self, model: str) -> dict[str, Any]:
        return self.client.get(f"/api/v1/models/{model}/status")

    def worker_pids(self, model: str) -> dict[str, int]:
        """Pids of the model's stage workers, by peer name."""
        return {stage["peer"]: stage["pid"] for stage in self.status(model)["stages"] if stage["pid"] is not None}

    def swarm_port(self, peer: str) -> tuple[str, int]:
        """Where it listens for others, whatever it advertises."""
        ready = next(event for event in self.local.peers[peer].seen if event["event"] == "ready")
        host, port = ready["swarm"].rsplit(":", 1)
        return host, int(port)

    def quiet(self, model: str) -> bool:
        """No request, session or reservation is left on any stage, and no cached token beyond what is parked."""
        status = self.status(model)
        gauges = [status[key] for key in ("requests", "running", "waiting", "ending", "kv_reserved_tokens")]
        sessions = [stage["sessions"] for stage in status["stages"]]
        parked = status.get("kv_parked_tokens", 0)
        beyond = [stage for stage in status["stages"] if stage["kv_tokens"] > parked]
        return not (any(gauges) or any(sessions) or beyond)

    def close(self) -> None:
        self.http.close()
        self.openai.close()
        self.client.close()
        self.local.stop()


def open_files(swarm: Swarm) -> dict[str, int]:
    """Descriptors that each node has open, by name."""
    nodes = {**swarm.local.peers, "coordinator": swarm.local.coordinator}
    return {name: open_descriptors(node.process.pid) for name, node in nodes.items() if node is not None}


def open_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def start_again(local: LocalSwarm, name: str, *extra: str, listen: str | None = None) -> dict[str, Any]:
    """A peer whose process is over, anew at the swarm address that it had, or `listen`; `extra` arguments as it was
    first given.

    Returns what it says when it is ready.
    """
    old = local.peers[name]
    address = listen or next(event["swarm"] for event in old.seen if event["event"] == "ready")
    old.stop()
    arguments = ["--role", "peer", "--name", name, "--data-dir", str(local.folder / name), "--swarm-listen", address]
    arguments += ["--device", "cpu", "--threads", "1", "--memory", "4G", *extra]
    local.peers[name] = NodeProcess(arguments, local.environment)
    return local.peers[name].wait_for("ready")


def start_swarm(
    folder: Path,
    models_root: Path,
    peers: int,
    environment: dict[str, str] | None = None,
    coordinator: tuple[str, ...] = (),
) -> Swarm:
    """`coordinator`: more arguments of its."""
    local = LocalSwarm(folder, models_root, environment or {})
    try:
        local.start_coordinator(extra=coordinator)
        if peers:
            local.start_peers(*(f"peer-{index}" for index in range(peers)))
    except BaseException:
        local.stop()
        raise
    return Swarm(local)


def swarmnode(*arguments: object, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one command to its end, away from any terminal, with nothing of the caller's SWARM_ variables."""
    return subprocess.run(
        [sys.executable, "-m", "swarmnode", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        env=clean_environment(**environment),
    )


def clean_environment(**extra: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith("SWARM_")}
    return {**own, "OMP_NUM_THREADS": "1", **extra}


def descendants(pid: int) -> list[int]:
    """Pids of all processes under `pid`, children before grandchildren."""
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[1]
                parents.setdefault(int(parent), []).append(int(folder.name))
    found = [pid]
    for known in found:
        found += parents.get(known, [])
    return found[1:]
