"""The outbox: at once when nothing waits, else in order; never lost, doubled or stamped twice."""

from __future__ import annotations

import os
import random

import pytest
import trio
import trio.testing

from swarmnode.errors import LinkBroken, Overloaded
from swarmnode.ids import BootId, NodeId, RingId
from swarmnode.roles import outbox as outbox_module
from swarmnode.roles.outbox import Outbox
from swarmnode.wire.address import Address
from swarmnode.wire.frames import Frame, FrameDecoder
from swarmnode.wire.lane import LaneReceiver, LaneSender
from swarmnode.wire.link import Channel, Hello, Identity
from swarmnode.wire.memory import MemoryNetwork
from swarmnode.wire.pipe import FramePipe
from swarmnode.wire.traffic import Counts


class TightChannel(Channel):
    """Takes `room` frames at once, then makes senders wait for `drain`."""

    def __init__(self, room: int) -> None:
        self.counts = Counts()
        self.room = room
        self.sent: list[Frame] = []
        self.broken = False
        self._drained = trio.Event()

    def drain(self, room: int) -> None:
        self.room = room
        self._drained.set()
        self._drained = trio.Event()

    async def send(self, frame: Frame) -> None:
        while not self.room:
            await self._drained.wait()
        self.send_nowait(frame)
        await trio.lowlevel.checkpoint()

    def send_nowait(self, *frames: Frame) -> None:
        if self.broken:
            raise LinkBroken("cut")
        if self.room < len(frames):
            raise Overloaded("full")
        self.room -= len(frames)
        self.sent += frames

    async def receive(self) -> Frame:
        raise trio.EndOfChannel

    async def flush(self) -> None: ...

    def end_sending(self) -> None: ...

    async def aclose(self) -> None: ...

    def abort(self) -> None: ...


def numbered(number: int) -> Frame:
    return Frame("end", {"session": number})


@pytest.mark.parametrize("seed", range(20))
async def test_frames_go_in_order_each_stamped_once_whatever_waits(seed: int) -> None:
    dice = random.Random(seed)
    channel = TightChannel(dice.randrange(3))
    sender, receiver = (kind(RingId("ring"), "act", (1, 0)) for kind in (LaneSender, LaneReceiver))
    outbox = Outbox(sender.stamp)
    posted = 0
    async with trio.open_nursery() as nursery:
        for round_number in range(30):
            for _ in range(dice.randrange(4)):
                together = dice.randrange(1, 4)
                outbox.post(*(numbered(posted + n) for n in range(together)))
                posted += together
            if round_number == 3:
                nursery.start_soon(outbox.run, channel)
            if dice.random() < 0.5:
                channel.drain(dice.randrange(4))
            if dice.random() < 0.5:
                await trio.testing.wait_all_tasks_blocked()
        channel.drain(1000)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert [frame.header["session"] for frame in channel.sent] == list(range(posted))
    assert all(receiver.accept(frame) is not None for frame in channel.sent)
    assert outbox._bytes == 0


async def test_an_idle_outbox_sends_in_the_step_that_posts() -> None:
    outbox, channel = Outbox(), TightChannel(10)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outbox.run, channel)
        await trio.testing.wait_all_tasks_blocked()
        outbox.post(numbered(1))
        assert channel.sent == [numbered(1)]
        nursery.cancel_scope.cancel()
    outbox.post(numbered(2))
    assert len(channel.sent) == 1, "nobody runs it any more"


async def test_a_broken_channel_ends_the_run_and_not_the_poster() -> None:
    outbox, channel = Outbox(), TightChannel(10)
    ended: list[LinkBroken] = []

    async def run() -> None:
        try:
            await outbox.run(channel)
        except LinkBroken as error:
            ended.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        await trio.testing.wait_all_tasks_blocked()
        channel.broken = True
        outbox.post(numbered(1))
        outbox.post(numbered(2))
    assert [error.message for error in ended] == ["cut"]


async def test_a_pipe_that_is_full_gets_the_rest_later() -> None:
    from_worker, unused = os.pipe()
    to_read, to_worker = os.pipe()
    pipe, outbox = FramePipe(from_worker, to_worker), Outbox()
    frames = [Frame("data", {"offset": n}, random.Random(n).randbytes(size)) for n, size in enumerate([700_000] * 4)]
    got: list[Frame] = []
    decoder = FrameDecoder()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(outbox.run, pipe)
        await trio.testing.wait_all_tasks_blocked()
        for frame in frames:
            outbox.post(frame)
        assert pipe.unsent
        while len(got) < len(frames):
            got += decoder.feed(await trio.to_thread.run_sync(os.read, to_read, 100_000))
        outbox.post(numbered(1))
        await trio.testing.wait_all_tasks_blocked()
        assert not pipe.unsent
        nursery.cancel_scope.cancel()
    assert got == frames
    pipe.close()
    os.close(unused)
    os.close(to_read)


@pytest.mark.parametrize("limit", ["MAX_FRAMES", "MAX_BYTES"])
async def test_what_may_wait_is_bounded(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, limit, 10)
    outbox = Outbox()
    frame = Frame("data", {"offset": 0}, b"12345")
    for _ in range(2 if limit == "MAX_BYTES" else 10):
        outbox.post(frame)
    with pytest.raises(LinkBroken, match="unread"):
        outbox.post(frame)


async def test_over_a_link_frames_come_as_they_were_posted() -> None:
    network, address = MemoryNetwork(), Address("127.0.0.1", 1)
    who = Identity(NodeId("n"), BootId("b"), "n", ("peer",))
    got: list[int] = []

    async def handler(kind: str, hello: Hello, channel: Channel) -> None:
        async for frame in channel:
            got.append(frame.header["session"])  # noqa: PERF401 - seen as they come

    outbox = Outbox()
    outbox.post(numbered(0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(network.listen, address, handler, who)
        await trio.testing.wait_all_tasks_blocked()
        async with network.dial(address, "steps", who) as channel, trio.open_nursery() as inner:
            inner.start_soon(outbox.run, channel)
            for number in range(1, 50):
                outbox.post(numbered(number))
                if number % 7 == 0:
                    await trio.testing.wait_all_tasks_blocked()
            await trio.testing.wait_all_tasks_blocked()
            inner.cancel_scope.cancel()
        nursery.cancel_scope.cancel()
    assert got == list(range(50))
