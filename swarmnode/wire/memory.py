"""Links inside one process with a latency of their own: what tests and simulations put in the place of the network."""

from __future__ import annotations

from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from swarmnode.errors import LinkBroken, Overloaded, SwarmError
from swarmnode.wire import limits
from swarmnode.wire.address import Address
from swarmnode.wire.frames import LENGTH_BYTES, decode, encode_bytes
from swarmnode.wire.handshake import greet
from swarmnode.wire.link import CHANNEL_KINDS, JOIN_KIND, NO_OPTIONS, Channel
from swarmnode.wire.nursery import open_flat_nursery
from swarmnode.wire.serving import Service, count
from swarmnode.wire.traffic import Counts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from swarmnode.wire.frames import Frame
    from swarmnode.wire.link import ChannelHandler, Identity, LinkOptions, Standing
    from swarmnode.wire.traffic import Traffic

_FIRST_FREE_PORT = 40_000
_QUEUE_BYTES = limits.SEND_QUEUE_BYTES + limits.STREAM_WINDOW_BYTES
"""What a real link holds between its ends when nobody receives."""


@dataclass(slots=True)
class _Way:
    """One direction: items with the time they arrive. None is a clean end, an error a broken link."""

    items: deque[tuple[float, bytes | SwarmError | None]] = field(default_factory=deque)
    queued: int = 0
    changed: trio.Event = field(default_factory=trio.Event)

    def put(self, arrives_at: float, item: bytes | SwarmError | None) -> None:
        self.items.append((arrives_at, item))
        self.queued += len(item) if isinstance(item, bytes) else 0
        self.notify()

    def notify(self) -> None:
        self.changed.set()
        self.changed = trio.Event()


class MemoryChannel(Channel):
    """One end. A frame is encoded and decoded as on a real link, and arrives `latency_s` after it was sent; the
    latency is the queue's, so it never holds the sender up."""

    def __init__(self, kind: str, inward: _Way, outward: _Way, latency_s: float) -> None:
        self.kind = kind
        self.counts = Counts()
        self.latency_s = latency_s
        self._in = inward
        self._out = outward
        self._broken: SwarmError | None = None
        self.other: MemoryChannel | None = None

    async def send(self, frame: Frame) -> None:
        await trio.lowlevel.checkpoint()
        while self._broken is None and self._out.queued >= _QUEUE_BYTES:
            await self._out.changed.wait()
        self._put(frame)

    def send_nowait(self, *frames: Frame) -> None:
        if self._out.queued >= _QUEUE_BYTES:
            raise Overloaded(f"more than {_QUEUE_BYTES} bytes wait on a {self.kind} channel")
        self._put(*frames)

    async def receive(self) -> Frame:
        while not self._in.items:
            self._raise_if_broken()
            await self._in.changed.wait()
        arrives_at, item = self._in.items[0]
        await trio.sleep_until(arrives_at)
        if item is None:
            raise trio.EndOfChannel
        if isinstance(item, SwarmError):
            raise type(item)(item.message)
        self._in.items.popleft()
        self._in.queued -= len(item)
        self._in.notify()
        self.counts.took(len(item))
        return self._unless_refused(decode(memoryview(item)[LENGTH_BYTES:]))

    async def flush(self) -> None:
        await trio.lowlevel.checkpoint()
        while self._broken is None and self._out.queued > limits.STREAM_WINDOW_BYTES:
            await self._out.changed.wait()
        self._raise_if_broken()

    def end_sending(self) -> None:
        if self._broken is None:
            self._out.put(trio.current_time() + self.latency_s, None)

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()
        self._leave(None)

    def abort(self) -> None:
        self._leave(LinkBroken("the peer reset the channel (code 8)"))

    def break_link(self, why: str = "the connection broke") -> None:
        """A fault: both ends find the link broken, at once and without what was on its way."""
        for end in (self, self.other):
            if end is not None:
                end._in.items.clear()
                end._in.put(trio.current_time(), LinkBroken(why))
                end._fail(LinkBroken(why))

    def _leave(self, last: SwarmError | None) -> None:
        if self._broken is None:
            self._out.put(trio.current_time() + self.latency_s, last)
        self._in.items.clear()
        self._fail(LinkBroken("the channel was closed"))
        if self.other is not None:
            self.other._fail(LinkBroken("the peer closed the channel"))

    def _fail(self, error: SwarmError) -> None:
        self._broken = self._broken or error
        self._in.notify()
        self._out.notify()

    def _put(self, *frames: Frame) -> None:
        self._raise_if_broken()
        for data in [encode_bytes(frame) for frame in frames]:
            self.counts.gave(len(data))
            self._out.put(trio.current_time() + self.latency_s, data)

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise type(self._broken)(self._broken.message)


