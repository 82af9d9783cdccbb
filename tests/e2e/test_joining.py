"""Joining by token over mutual TLS, restarts, copies and removals: real processes, on two loopback addresses."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import stat
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import openai
import pytest
from local_swarms import REPLY, Swarm, alive, swarmnode, wait_until

from swarmnode.cli.local_swarm import LocalSwarm, NodeProcess
from swarmnode.cluster.join_token import parse_join_token
from swarmnode.errors import LoadFailed, SwarmError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e
MODEL = "scripted"
CUT_WITHIN_S = 5.0
OTHER_MACHINE = "127.0.0.2"
"""Another address: what listens only on the first cannot be reached on it."""


@pytest.fixture
def local(tmp_path: Path, models_root: Path) -> Iterator[LocalSwarm]:
    """A coordinator without peers."""
    with LocalSwarm(tmp_path, models_root) as swarm:
        swarm.start_coordinator()
        yield swarm


def peer(local: LocalSwarm, name: str, *arguments: str, data: str | None = None) -> NodeProcess:
    """A peer that is not waited for; `local` ends it, and this one of the same name that ran before."""
    if name in local.peers:
        local.peers[name].stop()
    command = ["--role", "peer", "--name", name, "--data-dir", str(local.folder / (data or name))]
    command += ["--device", "cpu", "--threads", "1", "--memory", "4G", *arguments]
    local.peers[name] = NodeProcess(command)
    return local.peers[name]


def members(local: LocalSwarm) -> dict[str, dict[str, Any]]:
    return {member["name"]: member for member in nodes(local)["members"]}


def nodes(local: LocalSwarm) -> dict[str, Any]:
    with closing(local.client()) as client:
        return client.get("/api/v1/nodes")


def reason(node: NodeProcess, part: str) -> None:
    """The peer is told why it is not let in."""
    wait_until(lambda: any(part in str(event.get("reason")) for event in node.seen), f"the reason {part!r}")


def test_two_machines_join_serve_and_one_is_removed(local: LocalSwarm) -> None:
    """The way the README says it, with the commands people type."""
    admin = {"SWARM_DATA_DIR": str(local.folder / "coordinator"), "SWARM_API": local.api}
    for name, address in (("attic", OTHER_MACHINE), ("den", "127.0.0.3")):
        line = swarmnode("join-token", **admin).stdout
        assert line.startswith("swn1.")
        assert line.count("\n") == 1
        peer(local, name, "--join", line.strip(), "--swarm-listen", f"{address}:0")
    for name in ("attic", "den"):
        local.peers[name].wait_for("joined")
    swarm = Swarm(local)
    status = swarm.load(MODEL)
    assert {stage["peer"] for stage in status["stages"]} == {"attic", "den"}
    assert swarm.ask(MODEL) == REPLY
    workers = swarm.worker_pids(MODEL)
    texts = reading(swarm)
    assert next(texts)

    removed = swarmnode("node-remove", "attic", **admin)
    cut_s = time.monotonic()
    assert "attic is removed" in removed.stdout, removed.stderr
    with pytest.raises(openai.APIError) as raised:
        for _ in texts:
            pass
    assert raised.value.code == "stage_lost"
    assert time.monotonic() - cut_s < CUT_WITHIN_S
    reason(local.peers["attic"], "removed from the swarm")
    wait_until(lambda: not any(map(alive, workers.values())), "neither holds a stage any more, the one that is out too")
    assert [known["name"] for known in nodes(local)["peers"]] == ["den"]
    assert {name: member["state"] for name, member in members(local).items()} == {"attic": "removed", "den": "alive"}
    assert "revoked" in swarmnode("nodes", "--all", **admin).stdout
    assert "attic" not in swarmnode("nodes", **admin).stdout
    with pytest.raises(SwarmError, match="den"), closing(local.client()) as client:
        client.delete("/api/v1/nodes/attic")

    again = peer(local, "attic", "--swarm-listen", f"{OTHER_MACHINE}:0")
    reason(again, "removed from the swarm")
    another = peer(local, "attic", "--join", local.join_token(), data="attic-new")
    another.wait_for("joined")
    wait_until(lambda: [known["state"] for known in nodes(local)["peers"]] == ["alive"] * 2, "both offered memory")
    swarm.load(MODEL)
    assert swarm.ask(MODEL) == REPLY
    swarm.close()


def reading(swarm: Swarm) -> Iterator[str]:
    stream = swarm.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "long"}], stream=True
    )
    for chunk in stream:
        if text := chunk.choices[0].delta.content:
            yield text


def test_identity_and_membership_survive_restarts_of_both_sides(local: LocalSwarm) -> None:
    first = peer(local, "attic", "--join", local.join_token())
    first.wait_for("joined")
    node = members(local)["attic"]["node"]
    first.kill()
    again = peer(local, "attic")
    assert again.wait_for("ready")["node"] == node
    again.wait_for("joined")
    token = local.join_token()
    assert local.coordinator is not None
    coordinator = local.coordinator.seen[0]["node"]
    local.coordinator.kill()
    local.start_coordinator(swarm_listen=local.swarm)
    assert local.coordinator.seen[0]["node"] == coordinator
    again.wait_for("joined")
    assert set(members(local)) == {"attic"}
    peer(local, "den", "--join", token).wait_for("joined")
    for path in (local.folder / "attic" / "identity", local.folder / "coordinator" / "identity"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o600}
    assert stat.S_IMODE((local.folder / "coordinator" / "swarm.json").stat().st_mode) == 0o600
    secret = parse_join_token(token).secret
    assert secret.hex() not in (local.folder / "coordinator" / "swarm.json").read_text()


def test_a_token_is_good_once_and_not_for_long(local: LocalSwarm) -> None:
    token = local.join_token()
    peer(local, "attic", "--join", token).wait_for("joined")
    with pytest.raises(LoadFailed, match="used up or expired"):
        peer(local, "den", "--join", token).wait_for("ready")
    short = local.join_token(ttl_s=1.0)
    time.sleep(1.1)
    with pytest.raises(LoadFailed, match="used up or expired"):
        peer(local, "den", "--join", short).wait_for("ready")
    with pytest.raises(LoadFailed, match="already called 'attic'"):
        peer(local, "attic", "--join", local.join_token(), data="other").wait_for("ready")
    assert set(members(local)) == {"attic"}


def test_a_copied_data_directory_is_refused_and_the_first_machine_goes_on(local: LocalSwarm) -> None:
    first = peer(local, "attic", "--join", local.join_token())
    first.wait_for("joined")
    shutil.copytree(local.folder / "attic", local.folder / "copy")
    copy = peer(local, "copy", data="copy")
    reason(copy, "data directory copied")
    assert not any(event["event"] == "coordinator_lost" for event in first.seen)
    assert members(local)["attic"]["state"] == "alive"
    copy.stop()
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    peer(local, "moved", data="copy").wait_for("joined")


def test_another_swarms_token_and_another_swarms_peer(local: LocalSwarm, tmp_path: Path, models_root: Path) -> None:
    peer(local, "attic", "--join", local.join_token()).wait_for("joined")
    with LocalSwarm(tmp_path / "other", models_root) as other:
        other.start_coordinator()
        with pytest.raises(LoadFailed, match="another swarm"):
            peer(local, "attic", "--join", other.join_token()).wait_for("ready")
        (local.folder / "attic" / "identity" / "coordinators.json").write_text(f'["{other.swarm}"]')
        lost = peer(local, "attic").wait_for("coordinator_lost")
        assert "belong to this swarm" in lost["reason"]
        assert members(other) == {}


def test_both_roles_in_one_process_need_no_token(local: LocalSwarm, models_root: Path) -> None:
    command = ["--role", "coordinator", "--role", "peer", "--name", "all", "--data-dir", str(local.folder / "all")]
    command += ["--swarm-listen", "127.0.0.1:0", "--api-listen", "127.0.0.1:0", "--device", "cpu", "--memory", "4G"]
    local.peers["all"] = NodeProcess(command, {"SWARM_SERVABLE_MODELS_ROOT": str(models_root)})
    local.peers["all"].wait_for("joined")


def test_a_peers_own_port_and_the_coordinators_show_nothing_without_credentials(local: LocalSwarm) -> None:
    """What a port scan finds: TLS 1.3 only, and behind it no answer to any request without a certificate."""
    attic = peer(local, "attic", "--join", local.join_token())
    ready = attic.wait_for("ready")
    for address in (local.swarm, str(ready["swarm"])):
        host, port = address.rsplit(":", 1)
        for first in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", os.urandom(300)):
            assert answer_to(host, int(port), first) in (b"", ALERT), address
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with socket.create_connection((host, int(port)), timeout=5) as raw, pytest.raises(OSError):
            context.wrap_socket(raw)


ALERT = b"\x15"
"""The first byte of a TLS alert."""


def answer_to(host: str, port: int, data: bytes) -> bytes:
    with socket.create_connection((host, port), timeout=8) as stream:
        stream.sendall(data)
        try:
            return stream.recv(1)
        except ConnectionResetError:
            return b""
