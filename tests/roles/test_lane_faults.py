"""A lane over real sockets and TLS through a proxy that spoils what passes: every frame once, in order, or a new link.

Each fault has to show that it took effect. The signs of life are given faster than by a node, so that nobody waits.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
from credentials import Swarm
from toxics import ToxicProxy, Uplink, toxic_proxy

from swarmnode.errors import SwarmError
from swarmnode.ids import RingId
from swarmnode.roles import lane_ends
from swarmnode.roles.lane_ends import LaneIn, LaneOut
from swarmnode.wire.address import Address
from swarmnode.wire.dialing import Dialed, Way
from swarmnode.wire.direct import DirectTransport
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import Channel, LinkOptions, Parameters

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from swarmnode.wire.link import Hello

RING, EPOCH = RingId("r1"), (1, 0)
SIGN_S, SILENCE_S, LOOK_S = 0.2, 0.6, 0.05
LATE_S = 5.0
"""Anything else of a test, on a machine with much to do."""


@pytest.fixture(autouse=True)
def quick_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("SIGN_S", SIGN_S), ("SILENCE_S", SILENCE_S), ("LOOK_S", LOOK_S)):
        monkeypatch.setattr(lane_ends, name, seconds)


class Lane:
    """One lane from `out` to `inside`, dialed through `proxy`; `wrap` may put frame toxics on the sender's channel."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.got: list[Frame] = []
        self.out = LaneOut(RING, name, EPOCH)
        self.inside = LaneIn(RING, name, EPOCH, 7, self.got.append)
        self.dials = 0
        self.broke: list[str] = []
        """What each link that ended was said to have died of, at either end."""
        self.wrap: Callable[[Channel], Channel] = lambda channel: channel

    async def arrived(self, count: int) -> None:
        with trio.fail_after(LATE_S):
            while len(self.got) < count:  # noqa: ASYNC110 - frames come one by one
                await trio.sleep(0.01)
        assert [frame.header["session"] for frame in self.got] == list(range(count))

    async def dialed(self, times: int) -> None:
        with trio.fail_after(LATE_S):
            while self.dials < times:  # noqa: ASYNC110 - a link is noticed to be broken some time
                await trio.sleep(0.01)

    def send(self, first: int, count: int, n_bytes: int = 2000) -> None:
        for number in range(first, first + count):
            self.out.post(frame(number, n_bytes))


