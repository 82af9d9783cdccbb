"""Who may open a lane of a ring: the node that holds the stage before, and nobody else however much it knows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import trio
from test_specs import LOAD

from swarmnode.errors import ProtocolError
from swarmnode.ids import BootId, NodeId, RingId
from swarmnode.roles.context import PeerResources
from swarmnode.roles.stage_host import StageHost
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import Hello, Identity, Parameters
from swarmnode.wire.memory import memory_pair

A, B, C = LOAD.nodes
RIGHT = Parameters(LOAD.ring, LOAD.epoch, "act", 0)


def identity(node: NodeId) -> Identity:
    return Identity(node, BootId("boot"), f"name-{node}", ("peer",))


@pytest.fixture
async def host() -> tuple[StageHost, list[Frame]]:
    """Stage 1 of three, held by B, as if its worker had loaded."""
    posted: list[Frame] = []
    made = StageHost(cast("Any", None), LOAD, PeerResources(0, "cpu", 1), cast("Any", None), posted.append)
    made._ready = True
    return made, posted


LIES = {
    "another member": (C, RIGHT),
    "the stage itself": (B, RIGHT),
    "a node nobody knows": (NodeId("f" * 32), RIGHT),
    "another stage": (A, replace(RIGHT, stage=2)),
    "the last stage's lane": (A, replace(RIGHT, lane="tok")),
    "no lane": (A, replace(RIGHT, lane=None)),
    "an older epoch": (A, replace(RIGHT, epoch=(3, 0))),
    "a later epoch": (A, replace(RIGHT, epoch=(5, 0))),
}


@pytest.mark.parametrize(("node", "parameters"), LIES.values(), ids=LIES)
async def test_a_lane_of_another_is_refused_and_the_ring_unharmed(
    host: tuple[StageHost, list[Frame]], node: NodeId, parameters: Parameters
) -> None:
    stage, posted = host
    _, far = memory_pair("steps")
    with pytest.raises(ProtocolError):
        await stage.serve_lane(Hello(identity(node), parameters), far)
    assert posted == [], "nobody is told that the ring broke, because it did not"


async def test_the_stage_before_is_served_until_its_lane_ends(host: tuple[StageHost, list[Frame]]) -> None:
    stage, posted = host
    near, far = memory_pair("steps")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.serve_lane, Hello(identity(A), RIGHT), far)
        await near.aclose()
    assert [frame.kind for frame in posted] == ["broken"]


async def test_frames_for_another_ring_end_the_lane(host: tuple[StageHost, list[Frame]]) -> None:
    """What only the true neighbour can do: its own link is then at fault, and the ring ends as for any broken link."""
    stage, posted = host
    near, far = memory_pair("steps")
    route = {"ring": RingId("another"), "epoch": list(LOAD.epoch), "lane": "act", "seq": 0}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.serve_lane, Hello(identity(A), RIGHT), far)
        await near.send(Frame("end", {**route, "session": 1}))
    assert [frame.kind for frame in posted] == ["broken"]
    assert not stage._to_worker._waiting
