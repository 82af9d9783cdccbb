"""A coordinator and peers as real processes on this machine: what the demo, tests and benchmarks start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any, Self

from swarmnode.cli.client import ApiClient
from swarmnode.errors import LoadFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import TracebackType

READY_S = 30.0
STOP_S = 8.0
"""A node ends itself within 5 s; beyond this it is killed."""
POLL_S = 0.05
ANY_PORT = "127.0.0.1:0"


class NodeProcess:
    """One `swarmnode up … --json`: its events, its stderr's tail, and an end that always comes.

    The node's stdin is a pipe that this process holds open: however this process ends, SIGKILL included, the node
    sees the end of it and ends too.
    """

    def __init__(
        self, arguments: list[str], environment: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> None:
        """`prefix`: a command that runs the node, like `ip netns exec attic`; it must not outlive it."""
        command = [*prefix, sys.executable, "-m", "swarmnode", "up", *arguments, "--json", "--end-with-stdin"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        self.log: deque[str] = deque(maxlen=200)
        self.seen: list[dict[str, Any]] = []
        self._events: Queue[dict[str, Any] | None] = Queue()
        self._threads = [
            threading.Thread(target=self._read_events, daemon=True),
            threading.Thread(target=self._read_log, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def wait_for(self, event: str, timeout_s: float = READY_S) -> dict[str, Any]:
        """The next event of that name; raises LoadFailed with the node's last words when it ends or does not come."""
        deadline_s = time.monotonic() + timeout_s
        try:
            while (found := self._events.get(timeout=max(0.0, deadline_s - time.monotonic()))) is not None:
                if found["event"] == event:
                    return found
        except Empty:
            raise LoadFailed(f"a node did not report {event} within {timeout_s:.0f} s: {self._last_words()}") from None
        raise LoadFailed(f"a node ended before {event}: {self._last_words()}")

    def kill(self) -> None:
        """SIGKILL, as a power cut would."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """SIGTERM, and SIGKILL where that does not end it in time; returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
        for thread in self._threads:
            thread.join(timeout=1.0)
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        return self.process.returncode

    def _read_events(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            self.seen.append(event)
            self._events.put(event)
        self._events.put(None)

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())

    def _last_words(self) -> str:
        return " | ".join([*list(self.log)[-5:], *(str(event) for event in self.seen[-1:])]) or "it said nothing"


@dataclass(slots=True)
class LocalSwarm:
    """A coordinator with `models_root` and peers that each have their own directory under `folder`."""

    folder: Path
    models_root: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    coordinator: NodeProcess | None = None
    peers: dict[str, NodeProcess] = field(default_factory=dict)
    api: str = ""
    swarm: str = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start_coordinator(
        self, *, api_listen: str = ANY_PORT, swarm_listen: str = ANY_PORT, extra: tuple[str, ...] = ()
    ) -> None:
        arguments = ["--role", "coordinator", "--name", "coordinator", "--data-dir", str(self.folder / "coordinator")]
        arguments += ["--api-listen", api_listen, "--swarm-listen", swarm_listen, *extra]
        environment = {**self.environment, "SWARM_SERVABLE_MODELS_ROOT": str(self.models_root)}
        if self.coordinator is not None:
            self.coordinator.stop()
        self.coordinator = NodeProcess(arguments, environment)
        ready = self.coordinator.wait_for("ready")
        self.api, self.swarm = ready["api"], ready["swarm"]

    def start_peers(self, *names: str, threads: int = 1, memory: str = "4G", extra: tuple[str, ...] = ()) -> None:
        """Start peers side by side, anew where they ran, and wait until all have joined, the new ones by a token."""
        token = self.join_token(uses=len(names))
        for name in names:
            arguments = ["--role", "peer", "--name", name, "--data-dir", str(self.folder / name), "--join", token]
            arguments += ["--device", "cpu", "--threads", str(threads), "--memory", memory, *extra]
            if name in self.peers:
                self.peers[name].stop()
            self.peers[name] = NodeProcess(arguments, self.environment)
        for name in names:
            self.peers[name].wait_for("joined")
        self._wait_for_offers(*names)

    def _wait_for_offers(self, *names: str) -> None:
        """A peer that joined is used for loads from its first beat on, which says what it offers."""
        deadline_s = time.monotonic() + READY_S
        with closing(self.client()) as client:
            while not set(names) <= _alive(client.get("/api/v1/nodes")):
                if time.monotonic() > deadline_s:
                    raise LoadFailed(f"not all of {', '.join(names)} said within {READY_S:.0f} s what they offer")
                time.sleep(POLL_S)

    def client(self) -> ApiClient:
        """An administrator's calls, with the coordinator's own secret."""
        return ApiClient(self.api, data_dir=self.folder / "coordinator")

    def join_token(self, *, uses: int = 1, ttl_s: float = 3600.0) -> str:
        with closing(self.client()) as client:
            return str(client.post("/api/v1/join-tokens", {"ttl_s": ttl_s, "uses": uses})["token"])

    def stop(self) -> None:
        """End every node, peers first."""
        for node in self._nodes():
            if node.process.poll() is None:
                node.process.send_signal(signal.SIGTERM)
        for node in self._nodes():
            node.stop()

    def _nodes(self) -> Iterator[NodeProcess]:
        yield from self.peers.values()
        if self.coordinator is not None:
            yield self.coordinator


def _alive(nodes: Mapping[str, Any]) -> set[str]:
    return {peer["name"] for peer in nodes["peers"] if peer["state"] == "alive"}
