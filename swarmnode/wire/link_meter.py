"""A link's round trip and bandwidth, from its real traffic: when a frame went out, and when it was acknowledged."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

WINDOW = 15
"""Samples remembered: their median outlives a hiccup."""
LARGE_BYTES = 64 << 10
"""From this size on the bytes, not the way, take most of the time on a link that is worth measuring."""
MIN_TRANSFER_S = 1e-4
"""Less is noise of the clocks and the scheduler: the link is at least as fast as that makes it."""


@dataclass(slots=True)
class LinkMeter:
    """The sender's side. Only frames that no large one was before count: others waited behind it."""

    _out: deque[tuple[int, float, int, bool]] = field(default_factory=deque, init=False)
    """(seq, when it was sent, bytes, nothing large was under way before it)"""
    _large: int = field(default=0, init=False)
    """How many of them are large."""
    _round_trips_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW), init=False)
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW), init=False)

    def sent(self, seq: int, n_bytes: int, now: float) -> None:
        self._out.append((seq, now, n_bytes, not self._large))
        self._large += n_bytes >= LARGE_BYTES

    def acknowledged(self, next_seq: int, now: float) -> None:
        """The other end has everything before `next_seq`; it says so as the last of it arrives."""
        newest: tuple[int, float, int, bool] | None = None
        while self._out and self._out[0][0] < next_seq:
            newest = self._oldest()
        if newest is None or newest[0] != next_seq - 1:
            return
        _, sent_s, n_bytes, quiet = newest
        if quiet and n_bytes < LARGE_BYTES:
            self._round_trips_s.append(now - sent_s)
        elif quiet and self._round_trips_s:
            transfer_s = max(MIN_TRANSFER_S, now - sent_s - min(self._round_trips_s))
            self._rates.append(n_bytes / transfer_s)

    def passed(self, next_seq: int) -> None:
        """The other end has everything before `next_seq`, perhaps for long: nothing is learned of the link."""
        while self._out and self._out[0][0] < next_seq:
            self._oldest()

    def _oldest(self) -> tuple[int, float, int, bool]:
        oldest = self._out.popleft()
        self._large -= oldest[2] >= LARGE_BYTES
        return oldest

    def forget(self) -> None:
        """The link was made anew: what was under way is sent again, at another time."""
        self._out.clear()
        self._large = 0

    @property
    def round_trip_s(self) -> float | None:
        return median(self._round_trips_s) if self._round_trips_s else None

    @property
    def bytes_per_s(self) -> float | None:
        return median(self._rates) if self._rates else None
