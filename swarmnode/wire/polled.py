"""A stream carried by plain HTTP requests, for networks and tunnels that pass nothing else (W3).

One end pushes with POST and always holds a GET open for what comes back; the other answers both. Bytes queue up
meanwhile and travel together. Every body has a number: one that is missing or comes twice breaks the stream, and a push
that failed is never sent again, because nobody knows whether it arrived.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import trio

from swarmnode.errors import LinkBroken
from swarmnode.wire.carried import MAX_BUNDLE, CarriedStream
from swarmnode.wire.routes import POLLED

if TYPE_CHECKING:
    from swarmnode.errors import SwarmError
    from swarmnode.wire.frames import Buffer

MAX_BUNDLE_FRAMES = 32
"""Frames that travel in one body (the source's bound): what is on its way when a request fails is lost with it. One
write that holds more is not taken apart."""
MAX_BODY_BYTES = 1 << 20
MAX_QUEUED_BYTES = 8 << 20
"""Per direction; beyond it `send_all` waits. The same as a direct channel's queue."""
NUMBER_LIMIT = 1 << 53
"""Bodies of one link: what JSON and every proxy can still count."""
BUNDLE_HEADER = "x-relay-bundle"
"""How many frames a body holds."""
BUNDLES_HEADER = "x-relay-bundles"
"""On every answer: 1, bundles are understood."""
POLL_S = 25.0
"""How long a GET is held without news: proxies cut what is silent for 60 s, some for 30."""
LET_ON_S = 0.005
"""What came is through the node in 2 ms; one that is busy with others' frames as well always has something to do."""


async def let_on() -> None:
    """Let what was just handed on get through this node before the next request or answer is made: that costs as much
    time as the whole way, and nobody waits for it so much. It is through when no task has anything left to do."""
    from trio.testing import wait_all_tasks_blocked  # loads pytest where there is one: not at every node's start

    with trio.move_on_after(LET_ON_S):
        await wait_all_tasks_blocked()


class ByteWay:
    """One direction: parts with the frames they hold, in order, until it has ended or broke."""

    def __init__(self) -> None:
        self._parts: deque[tuple[bytes, int]] = deque()
        self._queued_bytes = 0
        self._ended = False
        self._broken: SwarmError | None = None
        self._changed = trio.Event()

    @property
    def queued(self) -> bool:
        """Something waits to be taken."""
        return bool(self._parts)

    async def changed(self) -> None:
        """Wait until something was put or taken, or the way ended."""
        await self._changed.wait()

    async def put(self, data: bytes, frames: int) -> None:
        """Queue a part, waiting while too much is queued. Raises what broke the way."""
        await trio.lowlevel.checkpoint()
        while self._broken is None and self._queued_bytes >= MAX_QUEUED_BYTES:
            await self._changed.wait()
        if self._broken is not None:
            raise type(self._broken)(self._broken.message)
        if data:
            self._parts.append((data, frames))
            self._queued_bytes += len(data)
            self._notify()

    async def take(self) -> tuple[bytes, int]:
        """Wait for something; the bytes that travel together and their frames, b"" at the end. Raises what broke it."""
        while not self._parts:
            if self._broken is not None:
                raise type(self._broken)(self._broken.message)
            if self._ended:
                return b"", 0
            await self._changed.wait()
        taken, n_bytes, frames = [], 0, 0
        while self._parts and frames < MAX_BUNDLE_FRAMES and n_bytes < MAX_BODY_BYTES:
            data, count = self._parts.popleft()
            room = MAX_BODY_BYTES - n_bytes
            if len(data) > room:
                self._parts.appendleft((data[room:], 0))
                data = data[:room]
            taken.append(data)
            n_bytes, frames = n_bytes + len(data), frames + count
        self._queued_bytes -= n_bytes
        self._notify()
        return b"".join(taken), min(frames, MAX_BUNDLE)

    def end(self) -> None:
        """Nothing more is put; what is queued can still be taken."""
        self._ended = True
        self._notify()

    def fail(self, error: SwarmError) -> None:
        """What is queued is lost, too."""
        if self._broken is None:
            self._broken = error
            self._parts.clear()
            self._queued_bytes = 0
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


class PolledStream(CarriedStream):
    """Either end: whoever speaks HTTP for it empties `outward` and fills `inward`."""

    route = POLLED

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = ByteWay(), ByteWay()

    def fail(self, why: str) -> None:
        error = LinkBroken(why)
        self.inward.fail(error)
        self.outward.fail(error)

    async def send_all(self, data: Buffer) -> None:
        try:
            await self.outward.put(bytes(data), self.take_frames())
        except LinkBroken as error:
            raise trio.BrokenResourceError(error.message) from error

    async def next_part(self) -> bytes:
        try:
            data, _ = await self.inward.take()
        except LinkBroken as error:
            raise trio.BrokenResourceError(error.message) from error
        return data

    async def aclose(self) -> None:
        """What was sent may still travel; nothing more comes or goes."""
        self.outward.end()
        self.inward.fail(LinkBroken("the stream was closed"))
        await trio.lowlevel.checkpoint()
