"""README's "On your machines" with two machines that are apart: each has its own network, with one cable between them.

`test_joining.py` has the same over loopback addresses; here nothing is reachable by accident.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from local_swarms import COMMAND_S, REPLY, clean_environment, wait_until

from swarmnode.cli.local_swarm import NodeProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e
COORDINATOR, PEER = "10.213.77.1", "10.213.77.2"
"""On a cable of their own: no machine outside the test has these addresses."""
CUT_WITHIN_S = 5.0
_names = itertools.count()


@dataclass
class Host:
    """A network namespace: another machine, as far as addresses and ports are concerned."""

    namespace: str
    data: Path

    @property
    def prefix(self) -> list[str]:
        return ["ip", "netns", "exec", self.namespace]

    def up(self, *arguments: str, **environment: str) -> NodeProcess:
        return NodeProcess(["--data-dir", str(self.data), *arguments], environment, self.prefix)

    def swarmnode(self, *arguments: str) -> str:
        """One command as somebody types it there; returns what it printed."""
        return self.try_swarmnode(*arguments, check=True).stdout

    def try_swarmnode(self, *arguments: str, check: bool = False) -> subprocess.CompletedProcess[str]:
        command = [*self.prefix, sys.executable, "-m", "swarmnode", *arguments]
        environment = clean_environment(SWARM_DATA_DIR=str(self.data))
        return subprocess.run(command, check=check, capture_output=True, text=True, timeout=COMMAND_S, env=environment)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [*self.prefix, sys.executable, "-m", "swarmnode", *arguments]
        environment = clean_environment(SWARM_DATA_DIR=str(self.data), PYTHONUNBUFFERED="1")
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)

    def get(self, url: str, path: str) -> tuple[int, Any]:
        """Status and JSON of one GET from this machine."""
        program = "import sys, httpx; r = httpx.get(sys.argv[1], trust_env=False); print(r.status_code); print(r.text)"
        command = [*self.prefix, sys.executable, "-c", program, url + path]
        shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMMAND_S).stdout
        status, text = shown.split("\n", 1)
        return int(status), json.loads(text)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("making network namespaces needs root and the ip command (iproute2)")
    tag = f"swn{os.getpid()}x{next(_names)}"
    names = (f"{tag}a", f"{tag}b")
    made = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
        cable = [f"v{os.getpid() % 100000}{end}" for end in "ab"]
        ip("link", "add", cable[0], "netns", names[0], "type", "veth", "peer", "name", cable[1], "netns", names[1])
        for name, end, address in zip(names, cable, (COORDINATOR, PEER), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        _remove(made)
        pytest.skip(f"this machine makes no network namespaces: {error.stderr.strip()}")
    try:
        yield Host(names[0], tmp_path / "first"), Host(names[1], tmp_path / "second")
    finally:
        _remove(made)


def _remove(names: list[str]) -> None:
    for name in names:
        ip("netns", "delete", name)


def test_a_second_machine(hosts: tuple[Host, Host], models_root: Path) -> None:
    first, second = hosts
    listen = ("--swarm-listen", "0.0.0.0:7700", "--advertise", f"{COORDINATOR}:7700")
    nodes = [first.up("--role", "coordinator", *listen, SWARM_SERVABLE_MODELS_ROOT=str(models_root))]
    try:
        nodes[0].wait_for("ready")
        token = first.swarmnode("join-token").strip()
        own = ("--device", "cpu", "--threads", "1", "--memory", "4G", "--api-listen", "127.0.0.1:7701")
        nodes.append(second.up("--role", "peer", "--name", "den", "--join", token, *own))
        assert nodes[1].wait_for("ready")["swarm"].startswith(f"{PEER}:"), "the address towards the coordinator"
        nodes[1].wait_for("joined")
        assert first.swarmnode("doctor")
        assert f"{PEER}:" in reachability(second)["text"]
        wait_until(lambda: '"alive"' in first.swarmnode("ps", "--json").split('"peers"')[1], "the peer said its memory")
        first.swarmnode("model-load", "scripted", "--stages", "1", "--wait")
        assert REPLY in first.swarmnode("infer", "scripted", "hello")

        # the coordinator's API is on its own machine's loopback; this machine's goes to it over the swarm's link
        assert REPLY in second.swarmnode("infer", "scripted", "hello", "--api", "http://127.0.0.1:7701")
        status, body = second.get("http://127.0.0.1:7701", "/v1/models")
        assert (status, [model["id"] for model in body["data"]][:1]) == (200, ["scripted"])
        refused = second.try_swarmnode("join-token", "--api", "http://127.0.0.1:7701")
        assert refused.returncode != 0
        assert "came through den" in refused.stderr

        chat = first.start("infer", "scripted", "long")
        assert chat.stdout is not None
        assert chat.stdout.read(50)
        assert "den is removed" in first.swarmnode("node-remove", "den")
        cut_s = time.monotonic()
        _, complaint = chat.communicate(timeout=COMMAND_S)
        assert time.monotonic() - cut_s < CUT_WITHIN_S
        assert chat.returncode != 0
        assert "stage 0 is lost" in complaint
        wait_until(lambda: any("removed" in str(e.get("reason")) for e in nodes[1].seen), "the peer is told")
        assert '"peers": []' in first.swarmnode("ps", "--json")
        fit = second.try_swarmnode("doctor", "--json")
        assert fit.returncode == 1
        assert "removed from the swarm" in fit.stdout
    finally:
        for node in reversed(nodes):
            node.stop()


def reachability(host: Host) -> dict[str, Any]:
    findings = json.loads(host.swarmnode("doctor", "--json"))["findings"]
    return next(finding for finding in findings if finding["check"] == "reachability")
