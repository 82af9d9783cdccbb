"""The two ends of one lane of a ring: what leaves by it, and what comes in, also over a link that dropped and is back.

A link that breaks is dialed again for RETURN_S. The receiver says with `lane_at` which frame it waits for, first when a
link is up and then as an acknowledgement; the sender goes on from there with what it kept. Another process at the other
end, or a frame that is not kept any more, ends the lane, and with it the ring's link epoch.

Both ends give a sign every SIGN_S and break a link that brought no byte for SILENCE_S: TCP alone does not notice a way
on which bytes vanish while nothing is sent, nor one behind a relay or in requests.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from swarmnode.cluster.membership import RETURN_S
from swarmnode.errors import LinkBroken, Overloaded, ProtocolError, SwarmError
from swarmnode.roles.outbox import Outbox
from swarmnode.wire.compression import ZIP_KEY, LaneCompression, decompress
from swarmnode.wire.deadlines import HELLO_S
from swarmnode.wire.frames import Frame
from swarmnode.wire.lane import LaneAcks, LaneLog, LaneReceiver, LaneSender
from swarmnode.wire.link_meter import LinkMeter
from swarmnode.wire.nursery import open_flat_nursery
from swarmnode.wire.routes import DIRECT, worst

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from swarmnode.ids import RingId
    from swarmnode.ring.messages import Epoch
    from swarmnode.wire.dialing import Dialed
    from swarmnode.wire.link import Channel

    Dial = Callable[[], AbstractAsyncContextManager[Dialed[Channel]]]
    SeeBetter = Callable[[str], Awaitable[bool]]
    """Whether a better route than the one given is open now."""

LATE_S = 1.0
"""What the receiver waits beyond RETURN_S: it may have noticed first."""
RETRY_S = 0.2
ASK_EVERY_S = 1.0
SIGN_S = 5.0
SILENCE_S = 15.0
"""Three signs. Bytes count, not frames: a prompt piece may take longer on a slow uplink, one DATA frame of it (256 KiB)
takes longer below 17 KB/s only."""
LOOK_S = 1.0
BETTER_S = 60.0
"""How often a lane that is not direct looks for a better way, and then takes it while nothing is under way."""
INLINE_BYTES = 32 << 10
"""Compressed and decompressed on the node's loop; more takes its milliseconds in a thread."""


