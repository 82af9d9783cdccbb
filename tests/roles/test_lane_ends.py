"""A lane over links that drop and come back: every frame once and in order, or a clear end within seconds."""

from __future__ import annotations

from contextlib import asynccontextmanager
from random import Random
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from swarmnode.cluster.membership import RETURN_S
from swarmnode.errors import LinkBroken, ProtocolError
from swarmnode.ids import BootId, NodeId, RingId
from swarmnode.roles.lane_ends import BETTER_S, LATE_S, SIGN_S, SILENCE_S, LaneClosed, LaneIn, LaneOut
from swarmnode.wire.compression import ZIP_KEY
from swarmnode.wire.dialing import Dialed, Way
from swarmnode.wire.frames import Frame
from swarmnode.wire.lane import KEPT_BYTES
from swarmnode.wire.link import Identity, Welcome
from swarmnode.wire.memory import MemoryChannel, memory_pair

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from swarmnode.wire.link import Channel

RING, EPOCH = RingId("r1"), (1, 0)


class Road:
    """Between the two ends of a lane: links of some latency, which a test breaks, refuses or delays."""

    def __init__(self, latency_s: float = 0.01) -> None:
        self.got: list[Frame] = []
        self.boot, self.worker = BootId("boot"), 7
        self.out = LaneOut(RING, "act", EPOCH)
        self.inside = self._new_end()
        self.dials = 0
        self.up = True
        self.route, self.far_route = "direct", "direct"
        self.better = False
        self.refusal: Exception | None = None
        self.ended: list[BaseException] = []
        self.near: MemoryChannel | None = None
        self._latency_s = latency_s
        self._nursery: trio.Nursery | None = None

    def _new_end(self) -> LaneIn:
        return LaneIn(RING, "act", EPOCH, self.worker, self.got.append)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as self._nursery:
            await self._nursery.start(self._keep)
            yield
            self._nursery.cancel_scope.cancel()

    async def _keep(self, *, task_status: trio.TaskStatus[None]) -> None:
        try:
            await self.out.keep(self.dial, self.see_better, task_status=task_status)
        except (LinkBroken, ProtocolError) as error:
            self.ended.append(error)

    async def see_better(self, route: str) -> bool:
        """Whether the direct way is open."""
        assert route == self.route
        await trio.sleep(2 * self._latency_s)
        return self.better

    @asynccontextmanager
    async def dial(self) -> AsyncIterator[Dialed[Channel]]:
        await trio.sleep(2 * self._latency_s)
        self.dials += 1
        if self.refusal is not None:
            raise self.refusal
        if not self.up or self._nursery is None:
            raise LinkBroken("nobody answers")
        near, far = memory_pair("steps", self._latency_s)
        self.route = "direct" if self.better else self.route
        near.route, far.route = self.route, self.far_route
        near.welcome = Welcome(1, Identity(NodeId("b"), self.boot, "b"))
        self._nursery.start_soon(self._serve, far)
        self.near = near
        async with near:
            yield Dialed(Way(self.route, self.dial), near, 0.0)

    async def _serve(self, far: Channel) -> None:
        try:
            async with far:
                await self.inside.serve(far)
        except (LinkBroken, ProtocolError) as error:
            self.ended.append(error)

    def drop(self) -> None:
        """What is on its way is lost."""
        assert self.near is not None
        self.near.break_link()

    def another_process(self) -> None:
        self.worker += 1
        self.inside = self._new_end()

    @property
    def numbers(self) -> list[int]:
        return [frame.header["session"] for frame in self.got]


def end(number: int) -> Frame:
    return Frame("end", {"session": number})


