"""Counts what a peer may not send without end: h2 answers every PING, SETTINGS and stray reset without a limit.

It reads only the 9-byte heads of HTTP/2 frames as the bytes pass, before h2 sees them, so that an overlong frame is
refused when it is announced, not when it has been buffered.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarmnode.errors import ProtocolError
from swarmnode.wire import limits

HEAD_BYTES = 9
PREFACE_BYTES = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
TINY_UPDATE_BYTES = 1024
"""h2 itself gives credit back in halves of a window, and never less than this."""
MAX_UNANSWERED = 1000
"""Frames that want an answer (or cause one) while none of ours could be written: the peer sends and never reads."""

_DATA, _HEADERS, _PRIORITY, _RST_STREAM, _SETTINGS, _PUSH, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = range(10)
_END_STREAM = _ACK = 0x1
_END_HEADERS = 0x4


class Flood(ProtocolError):
    """A peer sent more of one kind of frame than any use has; the connection ends with ENHANCE_YOUR_CALM."""


@dataclass(slots=True)
class Budget:
    """A token bucket: `burst` at once, then `per_s`."""

    burst: float
    per_s: float
    left: float = field(init=False)
    at_s: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.left = self.burst

    def spend(self, now: float) -> bool:
        """Take one; False when there is none left."""
        if self.at_s is not None:
            self.left = min(self.burst, self.left + (now - self.at_s) * self.per_s)
        self.at_s = now
        self.left -= 1
        return self.left >= 0


class FloodGuard:
    """One connection's budgets. Raises Flood or ProtocolError; then the connection must be closed."""

    def __init__(self, *, server: bool, stranger: bool = False) -> None:
        """`stranger`: the peer has proved nothing and may open one channel, so it has next to nothing to reset."""
        self._skip = PREFACE_BYTES if server else 0
        self._head = bytearray()
        self._in_headers = False
        self._unanswered = 0
        self._last_reset: int | None = None
        self._budgets = {
            "reset": Budget(5, 1) if stranger else Budget(100, 20),
            "repeated reset": Budget(5, 1) if stranger else Budget(1000, 200),
            "PING": Budget(100, 10),
            "SETTINGS": Budget(20, 1),
            "PRIORITY or unknown frame": Budget(100, 10),
            "empty DATA": Budget(100, 20),
            "tiny WINDOW_UPDATE": Budget(100, 20),
        }

    @property
    def at_rest(self) -> bool:
        """Every frame that began has ended, and so has every block of headers."""
        return not (self._skip or self._head or self._in_headers)

    def flushed(self) -> None:
        """Everything owed to the peer was taken for writing."""
        self._unanswered = 0

    def spend(self, what: str, now: float) -> None:
        """Count one `what`; raises Flood when that is too many."""
        if not self._budgets[what].spend(now):
            raise Flood(f"the peer sent too many {what} frames on one connection")

    def inspect(self, data: memoryview, now: float) -> None:
        """Count the frames that begin in `data`."""
        at = 0
        while at < len(data):
            if self._skip:
                step = min(self._skip, len(data) - at)
                self._skip -= step
                at += step
                continue
            step = HEAD_BYTES - len(self._head)
            self._head += data[at : at + step]
            at += step
            if len(self._head) == HEAD_BYTES:
                self._take_head(bytes(self._head), data[at:], now)
                self._head.clear()

    def _take_head(self, head: bytes, after: memoryview, now: float) -> None:
        length = int.from_bytes(head[:3], "big")
        if length > limits.H2_FRAME_BYTES:
            raise ProtocolError(f"an HTTP/2 frame of {length} bytes was announced; allowed are {limits.H2_FRAME_BYTES}")
        self._skip = length
        kind, flags = head[3], head[4]
        self._in_headers = kind in (_HEADERS, _PUSH, _CONTINUATION) and not flags & _END_HEADERS
        if kind == _DATA:
            if length == 0 and not flags & _END_STREAM:
                self.spend("empty DATA", now)
        elif kind == _RST_STREAM:
            stream = int.from_bytes(head[5:], "big")
            self.spend("repeated reset" if stream == self._last_reset else "reset", now)
            self._last_reset = stream
        elif kind in (_PING, _SETTINGS):
            if not flags & _ACK:
                self._owe()
            self.spend("PING" if kind == _PING else "SETTINGS", now)
        elif kind == _WINDOW_UPDATE:
            if length == 4 and len(after) >= 4 and int.from_bytes(after[:4], "big") < TINY_UPDATE_BYTES:
                self.spend("tiny WINDOW_UPDATE", now)
        elif kind not in (_HEADERS, _CONTINUATION, _GOAWAY):
            self.spend("PRIORITY or unknown frame", now)

    def _owe(self) -> None:
        self._unanswered += 1
        if self._unanswered > MAX_UNANSWERED:
            raise Flood(f"the peer wants more than {MAX_UNANSWERED} answers and reads none")