class LaneOut:
    """What this stage sends on one lane, in one link epoch. `post` never waits; `keep` holds the link."""

    def __init__(self, ring: RingId, lane: str, epoch: Epoch) -> None:
        self.lane = lane
        self.route = ""
        """The worst of its legs, also of the one that only the other end sees."""
        self.meter = LinkMeter()
        self.compression = LaneCompression()
        self._sender = LaneSender(ring, lane, epoch)
        self._log = LaneLog()
        self._outbox = Outbox(self._sender.stamp)
        self._asked_s = -ASK_EVERY_S
        self._own_route = DIRECT
        """As far as this end sees it: what a better way must beat."""
        self._other: tuple[str, int] | None = None
        """The boot of the node at the other end, and its worker's process: who must be there again to resume."""

    def post(self, frame: Frame) -> None:
        self._outbox.post(frame)

    @property
    def empty(self) -> bool:
        """Nothing waits, and nothing is under way."""
        return self._outbox.empty and self._log.empty

    async def keep(
        self,
        dial: Dial,
        see_better: SeeBetter | None = None,
        *,
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Hold a link for this lane until cancelled; raises what ended the lane for good."""
        lost_s: float | None = None
        while True:
            try:
                async with dial() as dialed:
                    first = self._other is None
                    missing = self._log.since(await self._meet(dialed))
                    if first:
                        task_status.started()
                    lost_s = None
                    await self._send_all(dialed.up, missing, see_better)
            except BetterWay:
                continue
            except LinkBroken as error:
                if self._other is None:
                    raise
                now = trio.current_time()
                lost_s = now if lost_s is None else lost_s
                if now - lost_s >= RETURN_S:
                    raise LinkBroken(f"the link was not back within {RETURN_S:g} s: {error.message}") from error
                await trio.sleep(RETRY_S)

    def snapshot(self) -> dict[str, Any]:
        """The lane's route and what was measured of its link."""
        trip_s, rate = self.meter.round_trip_s, self.meter.bytes_per_s
        return {
            "lane": self.lane,
            "route": self.route,
            "round_trip_ms": None if trip_s is None else round(trip_s * 1e3, 2),
            "mbit_per_s": None if rate is None else round(rate * 8e-6, 1),
            "compressed": self.compression.pays,
        }

    async def _meet(self, dialed: Dialed[Channel]) -> int:
        """Who is there, and the frame it waits for. Raises ProtocolError where it is not who was there before."""
        with trio.move_on_after(HELLO_S):
            at = await dialed.up.receive()
            if at.kind != "lane_at" or dialed.up.welcome is None:
                raise ProtocolError(f"a lane's first frame back is {at.kind}; it must be lane_at")
            other = dialed.up.welcome.identity.boot, at.header["worker"]
            if self._other is not None and self._other != other:
                raise ProtocolError("another process answers where the lane was; its sessions are gone")
            self._other, self._own_route = other, worst((dialed.way.route, dialed.up.route))
            self.route = worst((self._own_route, at.header.get("route", DIRECT)))
            self.meter.forget()
            return int(at.header["seq"])
        raise LinkBroken(f"the next stage took the lane, but did not say where it is within {HELLO_S:g} s")

    async def _send_all(self, channel: Channel, missing: list[Frame], see_better: SeeBetter | None) -> None:
        for frame in missing:
            await channel.send(frame)
        async with open_flat_nursery() as nursery:
            nursery.start_soon(self._outbox.run, _Noting(channel, self))
            nursery.start_soon(self._give_signs, channel)
            nursery.start_soon(_break_when_silent, channel)
            if see_better is not None:
                nursery.start_soon(self._look_for_better, see_better)
            async for frame in channel:
                if frame.kind != "lane_at":
                    raise ProtocolError(f"{frame.kind} came back on outgoing lane {self.lane}")
                self._acknowledged(frame.header["seq"], sign=frame.header.get("sign", False))
            raise LaneClosed(f"the next stage closed lane {self.lane}")

    async def _give_signs(self, channel: Channel) -> None:
        """While nothing waits to be sent: what waits is a sign itself as it goes out, or will be missed."""
        while True:
            await trio.sleep(SIGN_S)
            if self._outbox.empty:
                channel.send_nowait(Frame("lane_sent", {"seq": self._sender.next_seq}))

    async def _look_for_better(self, see_better: SeeBetter) -> None:
        """Raises BetterWay when there is one to change to now."""
        wait_s = BETTER_S
        while self._own_route != DIRECT:
            await trio.sleep(wait_s)
            wait_s = BETTER_S if self.empty else LOOK_S
            if self.empty and await see_better(self._own_route) and self.empty:
                raise BetterWay(f"lane {self.lane} changes to a better way than {self._own_route}")

    def _acknowledged(self, next_seq: int, *, sign: bool) -> None:
        self._log.acknowledged(next_seq)
        if sign:
            self.meter.passed(next_seq)
            return
        self.meter.acknowledged(next_seq, trio.current_time())
        self.compression.link_bytes_per_s = self.meter.bytes_per_s or self.compression.link_bytes_per_s

    def prepared(self, frame: Frame) -> Frame:
        """As it is to be sent: now and then with the wish for an answer at once, which its link is measured by."""
        if trio.current_time() - self._asked_s < ASK_EVERY_S:
            return frame
        self._asked_s = trio.current_time()
        return replace(frame, header={**frame.header, "ack": True})

    def sent(self, frame: Frame) -> None:
        self._log.sent(frame)
        self.meter.sent(frame.header["seq"], len(frame.body), trio.current_time())


class BetterWay(LinkBroken):
    """The link is left for a better one; at the other end it looks like one that broke and is back at once."""


class LaneClosed(ProtocolError):
    """The other end left in good order: there is nothing to come back to."""


class _Noting:
    """A lane's channel as its outbox sees it: compresses what is worth it, and notes what was sent."""

    def __init__(self, channel: Channel, lane: LaneOut) -> None:
        self._channel = channel
        self._lane = lane

    def send_nowait(self, *frames: Frame) -> None:
        compression = self._lane.compression
        asked = [(frame, compression.wants(frame)) for frame in frames]
        if any(wants and len(frame.body) > INLINE_BYTES for frame, wants in asked):
            raise Overloaded("to be compressed in a thread first")  # `send` follows
        ready = [self._lane.prepared(compression.apply(frame) if wants else frame) for frame, wants in asked]
        self._channel.send_nowait(*ready)
        for frame in ready:
            self._lane.sent(frame)

    async def send(self, frame: Frame) -> None:
        if len(frame.body) > INLINE_BYTES and self._lane.compression.wants(frame):
            frame = await trio.to_thread.run_sync(self._lane.compression.apply, frame)
        frame = self._lane.prepared(frame)
        await self._channel.send(frame)
        self._lane.sent(frame)


class LaneIn:
    """What comes in on one lane, in one link epoch, over one link after the other."""

    def __init__(self, ring: RingId, lane: str, epoch: Epoch, worker: int, take: Callable[[Frame], None]) -> None:
        self._receiver = LaneReceiver(ring, lane, epoch)
        self._worker = worker
        self._take = take
        self._serving: trio.CancelScope | None = None
        self._links = 0
        self._came = trio.Event()

    async def serve(self, channel: Channel) -> None:
        """Take frames until the link breaks and is not replaced in time. Returns when a newer link took over; raises
        what ended the lane."""
        number = self._take_over()
        try:
            with trio.CancelScope() as self._serving:
                await self._receive(channel)
        except LinkBroken:
            channel.abort()  # where it was this end that found something missing, the sender has to hear of it
            with trio.move_on_after(RETURN_S + LATE_S):
                await self._newer_than(number)
            if self._links == number:
                raise
        except SwarmError:
            if self._links == number:
                raise

    def _take_over(self) -> int:
        """The newest link is the lane's: the sender knows best which one works."""
        if self._serving is not None:
            self._serving.cancel()
        self._links += 1
        self._came.set()
        self._came = trio.Event()
        return self._links

    async def _newer_than(self, number: int) -> None:
        while self._links == number:
            await self._came.wait()

    async def _receive(self, channel: Channel) -> None:
        await channel.send(self._at(route=channel.route))
        async with open_flat_nursery() as nursery:
            nursery.start_soon(self._give_signs, channel)
            nursery.start_soon(_break_when_silent, channel)
            await self._take_all(channel)
            raise LaneClosed("the stage before closed the lane")

    async def _take_all(self, channel: Channel) -> None:
        acks = LaneAcks()
        channel.take_at_once(partial(self._take_small, channel, acks))
        async for frame in channel:
            if not self._take_small(channel, acks, frame):
                await self._take_packed(channel, acks, frame)

    def _take_small(self, channel: Channel, acks: LaneAcks, frame: Frame) -> bool:
        """False: it has to be decompressed in a thread first."""
        if frame.kind == "lane_sent":
            self._receiver.check_all_came(frame.header["seq"])
            return True
        if ZIP_KEY in frame.header and frame.header["bytes"] > INLINE_BYTES:
            return False
        if (accepted := self._receiver.accept(frame)) is not None:
            self._take(decompress(accepted))
        self._acknowledge(channel, acks, frame)
        return True

    async def _take_packed(self, channel: Channel, acks: LaneAcks, frame: Frame) -> None:
        unpacked = await trio.to_thread.run_sync(decompress, frame)  # until then the frame has not come
        if (accepted := self._receiver.accept(unpacked)) is not None:
            self._take(accepted)
        self._acknowledge(channel, acks, frame)

    def _acknowledge(self, channel: Channel, acks: LaneAcks, frame: Frame) -> None:
        if acks.took(frame):
            channel.send_nowait(self._at())

    async def _give_signs(self, channel: Channel) -> None:
        while True:
            await trio.sleep(SIGN_S)
            channel.send_nowait(self._at(sign=True))

    def _at(self, **more: object) -> Frame:
        return Frame("lane_at", {"seq": self._receiver.next_seq, "worker": self._worker, **more})


async def _break_when_silent(channel: Channel) -> None:
    """Raises LinkBroken once no byte came for SILENCE_S."""
    heard_bytes, heard_s = channel.counts.bytes_in, trio.current_time()
    while trio.current_time() - heard_s < SILENCE_S:
        await trio.sleep(LOOK_S)
        if channel.counts.bytes_in != heard_bytes:
            heard_bytes, heard_s = channel.counts.bytes_in, trio.current_time()
    raise LinkBroken(f"nothing came for {SILENCE_S:g} s")
