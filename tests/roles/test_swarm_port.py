"""The swarm port of a node that may coordinate: others look for it where it was."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio

from swarmnode.config import read_settings
from swarmnode.errors import NotCoordinator
from swarmnode.ids import NodeId
from swarmnode.node import NodeOptions, _Node
from swarmnode.roles.context import PeerResources
from swarmnode.wire.address import Address, parse_address

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

END_S = 20.0
OPTIONS = NodeOptions(
    ("coordinator",), Address("127.0.0.1", 0), None, None, None, "desk", PeerResources(1 << 30, "cpu", 1)
)


async def started(folder: Path, options: NodeOptions = OPTIONS) -> dict[str, Mapping[str, object]]:
    """The events of a node up to `ready`; then it ends."""
    events: dict[str, Mapping[str, object]] = {}
    ready = trio.Event()

    def emit(event: str, values: Mapping[str, object]) -> None:
        events[event] = values
        if event == "ready":
            ready.set()

    node = _Node(options, read_settings(folder), emit)
    with trio.fail_after(END_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.run)
            await ready.wait()
            nursery.cancel_scope.cancel()
    return events


async def test_a_node_comes_back_at_the_port_it_had_where_any_will_do(tmp_path: Path) -> None:
    """Four starts: by chance the system might give one port twice, not so often."""
    ports = {(await started(tmp_path))["ready"]["swarm"] for _ in range(4)}
    assert len(ports) == 1


async def test_where_its_port_is_taken_it_says_which_it_was(tmp_path: Path) -> None:
    before = parse_address(str((await started(tmp_path))["ready"]["swarm"]))
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((before.host, before.port))
        other.listen()
        events = await started(tmp_path)
    assert str(before) in str(events["warning"]["text"])
    assert events["ready"]["swarm"] != str(before)


async def test_a_port_that_was_chosen_is_the_one(tmp_path: Path) -> None:
    before = str((await started(tmp_path))["ready"]["swarm"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        chosen = Address("127.0.0.1", free.getsockname()[1])
    now = await started(tmp_path, replace(OPTIONS, swarm_listen=chosen))
    assert now["ready"]["swarm"] == str(chosen) != before


class Voted:
    """What a voter knows of who coordinates."""

    node, term = NodeId("me"), 3

    def __init__(self, coordinator: str | None) -> None:
        self.coordinator = coordinator


@pytest.mark.parametrize(
    ("coordinator", "said"), [(None, "knows of no other"), ("other", "node other does"), ("me", "about to")]
)
def test_a_voter_says_of_the_coordinator_what_it_knows(tmp_path: Path, coordinator: str | None, said: str) -> None:
    node = _Node(OPTIONS, read_settings(tmp_path), lambda *_: None)
    node._voting = cast("Any", Voted(coordinator))
    with pytest.raises(NotCoordinator, match=said):
        node._standing("control")