def frame(number: int, n_bytes: int) -> Frame:
    tensor = {"dtype": "uint8", "shape": [n_bytes], "bytes": n_bytes}
    piece = {"session": number, "gen": 0, "pos": 0, "ids": [1], "last": True, **tensor}
    return Frame("piece", piece, number.to_bytes(2, "big") * (n_bytes // 2))


class Pair:
    """Two nodes with a lane each for steps and prompts."""

    def __init__(self, folder: Path) -> None:
        swarm = Swarm(folder)
        self.here, self.there = swarm.node("attic"), swarm.node("cellar")
        self.lanes = {name: Lane(name) for name in ("act", "pre")}
        self.address = Address("127.0.0.1", 0)

    @asynccontextmanager
    async def running(self, **proxies: ToxicProxy) -> AsyncIterator[None]:
        """`proxies`: by lane."""
        async with trio.open_nursery() as nursery:
            listening = DirectTransport(self.there.tls())
            self.address = await nursery.start(listening.listen, self.address, self._serve, self.there.identity)
            for name, lane in self.lanes.items():
                proxies[name].target = self.address.host, self.address.port
                await nursery.start(lane.out.keep, self._dial(lane, Address(*proxies[name].address)))
            yield
            nursery.cancel_scope.cancel()

    def _dial(self, lane: Lane, address: Address) -> lane_ends.Dial:
        transport = DirectTransport(self.here.tls())
        options = LinkOptions(Parameters(RING, EPOCH, lane.name, 0), node=self.there.node)

        @asynccontextmanager
        async def dial() -> AsyncIterator[Dialed[Channel]]:
            lane.dials += 1
            try:
                async with transport.dial(address, "steps", self.here.identity, options) as channel:
                    yield Dialed(Way("direct", dial, str(address)), lane.wrap(channel), 0.0)
            except SwarmError as error:
                lane.broke.append(error.message)
                raise

        return dial

    async def _serve(self, _kind: str, hello: Hello, channel: Channel) -> None:
        lane = self.lanes[hello.parameters.lane or ""]
        try:
            await lane.inside.serve(channel)
        except SwarmError as error:
            lane.broke.append(error.message)
            raise


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


@pytest.fixture
def proxy() -> Iterator[ToxicProxy]:
    """Of the lane that is spoilt."""
    with toxic_proxy(("127.0.0.1", 9)) as made:
        yield made


@pytest.fixture
def clean() -> Iterator[ToxicProxy]:
    """Of the other."""
    with toxic_proxy(("127.0.0.1", 9)) as made:
        yield made


async def test_latency_is_measured(pair: Pair, proxy: ToxicProxy, clean: ToxicProxy) -> None:
    proxy.there.latency_s, proxy.back.latency_s = 0.03, 0.05
    async with pair.running(act=proxy, pre=clean):
        lane = pair.lanes["act"]
        lane.send(0, 1)
        await lane.arrived(1)
        with trio.fail_after(LATE_S):
            while lane.out.snapshot()["round_trip_ms"] is None:  # noqa: ASYNC110 - an answer comes
                await trio.sleep(0.01)
        assert lane.out.snapshot()["round_trip_ms"] >= 80
        assert lane.dials == 1
    assert proxy.there.effects.delayed_chunks
    assert proxy.back.effects.delayed_chunks


async def test_a_slow_line_is_not_taken_for_a_dead_one(pair: Pair, proxy: ToxicProxy, clean: ToxicProxy) -> None:
    """A piece that takes longer than the silence that breaks a link: its DATA frames are signs."""
    async with pair.running(act=proxy, pre=clean):
        lane = pair.lanes["act"]
        proxy.there.uplink = Uplink(700_000)
        lane.send(0, 1, 1_000_000)
        await trio.sleep(1.5 * SILENCE_S)
        assert lane.got == []
        await lane.arrived(1)
        assert lane.dials == 1
    assert proxy.there.effects.limited_s > SILENCE_S


@pytest.mark.parametrize("way", ["there", "back"])
async def test_a_line_that_is_cut_one_way_is_noticed_and_made_again(
    pair: Pair, proxy: ToxicProxy, clean: ToxicProxy, way: str
) -> None:
    async with pair.running(act=proxy, pre=clean):
        ends = {"there": "the peer reset the channel", "back": "nothing came"}  # who notices first
        lane, direction = pair.lanes["act"], getattr(proxy, way)
        lane.send(0, 5)
        await lane.arrived(5)
        direction.cut = True
        lane.send(5, 5)
        with trio.fail_after(LATE_S):
            while not lane.broke:  # noqa: ASYNC110 - that is what is waited for
                await trio.sleep(0.01)
        direction.cut = False
        await lane.dialed(2)
        await lane.arrived(10)
        assert ends[way] in lane.broke[0]
        assert pair.lanes["pre"].dials == 1
    assert direction.effects.vanished_bytes


async def test_a_reset_is_made_good(pair: Pair, proxy: ToxicProxy, clean: ToxicProxy) -> None:
    async with pair.running(act=proxy, pre=clean):
        lane = pair.lanes["act"]
        for number in range(0, 100, 10):
            lane.send(number, 10)
            if number in (20, 60):
                proxy.reset()
                await lane.dialed(2 + (number == 60))
                await lane.arrived(number + 10)
        await lane.arrived(100)
    assert proxy.resets >= 4, "two connections, at both ends"


async def test_bytes_that_come_in_slices_are_put_together(pair: Pair, proxy: ToxicProxy, clean: ToxicProxy) -> None:
    proxy.there.slice_bytes, proxy.back.slice_bytes = 7, 5
    async with pair.running(act=proxy, pre=clean):
        lane = pair.lanes["act"]
        lane.send(0, 5)
        await lane.arrived(5)
        assert lane.dials == 1
    assert proxy.there.effects.slices > 1000


@pytest.mark.parametrize("way", ["there", "back"])
async def test_a_flipped_bit_breaks_the_link_and_nothing_else(
    pair: Pair, proxy: ToxicProxy, clean: ToxicProxy, way: str
) -> None:
    async with pair.running(act=proxy, pre=clean):
        lane, direction = pair.lanes["act"], getattr(proxy, way)
        lane.send(0, 5)
        await lane.arrived(5)
        direction.corrupt_every = 20
        lane.send(5, 5)
        with trio.fail_after(LATE_S):
            while not lane.broke:  # noqa: ASYNC110 - that is what is waited for
                await trio.sleep(0.01)
        direction.corrupt_every = 0
        await lane.dialed(2)
        await lane.arrived(10)
        bodies = {bytes(piece.body) for piece in lane.got}
        assert bodies == {number.to_bytes(2, "big") * 1000 for number in range(10)}
        assert pair.lanes["pre"].dials == 1
    assert direction.effects.corrupted_bytes


async def test_a_stalled_line_holds_up_its_own_lane_only(pair: Pair, proxy: ToxicProxy, clean: ToxicProxy) -> None:
    async with pair.running(act=clean, pre=proxy):
        steps, prompts = pair.lanes["act"], pair.lanes["pre"]
        prompts.send(0, 1)
        await prompts.arrived(1)
        proxy.there.stalled = True
        await trio.sleep(0.05)
        prompts.send(1, 30, 500_000)
        steps.send(0, 50)
        await steps.arrived(50)
        assert len(prompts.got) == 1
        proxy.there.stalled = False
        await prompts.arrived(31)
        assert steps.dials == 1
    assert proxy.there.effects.stalled_s > 0


# -- frame toxics, above TLS


class Spoilt(Channel):
    """A channel on which frames are doubled, change places or are lost; `effects` counts them."""

    def __init__(self, inner: Channel, toxic: str, number: int, effects: list[str]) -> None:
        self._inner = inner
        self._toxic = toxic
        self._number = number
        self._effects = effects
        self._sent = 0
        self._held: list[Frame] = []
        self.kind, self.counts, self.welcome = inner.kind, inner.counts, inner.welcome

    def send_nowait(self, *frames: Frame) -> None:
        for frame in frames:
            self._send_one(frame)

    def _send_one(self, frame: Frame) -> None:
        if frame.kind == "piece":
            self._sent += 1
            if self._sent == self._number and not self._effects:
                self._effects.append(self._toxic)
                if self._toxic == "duplicate":
                    self._inner.send_nowait(frame)
                elif self._toxic == "reorder":
                    self._held.append(frame)
                    return
                else:
                    return
        self._inner.send_nowait(frame)
        while self._held:
            self._inner.send_nowait(self._held.pop())

    async def send(self, frame: Frame) -> None:
        await trio.lowlevel.checkpoint()
        self.send_nowait(frame)

    async def receive(self) -> Frame:
        return await self._inner.receive()

    async def flush(self) -> None:
        await self._inner.flush()

    def end_sending(self) -> None:
        self._inner.end_sending()

    async def aclose(self) -> None:
        await self._inner.aclose()

    def abort(self) -> None:
        self._inner.abort()


@pytest.mark.parametrize("number", [1, 5, 10], ids=["first", "middle", "last"])
@pytest.mark.parametrize(("toxic", "breaks"), [("duplicate", False), ("reorder", True), ("drop", True)])
async def test_frames_that_come_twice_in_disorder_or_not_at_all(
    pair: Pair, proxy: ToxicProxy, clean: ToxicProxy, toxic: str, breaks: bool, number: int
) -> None:
    effects: list[str] = []
    lane = pair.lanes["act"]
    lane.wrap = lambda channel: Spoilt(channel, toxic, number, effects)
    async with pair.running(act=proxy, pre=clean):
        lane.send(0, 10)
        await lane.arrived(10)
        await trio.sleep(2 * SIGN_S)
        assert [frame.header["session"] for frame in lane.got] == list(range(10))
        assert (lane.dials > 1) is breaks
        assert pair.lanes["pre"].dials == 1
        lane.send(10, 5)
        await lane.arrived(15)
    assert effects == [toxic]
