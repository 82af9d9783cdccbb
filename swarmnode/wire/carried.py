"""Streams whose bytes travel inside something else's messages: what tunnels and polled links share."""

from __future__ import annotations

from abc import abstractmethod

import trio

MAX_BUNDLE = 1 << 16
"""Frames that one message may claim to hold."""


class CarriedStream(trio.abc.Stream):
    """Whoever runs a link over it says how many frames it is about to send; the carrier counts by that alone."""

    route: str
    """How the bytes travel."""

    def __init__(self) -> None:
        self._rest = memoryview(b"")
        self._frames = 0

    def note_frames(self, count: int) -> None:
        """What is sent next holds `count` more frames."""
        self._frames = min(self._frames + count, MAX_BUNDLE)

    def take_frames(self) -> int:
        """The frames noted since the last call, for the message that is made now."""
        frames, self._frames = self._frames, 0
        return frames

    @abstractmethod
    async def next_part(self) -> bytes | bytearray | memoryview:
        """The next bytes that came, b"" at the end. Raises BrokenResourceError."""

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if not self._rest:
            self._rest = memoryview(await self.next_part())
        size = max_bytes or len(self._rest)
        taken, self._rest = self._rest[:size], self._rest[size:]
        return bytes(taken)

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()
