"""h2's connection with a short way for DATA frames, which are all that a ring in full swing sends.

h2 makes an object of every frame and asks two state machines about it: half of a small frame's time in here. The short
way is for a whole DATA frame without flags on a stream that is open, between its headers and its end. It keeps h2's
windows, so that every other frame can go through h2 itself, and a session can change between both ways with any frame.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import h2.connection
import h2.events

if TYPE_CHECKING:
    from hyperframe.frame import Frame

_HEAD = struct.Struct(">HBBBL")
"""Length (16 bits and 8), kind, flags, stream."""
HEAD_BYTES = _HEAD.size
_DATA = _NO_FLAGS = 0


def data_frame_at(data: bytes | memoryview, start: int) -> tuple[int, int] | None:
    """Stream and size of the DATA frame that begins at `start`, if it is whole, has no flags and is not empty."""
    if len(data) - start < HEAD_BYTES:
        return None
    high, low, kind, flags, stream = _HEAD.unpack_from(data, start)
    size = high << 8 | low
    if kind != _DATA or flags != _NO_FLAGS or not 0 < size <= len(data) - start - HEAD_BYTES:
        return None
    return stream & 0x7FFFFFFF, size


class DataConnection(h2.connection.H2Connection):
    """What may not use the short way is refused by it, and left to h2."""

    def head_of(self, stream: int, size: int) -> bytes:
        """Account for a DATA frame of `size` bytes that is sent now, no more than the windows and the frame size allow,
        on a stream that is open for sending; returns what comes before the bytes."""
        self.outbound_flow_control_window -= size
        self.streams[stream].outbound_flow_control_window -= size
        return _HEAD.pack(size >> 8, size & 0xFF, _DATA, _NO_FLAGS, stream)

    def take_data(self, stream: int, size: int) -> bool:
        """Account for a DATA frame that came; False where h2 has to look at it: on a stream that is not open, before
        its headers or after its trailers, and in a body of announced length. Raises h2's FlowControlError where it is
        more than the windows allow."""
        known = self.streams.get(stream)
        if known is None or not known.open or known._expected_content_length is not None:
            return False
        if not known.state_machine.headers_received or known.state_machine.trailers_received:
            return False
        self._inbound_flow_control_window_manager.window_consumed(size)
        known._inbound_window_manager.window_consumed(size)
        return True

    def _receive_frame(self, frame: Frame) -> list[h2.events.Event]:
        """h2 writes every frame it receives out as hexadecimal for a log that is off: a third of its time for our
        bodies. The frame's own text is replaced on its way in; should h2 change inside, only the time comes back."""
        frame._body_repr = str  # type: ignore[method-assign]
        return super()._receive_frame(frame)
