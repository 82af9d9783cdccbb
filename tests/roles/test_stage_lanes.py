"""Who may open a lane of a ring: the node that holds the stage before, and nobody else however much it knows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
import trio.testing
from contexts import node_context
from test_specs import LOAD

from swarmnode.errors import LinkBroken, ProtocolError
from swarmnode.ids import BootId, NodeId, RingId
from swarmnode.roles.context import PeerResources
from swarmnode.roles.ring_lanes import EPOCH_S, RingLanes
from swarmnode.roles.stage_host import StageHost
from swarmnode.wire.address import Address
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import Hello, Identity, Parameters
from swarmnode.wire.memory import MemoryNetwork, memory_pair

if TYPE_CHECKING:
    from swarmnode.errors import SwarmError
    from swarmnode.wire.link import Channel

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


async def test_the_stage_before_is_served_until_its_lane_ends(
    host: tuple[StageHost, list[Frame]], autojump_clock: object
) -> None:
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


# -- linking anew


ANEW = replace(RIGHT, epoch=(LOAD.epoch[0], LOAD.epoch[1] + 1))


async def test_a_neighbour_that_heard_of_the_next_link_epoch_first_is_waited_for(
    host: tuple[StageHost, list[Frame]], autojump_clock: object
) -> None:
    stage, posted = host
    near, far = memory_pair("steps")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stage.serve_lane, Hello(identity(A), ANEW), far)
        route = {"ring": LOAD.ring, "epoch": list(ANEW.epoch or ()), "lane": "act", "seq": 0}
        await near.send(Frame("end", {**route, "session": 1}))
        await trio.sleep(EPOCH_S / 2)
        stage._lanes.advance(cast("Any", ANEW.epoch))
        await trio.testing.wait_all_tasks_blocked()
        assert [frame.kind for frame in stage._to_worker._waiting] == ["end"]
        nursery.cancel_scope.cancel()
    assert posted == []


async def test_but_not_for_ever(host: tuple[StageHost, list[Frame]], autojump_clock: object) -> None:
    stage, posted = host
    began_s = trio.current_time()
    with pytest.raises(ProtocolError, match="is at epoch"):
        await stage.serve_lane(Hello(identity(A), ANEW), memory_pair("steps")[1])
    assert trio.current_time() - began_s == pytest.approx(EPOCH_S)
    assert posted == []


async def test_the_next_link_epoch_ends_the_lanes_of_the_last_without_a_word(
    host: tuple[StageHost, list[Frame]],
) -> None:
    stage, posted = host
    _, far = memory_pair("steps")
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stage.serve_lane, Hello(identity(A), RIGHT), far)
            await trio.testing.wait_all_tasks_blocked()
            stage._lanes.advance(cast("Any", ANEW.epoch))
    assert posted == []


async def test_lanes_that_break_together_are_reported_once_with_their_epoch(
    host: tuple[StageHost, list[Frame]],
) -> None:
    stage, posted = host
    pairs = [memory_pair("steps") for _ in range(2)]
    async with trio.open_nursery() as nursery:
        for lane, (_, far) in zip(("act", "pre"), pairs, strict=True):
            nursery.start_soon(stage.serve_lane, Hello(identity(A), replace(RIGHT, lane=lane)), far)
        await trio.testing.wait_all_tasks_blocked()
        for near, _ in pairs:
            await near.aclose()
    assert [(frame.kind, frame.header["epoch"]) for frame in posted] == [("broken", list(LOAD.epoch))]


class Neighbour:
    """The next stage's node: what reaches it, by link epoch and lane."""

    def __init__(self) -> None:
        self.got: list[tuple[Any, str | None, str]] = []
        self.open = 0

    async def serve(self, kind: str, hello: Hello, channel: Channel) -> None:
        where = hello.parameters
        self.open += 1
        await channel.send(Frame("lane_at", {"seq": 0, "worker": 1}))
        try:
            async for frame in channel:
                self.got.append((where.epoch, where.lane, frame.kind))
        finally:
            self.open -= 1


async def test_outgoing_lanes_are_dialed_anew_and_what_was_queued_is_gone() -> None:
    network, neighbour, told, linked = MemoryNetwork(), Neighbour(), [], []
    context = node_context(identity(B), network)
    lanes = RingLanes(context, LOAD, lambda _: None, told.append)
    end = Frame("end", {"session": 1, "lane": "act"})
    async with trio.open_nursery() as nursery:
        listen = partial(network.listen, Address("127.0.0.1", 0), neighbour.serve, identity(C))
        address = str(await nursery.start(listen))
        nursery.start_soon(lanes.dial, [address], lambda: linked.append(lanes.epoch))
        await trio.testing.wait_all_tasks_blocked()
        lanes.post(end)
        await trio.testing.wait_all_tasks_blocked()
        assert neighbour.got == [(LOAD.epoch, "act1", "end")]
        lanes.advance(cast("Any", ANEW.epoch))
        lanes.post(end)
        lanes.advance((LOAD.epoch[0], 2))
        await trio.testing.wait_all_tasks_blocked()
        assert neighbour.open == 0
        nursery.start_soon(lanes.dial, [address], lambda: linked.append(lanes.epoch))
        await trio.testing.wait_all_tasks_blocked()
        assert (neighbour.open, len(neighbour.got)) == (2, 1)
        lanes.post(end)
        await trio.testing.wait_all_tasks_blocked()
        assert neighbour.got[1:] == [((LOAD.epoch[0], 2), "act1", "end")]
        nursery.cancel_scope.cancel()
    assert linked == [LOAD.epoch, (LOAD.epoch[0], 2)]
    assert told == []


async def test_a_neighbour_that_does_not_answer_breaks_the_epoch_it_was_dialed_in() -> None:
    told: list[SwarmError] = []
    context = node_context(identity(B), MemoryNetwork())
    lanes = RingLanes(context, LOAD, lambda _: None, told.append)
    for address in ("127.0.0.1:9", "nonsense"):
        await lanes.dial([address], lambda: pytest.fail("not linked"))
        lanes.advance((LOAD.epoch[0], lanes.epoch[1] + 1))
    assert len(told) == 2


@pytest.mark.parametrize("knows", [True, False])
async def test_the_head_hears_of_the_loss_once(knows: bool) -> None:
    """Whether a lane broke here or the coordinator alone knew; and again only after its next probe was back."""
    posted: list[Frame] = []
    head_load = replace(LOAD, stage=0)
    stage = StageHost(cast("Any", None), head_load, PeerResources(0, "cpu", 1), cast("Any", None), posted.append)
    stage._ready, stage._nursery = True, cast("Any", NoNursery())
    if knows:
        stage._lane_broke(LinkBroken("cut"))
    stage.link(["127.0.0.1:9"], (LOAD.epoch[0], 1))
    stage.link(["127.0.0.1:9"], (LOAD.epoch[0], 2))
    stage._route_all([Frame("broken", {"stage": 0, "message": "the echo"})])
    assert [frame.kind for frame in stage._to_worker._waiting] == ["broken"]
    assert len([frame for frame in posted if frame.kind == "broken"]) == knows
    stage._route_all([Frame("probed", {"ring": LOAD.ring, "ms": 1.0})])
    stage._lane_broke(LinkBroken("cut"))
    assert [frame.kind for frame in stage._to_worker._waiting] == ["broken", "broken"]
    stage.link(["127.0.0.1:9"], (LOAD.epoch[0], 1))
    assert stage._lanes.epoch == (LOAD.epoch[0], 2), "a command of an earlier epoch crossed"


class NoNursery:
    def start_soon(self, *_: object) -> None: ...
