"""The doctor's rules: what is good, what is doubtful and what fails, by numbers."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest
from credentials import Swarm

from swarmnode.errors import InvalidRequest
from swarmnode.ids import BootId, NodeId
from swarmnode.roles import diagnosis
from swarmnode.roles.dialing_back import _allowed, dial_back
from swarmnode.roles.running_node import RunningNode, is_running, read_running_node
from swarmnode.wire.direct import DirectTransport
from swarmnode.wire.link import Identity
from swarmnode.wire.memory import MemoryNetwork

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30


@pytest.mark.parametrize(
    ("version", "wanted", "good"),
    [
        ("2.11", ">=2.11,<2.14", True),
        ("2.13.0+cpu", ">=2.11,<2.14", True),
        ("2.13.9", "<2.14,>=2.11", True),
        ("2.14.0", ">=2.11,<2.14", False),
        ("2.10.1", ">=2.11,<2.14", False),
        ("2.9", ">=2.11", False),
        ("3", "", True),
    ],
)
def test_version_ranges(version: str, wanted: str, good: bool) -> None:
    assert diagnosis.within(version, wanted) is good
    assert diagnosis.torch(version, wanted).status == ("pass" if good else "fail")


def test_without_torch_a_machine_can_still_coordinate() -> None:
    assert diagnosis.torch(None, ">=2.11").status == "warn"


@pytest.mark.parametrize(("available", "status"), [(8 * GIB, "pass"), (GIB // 2, "warn"), (GIB // 8, "fail")])
def test_memory(available: int, status: str) -> None:
    finding = diagnosis.memory(available)
    assert (finding.status, bool(finding.fix)) == (status, status != "pass")


@pytest.mark.parametrize(("free", "status"), [(50 * GIB, "pass"), (5 * GIB, "warn"), (GIB // 2, "fail")])
def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, status: str) -> None:
    from shutil import disk_usage

    usage = disk_usage(tmp_path)
    monkeypatch.setattr(diagnosis.shutil, "disk_usage", lambda _: usage._replace(free=free))
    finding = diagnosis.disk_at(tmp_path / "not" / "there", "SWARM_DATA_DIR")
    assert (finding.status, "SWARM_DATA_DIR" in finding.fix) == (status, status != "pass")


def test_a_folder_that_is_not_ours_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis.os, "access", lambda *_: False)
    finding = diagnosis.disk_at(tmp_path, "SWARM_DATA_DIR")
    assert (finding.status, "not writable" in finding.text) == ("fail", True)


@pytest.mark.parametrize(
    ("theirs", "status"),
    [
        (105.0, "pass"),
        (85.0, "pass"),
        (135.0, "pass"),
        (150.0, "warn"),
        (50.0, "warn"),
        (1000.0, "fail"),
        (0.0, "warn"),
    ],
)
def test_clocks(theirs: float, status: str) -> None:
    """Asked at 100, answered at 110: what lies between is no difference."""
    assert diagnosis.clock_finding(100.0, 110.0, theirs).status == status


def test_a_port_is_free_or_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = f"127.0.0.1:{server.getsockname()[1]}"
        assert diagnosis.free_port("port", taken, "fail", "choose another").status == "fail"
    assert diagnosis.free_port("port", taken, "fail", "choose another").status == "pass"
    assert diagnosis.free_port("port", "192.0.2.1:80", "fail", "choose another").status == "fail"


def test_what_a_node_wrote_down_comes_back_and_rubbish_is_nothing(tmp_path: Path) -> None:
    node = RunningNode(1, ("peer",), "127.0.0.1:0", "127.0.0.1:5", "den:5", None)
    assert read_running_node(tmp_path) is None
    node.write(tmp_path)
    assert read_running_node(tmp_path) == node
    for text in ("", "[]", '{"roles": 5}', "{"):
        (tmp_path / "node.json").write_text(text)
        assert read_running_node(tmp_path) is None


def test_a_lock_that_is_held_is_a_node_that_runs(tmp_path: Path) -> None:
    import fcntl

    assert not is_running(tmp_path)
    lock = os.open(tmp_path / "node.lock", os.O_RDWR | os.O_CREAT)
    assert not is_running(tmp_path)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert is_running(tmp_path)
    os.close(lock)


# -- dialling back


def asked_by(node: str, *listen: str) -> Identity:
    return Identity(NodeId(node), BootId("boot"), "attic", ("peer",), listen=listen)


@pytest.mark.parametrize("listen", [(), ("169.254.169.254:80",), ("[fe80::1]:7700",), ("192.0.2.1:0",), ("nonsense",)])
def test_members_cannot_have_the_coordinator_dial_anything(listen: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest):
        _allowed(asked_by("attic", *listen))


async def test_the_dial_proves_who_answers(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    house, attic, other = (swarm.node(name, ("coordinator", "peer")) for name in ("house", "attic", "other"))
    import trio

    async def handler(*_: object) -> None:
        raise AssertionError("nobody opens a channel")

    async with trio.open_nursery() as nursery:
        transport = DirectTransport(attic.tls())

        async def listen(*, task_status: trio.TaskStatus[object]) -> None:
            from swarmnode.wire.address import Address

            await transport.listen(Address("127.0.0.1", 0), handler, attic.identity, task_status=task_status)

        address = str(await nursery.start(listen))
        dialing = DirectTransport(house.tls())
        answer = await dial_back(dialing, asked_by(attic.node, address), "192.0.2.9")
        assert answer.header["ok"] is True
        assert answer.header["time_s"] > 0
        answer = await dial_back(dialing, asked_by(other.node, address), "192.0.2.9")
        assert answer.header["ok"] is False
        assert "another node answers" in answer.header["message"]
        assert "come from 192.0.2.9" in answer.header["message"]
        nursery.cancel_scope.cancel()
    answer = await dial_back(MemoryNetwork(), asked_by(attic.node, address), "")
    assert answer.header["ok"] is False
