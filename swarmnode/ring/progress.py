"""How long a step may take before its session counts as stalled: max(15 s, 4 × its p99)."""

from __future__ import annotations

from collections import deque

from swarmnode.ring.session import Phase

STEP_FLOOR_S = 15.0
"""Below this a slow machine under load would be mistaken for a dead one."""
FIRST_S = 60.0
"""Before anything of a kind was seen: a first prompt piece also pays for lazy initialisation."""
SLACK = 4.0
WINDOW = 128
"""Steps remembered; their maximum stands for the p99."""


class ProgressDeadline:
    """Deadlines in seconds for prompt pieces and decode steps, learned from the last `WINDOW` of each."""

    def __init__(self) -> None:
        self._seen: dict[Phase, deque[float]] = {
            Phase.PREFILL: deque(maxlen=WINDOW),
            Phase.DECODE: deque(maxlen=WINDOW),
        }

    def observe(self, phase: Phase, seconds: float) -> None:
        self._seen[phase].append(seconds)

    def limit_s(self, phase: Phase) -> float:
        seen = self._seen.get(phase)
        return max(STEP_FLOOR_S, SLACK * max(seen)) if seen else FIRST_S