def memory_pair(kind: str = "steps", latency_s: float = 0.0) -> tuple[MemoryChannel, MemoryChannel]:
    """Two ends of one link, without a handshake."""
    there, back = _Way(), _Way()
    one = MemoryChannel(kind, back, there, latency_s)
    other = MemoryChannel(kind, there, back, latency_s)
    one.other, other.other = other, one
    return one, other


class MemoryNetwork:
    """A transport (see `link.Transport`) that joins nodes of one process."""

    def __init__(self, latency_s: float = 0.0) -> None:
        self.latency_s = latency_s
        self._listening: dict[Address, tuple[Service, trio.Nursery]] = {}
        self._next_port = _FIRST_FREE_PORT

    @asynccontextmanager
    async def dial(
        self,
        address: Address,
        kind: str,
        identity: Identity,
        options: LinkOptions = NO_OPTIONS,
    ) -> AsyncIterator[Channel]:
        await trio.sleep(2 * self.latency_s)
        if address not in self._listening or kind not in (*CHANNEL_KINDS, JOIN_KIND):
            raise LinkBroken(f"cannot connect to {address}: nobody serves {kind} channels there")
        channel, theirs = memory_pair(kind, self.latency_s)
        service, nursery = self._listening[address]
        nursery.start_soon(service.serve, theirs)
        async with channel:
            channel.welcome = await greet(channel, identity, options)
            count(channel, channel.welcome.identity, options.parameters, options.traffic)
            yield channel

    @asynccontextmanager
    async def connect(
        self, address: Address, identity: Identity, options: LinkOptions = NO_OPTIONS
    ) -> AsyncIterator[MemoryLink]:
        if address not in self._listening:
            raise LinkBroken(f"cannot connect to {address}: nobody listens there")
        await trio.lowlevel.checkpoint()
        yield MemoryLink(self, address, identity, options)

    async def listen(
        self,
        address: Address,
        handler: ChannelHandler,
        identity: Identity,
        *,
        traffic: Traffic | None = None,
        standing: Standing | None = None,
        task_status: trio.TaskStatus[Address] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        address = self._bind(address)
        async with open_flat_nursery() as nursery:
            self._listening[address] = Service(handler, identity, traffic, standing), nursery
            try:
                task_status.started(address)
                await trio.sleep_forever()
            finally:
                del self._listening[address]

    def _bind(self, address: Address) -> Address:
        if address.port == 0:
            address = Address(address.host, self._next_port)
            self._next_port += 1
        if address in self._listening:
            raise LinkBroken(f"cannot listen on {address}: it is in use")
        return address


class MemoryLink:
    """A `link.Link` of a `MemoryNetwork`: it has no connection that could end by itself."""

    over = False

    def __init__(self, network: MemoryNetwork, address: Address, identity: Identity, options: LinkOptions) -> None:
        self.channels = 0
        self._dial = network.dial
        self._to = address, identity, options

    async def wait_over(self) -> None:
        await trio.sleep_forever()

    @asynccontextmanager
    async def open(self, kind: str) -> AsyncIterator[Channel]:
        """See `link.Link.open`."""
        address, identity, options = self._to
        async with self._dial(address, kind, identity, options) as channel:
            self.channels += 1
            try:
                yield channel
            finally:
                self.channels -= 1
