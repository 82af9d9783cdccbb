"""`swarmnode doctor` beside real nodes: running, stopped, unreachable, expired, and with its ports taken."""

from __future__ import annotations

import json
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest
from local_swarms import swarmnode

from swarmnode.cli.local_swarm import LocalSwarm
from swarmnode.roles.identity import NodeIdentity
from swarmnode.wire import certificates as certs
from swarmnode.wire.link import PROTOCOL

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e


@pytest.fixture
def local(tmp_path: Path, models_root: Path) -> Iterator[LocalSwarm]:
    with LocalSwarm(tmp_path, models_root) as swarm:
        swarm.start_coordinator()
        yield swarm


def examined(folder: Path) -> tuple[bool, dict[str, dict[str, Any]]]:
    """Whether the machine is fit, and the findings by check; what fails has its fix, and the exit code says it."""
    done = swarmnode("doctor", "--json", "--data-dir", folder)
    report = json.loads(done.stdout)
    assert done.returncode == (0 if report["fit"] else 1), done.stderr
    for finding in report["findings"]:
        assert finding["fix"] or finding["status"] == "pass", finding
    return report["fit"], {finding["check"]: finding for finding in report["findings"]}


def statuses(findings: dict[str, dict[str, Any]], *checks: str) -> list[str]:
    return [findings[check]["status"] for check in checks]


def test_both_kinds_of_node_are_fit_running_and_stopped(local: LocalSwarm) -> None:
    local.start_peers("attic")
    peer_checks = ("Python", "swarm port", "certificate", "coordinator", "reachability", "clock")
    fit, findings = examined(local.folder / "attic")
    assert fit
    assert statuses(findings, *peer_checks) == ["pass"] * 6
    assert "seen from the coordinator" in findings["reachability"]["text"]
    assert f"protocol {PROTOCOL[1]}" in findings["coordinator"]["text"]
    fit, findings = examined(local.folder / "coordinator")
    assert fit
    assert statuses(findings, "swarm port", "API port", "certificate", "reachability") == ["pass"] * 4
    assert "is open" in findings["API port"]["text"]
    assert not any(event["event"] == "coordinator_lost" for event in local.peers["attic"].seen)

    local.peers["attic"].stop()
    fit, findings = examined(local.folder / "attic")
    assert fit, "the doctor stands in for the node, and is dialled back"
    assert statuses(findings, *peer_checks) == ["pass"] * 6
    assert local.coordinator is not None
    local.coordinator.stop()
    fit, findings = examined(local.folder / "coordinator")
    assert fit
    assert "is free" in findings["swarm port"]["text"]
    fit, findings = examined(local.folder / "attic")
    assert not fit
    assert findings["coordinator"]["status"] == "fail"
    assert "start the coordinator" in findings["coordinator"]["fix"]


def test_an_advertised_address_that_nobody_reaches(local: LocalSwarm) -> None:
    """Nobody listens there, or another node does: the coordinator says what it saw."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nowhere = f"127.0.0.1:{unused.getsockname()[1]}"
        for advertised, text in ((nowhere, "not reached"), (local.swarm, "another node answers")):
            local.start_peers("attic", extra=("--advertise", advertised))
            _, findings = examined(local.folder / "attic")
            assert findings["reachability"]["status"] == "warn"
            assert text in findings["reachability"]["text"]
            assert "go through the coordinator" in findings["reachability"]["text"]
            assert "--advertise" in findings["reachability"]["fix"]
            assert findings["clock"]["status"] == "pass"
            local.peers["attic"].stop()


def test_a_port_that_another_program_has(local: LocalSwarm) -> None:
    assert local.coordinator is not None
    local.coordinator.stop()
    node = json.loads((local.folder / "coordinator" / "node.json").read_text())
    (local.folder / "coordinator" / "node.json").write_text(json.dumps({**node, "wanted": local.swarm}))
    host, port = local.swarm.rsplit(":", 1)
    with socket.create_server((host, int(port))):
        fit, findings = examined(local.folder / "coordinator")
        assert not fit
        assert "cannot be bound" in findings["swarm port"]["text"]
        assert "--swarm-listen" in findings["swarm port"]["fix"]


def test_an_expired_certificate_and_one_of_another_ca(local: LocalSwarm) -> None:
    local.start_peers("attic")
    local.peers["attic"].stop()
    identity = NodeIdentity.open(local.folder / "attic")
    member = identity.membership()
    assert member is not None
    other_key = certs.new_key()
    other = certs.new_ca(other_key, time.time())
    public = identity.key.public_key()
    identity.renew(certs.issue(other, other_key, public, ("peer",), time.time()))
    fit, findings = examined(local.folder / "attic")
    assert not fit
    assert "not issued by this swarm's CA" in findings["certificate"]["text"]
    assert "--join TOKEN" in findings["certificate"]["fix"]

    ca_key = certs.key_from_pem((local.folder / "coordinator" / "identity" / "ca-key.pem").read_bytes())
    identity.renew(certs.issue(member.ca, ca_key, public, ("peer",), time.time() - 40 * 86_400))
    fit, findings = examined(local.folder / "attic")
    assert not fit
    assert "is this clock right" in findings["certificate"]["text"]
    assert "coordinator" not in findings, "without a certificate there is nothing to dial with"


def test_a_machine_that_never_ran_is_fit_and_left_as_it_was(tmp_path: Path) -> None:
    fit, findings = examined(tmp_path / "new")
    assert fit
    assert findings["certificate"]["status"] == "warn"
    assert "join-token" in findings["certificate"]["fix"]
    assert list(tmp_path.iterdir()) == []


def test_the_lines_for_people(tmp_path: Path) -> None:
    shown = swarmnode("doctor", "--data-dir", tmp_path)
    assert shown.returncode == 0
    assert "pass Python: 3." in shown.stdout
    assert "warn certificate: this machine belongs to no swarm yet\n     fix: start it with" in shown.stdout