def group(body: bytes) -> Frame:
    header = {"dtype": "bfloat16", "shape": [len(body) // 2], "bytes": len(body)}
    return Frame("group", {"sessions": [1], "gens": [0], "poss": [0], "ns": [1], **header}, body)


@pytest.mark.parametrize("seed", range(15))
async def test_frames_come_once_and_in_order_whatever_the_link_does(seed: int, autojump_clock: object) -> None:
    dice, road = Random(seed), Road()
    async with road.running():
        for number in range(200):
            road.out.post(end(number))
            if dice.random() < 0.1:
                road.drop()
            if dice.random() < 0.3:
                await trio.sleep(dice.random() * 0.1)
        await trio.sleep(5)
        assert road.numbers == list(range(200))
        assert road.dials > 2
    assert road.ended == []


async def test_a_link_that_stays_away_ends_the_lane_at_both_ends(autojump_clock: object) -> None:
    road = Road()
    async with road.running():
        await trio.sleep(1)
        road.up, began_s = False, trio.current_time()
        road.drop()
        await trio.sleep(60)
        assert len(road.ended) == 2
        assert all(isinstance(error, LinkBroken) for error in road.ended)
        assert trio.current_time() - began_s == 60
    assert any("was not back within 3 s" in str(error) for error in road.ended)


async def test_each_end_says_so_in_time(autojump_clock: object) -> None:
    road = Road()
    async with road.running():
        await trio.sleep(1)
        road.up = False
        road.drop()
        await trio.sleep(RETURN_S + 0.5)
        assert len(road.ended) == 1  # the sender
        await trio.sleep(LATE_S)
        assert len(road.ended) == 2  # the receiver, which may have noticed first


async def test_another_worker_at_the_other_end_ends_the_lane_at_once(autojump_clock: object) -> None:
    road = Road()
    async with road.running():
        await trio.sleep(1)
        road.another_process()
        road.drop()
        await trio.sleep(0.5)
        assert [type(error) for error in road.ended] == [ProtocolError]
        assert "another process" in str(road.ended[0])


async def test_another_boot_of_the_node_ends_it_too(autojump_clock: object) -> None:
    road = Road()
    async with road.running():
        await trio.sleep(1)
        road.boot = BootId("another")
        road.drop()
        await trio.sleep(0.5)
        assert [type(error) for error in road.ended] == [ProtocolError]


async def test_a_refusal_is_no_dropped_link(autojump_clock: object) -> None:
    road = Road()
    async with road.running():
        await trio.sleep(1)
        road.refusal = ProtocolError("no stage of this ring is held here")
        road.drop()
        await trio.sleep(0.5)
        assert [str(error) for error in road.ended] == ["no stage of this ring is held here"]


async def test_more_than_is_kept_cannot_be_resumed(autojump_clock: object) -> None:
    road = Road(latency_s=1.0)
    async with road.running():
        await trio.sleep(3)
        for _ in range(3):
            road.out.post(group(bytes(KEPT_BYTES // 2)))
        road.drop()
        await trio.sleep(10)
        assert any("kept are those from" in str(error) for error in road.ended), road.ended


async def test_an_end_in_good_order_is_the_end(autojump_clock: object) -> None:
    road = Road()
    async with road.running():
        await trio.sleep(1)
        assert road.near is not None
        await road.near.aclose()
        await trio.sleep(0.5)
        assert [type(error) for error in road.ended] == [LaneClosed]


async def test_the_link_is_measured_and_compressed_only_when_it_is_slow(autojump_clock: object) -> None:
    body = b"".join(Random(n).gauss(0, 1).hex().encode()[:2] for n in range(4_000))
    for bytes_per_s, compressed in ((1e5, True), (1e12, False)):
        road = Road(latency_s=0.05)
        async with road.running():
            road.out.compression.link_bytes_per_s = bytes_per_s
            for _ in range(3):
                road.out.post(group(body))
                await trio.sleep(1)
            assert road.ended == []
            assert [bytes(frame.body) for frame in road.got] == [body] * 3
            assert road.out.compression.pays is compressed
            assert not any(ZIP_KEY in frame.header for frame in road.got)
            for number in range(64):
                road.out.post(end(number))
                await trio.sleep(1)
            assert road.out.snapshot()["round_trip_ms"] == pytest.approx(100)


# -- signs of life


async def test_an_idle_lane_gives_signs_and_stays(autojump_clock: object) -> None:
    road = Road()
    async with road.running():
        await trio.sleep(600)
        assert (road.dials, road.ended) == (1, [])


@pytest.mark.parametrize("away", ["frames", "answers", "both"])
async def test_a_way_on_which_all_vanishes_is_noticed_at_both_ends(away: str, autojump_clock: object) -> None:
    """The link is dialed again, and nothing is lost."""
    road = Road()
    async with road.running():
        await trio.sleep(1)
        lost_s, near = trio.current_time(), road.near
        assert near is not None
        assert near.other is not None
        if away != "answers":
            swallow(near)
        if away != "frames":
            swallow(near.other)
        road.out.post(end(0))
        await trio.sleep(SILENCE_S - SIGN_S - 1)
        assert road.dials == 1
        await trio.sleep_until(lost_s + 20)
        assert road.dials == 2
        assert road.numbers == [0]
        await trio.sleep(60)
        assert (road.dials, road.ended) == (2, [])


async def test_a_receiver_without_signs_gives_up_by_itself(autojump_clock: object) -> None:
    near, far = memory_pair("steps")
    inside = LaneIn(RING, "act", EPOCH, 7, lambda _: None)
    with pytest.raises(LinkBroken, match="nothing came"):
        await inside.serve(far)
    assert trio.current_time() < 20 + RETURN_S + LATE_S
    assert (await near.receive()).kind == "lane_at"


async def test_the_last_frame_is_missed_by_the_next_sign(autojump_clock: object) -> None:
    road = Road()
    async with road.running():
        await trio.sleep(1)
        assert road.near is not None
        swallow(road.near, frames=1)
        road.out.post(end(0))
        await trio.sleep(SIGN_S + 1)
        assert (road.numbers, road.dials) == ([0], 2)


def swallow(channel: MemoryChannel, frames: int = 1 << 30) -> None:
    """The next frames that are sent on it never arrive."""
    put, left = channel._put, [frames]

    def gone(frame: Frame) -> None:
        if left[0]:
            left[0] -= 1
        else:
            put(frame)

    channel._put = gone  # type: ignore[method-assign]


async def test_signs_say_nothing_of_the_links_round_trip(autojump_clock: object) -> None:
    road = Road(latency_s=0.05)
    async with road.running():
        await trio.sleep(1)
        for number in range(20):
            road.out.post(end(number))
            road.out.post(end(number))  # not asked about: what acknowledges it is a sign
            await trio.sleep(20)
        assert road.out.empty
        assert road.out.snapshot()["round_trip_ms"] == pytest.approx(100)


# -- routes


@pytest.mark.parametrize(
    ("near", "far", "route"),
    [("direct", "direct", "direct"), ("relayed", "polled", "polled"), ("polled", "relayed", "polled")],
)
async def test_a_lanes_route_is_the_worst_of_its_legs(near: str, far: str, route: str, autojump_clock: object) -> None:
    road = Road()
    road.route, road.far_route = near, far
    async with road.running():
        assert road.out.snapshot()["route"] == route


async def test_a_lane_changes_to_a_better_way_when_nothing_is_under_way(autojump_clock: object) -> None:
    road = Road(latency_s=0.5)
    road.route = "polled"
    async with road.running():
        await trio.sleep(3 * BETTER_S)
        assert road.dials == 1, "no way is better"
        road.better = True
        for number in range(300):
            road.out.post(end(number))  # before the last one can be acknowledged
            await trio.sleep(0.3)
        assert road.dials == 1
        await trio.sleep(BETTER_S + 10)
        assert road.dials == 2
        assert road.out.snapshot()["route"] == "direct"
        await trio.sleep(3 * BETTER_S)
        assert road.dials == 2, "there is nothing better than direct"
        road.out.post(end(1000))
        await trio.sleep(2)
        assert road.numbers[-1] == 1000
        assert road.ended == []
