"""A stage's decode steps in one log line per 30 s of traffic: how many sessions, how long, how long it stood idle."""

from __future__ import annotations

TRAFFIC_S = 30.0
PAUSE_S = 1.0
"""A longer wait for work is no traffic: nobody was being answered."""


class StepStats:
    """Adds up groups and the waits before them; pieces only count as time that passed."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self._reset()

    def _reset(self) -> None:
        self._traffic_s = 0.0
        self._groups = 0
        self._rows = 0
        self._group_ms = 0.0
        self._wait_ms = 0.0

    def waited(self, seconds: float) -> None:
        """The stage had nothing to do for so long."""
        if seconds <= PAUSE_S:
            self._traffic_s += seconds
            self._wait_ms += seconds * 1e3

    def ran(self, rows: int, ms: float) -> str | None:
        """A forward of `rows` sessions (0: a prompt piece) took `ms`; the line, once 30 s of traffic are full."""
        self._traffic_s += ms / 1e3
        if rows:
            self._groups += 1
            self._rows += rows
            self._group_ms += ms
        if self._traffic_s < TRAFFIC_S or not self._groups:
            return None
        line = (
            f"[stage{self._stage} stats {TRAFFIC_S:.0f}s] batch_size={self._rows / self._groups:.2f} "
            f"batch_ms={self._group_ms / self._groups:.1f} wait_ms={self._wait_ms / self._groups:.1f}"
        )
        self._reset()
        return line
