"""How late a node's own loop runs: a score that tells how far its word about others can be trusted.

Lifeguard's idea (arXiv 1707.00788): most nodes that look dead are looked at by one that is busy itself.
"""

from __future__ import annotations

import math

TICK_S = 1.0
LATE_S = 0.5
"""A tick this late is no jitter: a loop with frames of many MiB to hand on is late by tenths of it."""
MAX_SCORE = 7
"""What a node waits for others is stretched by 1 + score, so eightfold at most."""


class LocalHealth:
    """`tick` it every TICK_S. `score` is 0 while ticks come in time, and at most MAX_SCORE."""

    def __init__(self) -> None:
        self.score = 0
        self._due_s: float | None = None

    def tick(self, now: float) -> float:
        """Take the moment at which a tick came; returns when the next one is due.

        A late one costs a point for every second begun, one in time gives a point back: a stall is forgotten after
        as many seconds as it had points.
        """
        late_s = 0.0 if self._due_s is None else now - self._due_s
        change = math.ceil(late_s) if late_s > LATE_S else -1
        self.score = min(MAX_SCORE, max(0, self.score + change))
        self._due_s = now + TICK_S
        return self._due_s
