"""The doctor's rules: what is good, what is doubtful and what fails, by numbers."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from credentials import Swarm

from swarmnode.errors import Conflict, InvalidRequest, LinkBroken, NodeRemoved, SwarmError
from swarmnode.ids import BootId, NodeId
from swarmnode.roles import diagnosis, dialing_back
from swarmnode.roles.dialing_back import DialBacks
from swarmnode.roles.running_node import RunningNode, is_running, read_running_node
from swarmnode.wire.address import Address
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


NEVER = [
    "169.254.169.254:80",
    "2852039166:80",
    "0xa9fea9fe:80",
    "169.254.43518:80",
    "[::ffff:169.254.169.254]:80",
    "[64:ff9b::a9fe:a9fe]:80",
    "[fe80::1]:7700",
    "0.0.0.0:7701",
    "0:7701",
    "[::]:7701",
    "224.0.0.1:80",
    "[ff02::1]:80",
    "192.0.2.1:0",
    "nonsense",
]
HERE = ["127.0.0.1:7701", "localhost:7701", "127.1:22", "2130706433:22", "[::1]:22"]


@pytest.mark.parametrize("listen", [*NEVER, *HERE])
async def test_members_cannot_have_the_coordinator_dial_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listen: str
) -> None:
    async def connected(address: Address) -> trio.SocketStream:
        raise AssertionError(f"it dialled {address}")

    monkeypatch.setattr(dialing_back, "connect", connected)
    house = Swarm(tmp_path).node("house", ("coordinator", "peer"))
    answer = await DialBacks(DirectTransport(house.tls())).answer(asked_by("attic", listen), "192.0.2.9")
    assert answer.header["ok"] is False


async def test_what_is_dialled_is_what_was_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the name, which could stand for another address a moment later."""
    hosts = {"den": ["192.168.1.8"], "both": ["192.168.1.8", "127.0.0.1"]}

    async def resolve(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        return [(2, 1, 6, "", (ip, port)) for ip in hosts[host]]

    monkeypatch.setattr(trio.socket, "getaddrinfo", resolve)
    assert await dialing_back.resolved(Address("den", 7700), "192.168.1.9") == Address("192.168.1.8", 7700)
    with pytest.raises(InvalidRequest):
        await dialing_back.resolved(Address("both", 7700), "192.168.1.9")


async def test_a_closed_port_and_a_foreign_one_look_alike(tmp_path: Path) -> None:
    house = Swarm(tmp_path).node("house", ("coordinator", "peer"))
    dials, said = DialBacks(DirectTransport(house.tls())), set()

    async def hang_up(stream: trio.SocketStream) -> None:
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        port = listener.socket.getsockname()[1]
        nursery.start_soon(trio.serve_listeners, hang_up, [listener])
        said.add((await dials.answer(asked_by("attic", f"127.0.0.1:{port}"), "127.0.0.1")).header["message"])
        nursery.cancel_scope.cancel()
    said.add((await dials.answer(asked_by("attic", f"127.0.0.1:{port}"), "127.0.0.1")).header["message"])
    assert said == {f"this node was not reached at 127.0.0.1:{port}; your packets come from 127.0.0.1"}


async def test_a_member_has_a_few_dials_and_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    house = Swarm(tmp_path).node("house", ("coordinator", "peer"))
    dials, dialled, go_on = DialBacks(DirectTransport(house.tls())), [], trio.Event()

    async def reach(tls: object, address: Address, node: str) -> None:
        dialled.append(node)
        await go_on.wait()

    async def ask(node: str) -> bool:
        return bool((await dials.answer(asked_by(node, "192.0.2.1:80"), "192.0.2.9")).header["ok"])

    monkeypatch.setattr(dialing_back, "reach", reach)
    for node in ("attic", "den"):
        nursery.start_soon(ask, node)
    with trio.fail_after(5):
        while len(dialled) < 2:  # noqa: ASYNC110 - a thread resolves in between
            await trio.sleep(0.01)
    assert not await ask("attic"), "while one is under way"
    go_on.set()
    await trio.testing.wait_all_tasks_blocked()
    assert sum([await ask("attic") for _ in range(20)]) == dialing_back.BURST - 1
    assert await ask("cellar")


async def test_the_dial_proves_who_answers(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    house, attic, other = (swarm.node(name, ("coordinator", "peer")) for name in ("house", "attic", "other"))

    async def handler(*_: object) -> None:
        raise AssertionError("nobody opens a channel")

    async with trio.open_nursery() as nursery:
        transport = DirectTransport(attic.tls())

        async def listen(*, task_status: trio.TaskStatus[object]) -> None:
            await transport.listen(Address("127.0.0.1", 0), handler, attic.identity, task_status=task_status)

        address = str(await nursery.start(listen))
        dials = DialBacks(DirectTransport(house.tls()))
        answer = await dials.answer(asked_by(attic.node, address), "127.0.0.1")
        assert answer.header["ok"] is True
        assert answer.header["time_s"] > 0
        answer = await dials.answer(asked_by(other.node, address), "127.0.0.1")
        assert answer.header["ok"] is False
        assert "another node answers" in answer.header["message"]
        assert "come from 127.0.0.1" in answer.header["message"]
        nursery.cancel_scope.cancel()
    answer = await DialBacks(MemoryNetwork()).answer(asked_by(attic.node, address), "")
    assert answer.header["ok"] is False


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (Conflict("node x is connected already, from another process"), "an identity of its own"),
        (NodeRemoved("in whatever words"), "is out for good"),
        (LinkBroken("connection refused"), "start the coordinator"),
    ],
)
def test_each_refusal_has_its_own_fix(error: SwarmError, part: str) -> None:
    assert part in diagnosis._mend(error)
