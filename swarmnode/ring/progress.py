"""How long a step may take before its session counts as stalled: max(15 s, 4 × its p99)."""

from __future__ import annotations

from collections import deque

STEP_FLOOR_S = 15.0
"""Below this a slow machine under load would be mistaken for a dead one."""
PIECE_FLOOR_S = 60.0
"""The floor while prompt pieces are in the ring, or nothing was seen yet: a piece of 256 positions says nothing of
itself in the times of a short one, a first one pays for lazy initialisation, and decode steps stand behind both."""
SLACK = 4.0
END_SLACK = 4.0
"""An end that is not answered for this many limits means that the ring is stuck, not slow."""
WINDOW = 128
"""Steps remembered; their maximum stands for the p99."""


class ProgressDeadline:
    """The deadline in seconds, learned from the last `WINDOW` pieces and decode steps together."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=WINDOW)

    def observe(self, seconds: float) -> None:
        self._seen.append(seconds)

    def limit_s(self, *, pieces_in_flight: bool) -> float:
        """How long an answer may take now."""
        floor_s = PIECE_FLOOR_S if pieces_in_flight or not self._seen else STEP_FLOOR_S
        return max(floor_s, SLACK * max(self._seen, default=0.0))
