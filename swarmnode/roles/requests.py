"""A request on its way through a ring, as the gateway holds it: events in, bounded, with one end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from swarmnode.api.backend import Accepted, ChatEvent, Done, Started, TextDelta
from swarmnode.errors import Stalled, SwarmError, from_wire
from swarmnode.wire.bodies import unpack_body

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarmnode.ids import RequestId
    from swarmnode.wire.frames import Frame

MAX_UNREAD_EVENTS = 1024
"""A client that stops reading is cut off here: a slot of the ring must not be held for someone who is not there."""
ACCEPT_S = 30.0
"""Tokenizing a prompt of the largest body takes a second or two; silence beyond this is a stuck head."""


class RequestStream:
    """`put` takes the head's frames without waiting; `events` gives them to the API, ending with Done or an error."""

    def __init__(self, request: RequestId, cancel: Callable[[], None]) -> None:
        """`cancel` tells the head to stop; called at most once, and only while the request runs."""
        self.request = request
        self.accepted = False
        self.ended = False
        self.alone = True
        """No other request ran on its ring meanwhile."""
        self._cancel = cancel
        self._send, self._receive = trio.open_memory_channel["ChatEvent | SwarmError"](MAX_UNREAD_EVENTS)

    def put(self, frame: Frame) -> None:
        """Take one frame of the head about this request; what comes after the end is dropped."""
        header = frame.header
        match frame.kind:
            case "accepted":
                self.accepted = True
                self._offer(Accepted(header["prompt_tokens"]))
            case "started":
                self._offer(Started())
            case "text":
                self._offer(TextDelta(header["text"], header["n"]))
            case "done":
                self._offer(_done(frame))
                self.ended = True
            case "error":
                error = from_wire(header["code"], header["message"])
                error.param = header.get("param")
                self.fail(error)

    def fail(self, error: SwarmError) -> None:
        """The head ended the request with an error."""
        self._offer(error)
        self.ended = True

    def cancel(self, error: SwarmError) -> None:
        """End the request from this side, unless it has ended."""
        if not self.ended:
            self.fail(error)
            self._cancel()

    async def next(self) -> ChatEvent:
        """The next event. Raises the request's error, or Stalled where one side is too slow."""
        event = await (self._next() if self.accepted else self._next_in_time())
        if isinstance(event, SwarmError):
            raise event
        return event

    async def _next_in_time(self) -> ChatEvent | SwarmError:
        try:
            with trio.fail_after(ACCEPT_S):
                return await self._next()
        except trio.TooSlowError:
            raise Stalled(f"stage 0 did not take the request within {ACCEPT_S:.0f} s") from None

    async def _next(self) -> ChatEvent | SwarmError:
        try:
            return await self._receive.receive()
        except trio.EndOfChannel:
            raise Stalled(f"the client left {MAX_UNREAD_EVENTS} pieces of the reply unread") from None

    def _offer(self, event: ChatEvent | SwarmError) -> None:
        if self.ended:
            return
        try:
            self._send.send_nowait(event)
        except trio.WouldBlock:
            self.ended = True
            self._send.close()
            self._cancel()


def _done(frame: Frame) -> Done:
    header = frame.header
    return Done(
        finish_reason=header["finish_reason"],
        prompt_tokens=header["prompt_tokens"],
        completion_tokens=header["completion_tokens"],
        timing=unpack_body(frame.body),
        stop_sequence=header.get("stop"),
        cached_tokens=min(header.get("cached", 0), header["prompt_tokens"]),
    )
