"""Whose turn it is on a stage: a decode step or a prompt piece.

A step waits for one piece at most: what has waited for one goes before the next. Beyond that a piece follows once
every session that is ready had its step since the last one, or once steps have taken as long as that piece did: so
few chats hardly feel a prompt, and many do not starve it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from swarmnode.ids import SessionId


class Turns:
    """What one stage ran since its last piece. Whoever holds the queues marks what waits when a piece begins."""

    def __init__(self) -> None:
        self._stepped: set[SessionId] = set()
        self._piece_ms = 0.0
        self._steps_ms = 0.0
        self._piece_ended_s = -math.inf

    def arrived_during_piece(self, now: float) -> bool:
        """Whether what arrived at `now` has waited for a piece already."""
        return now < self._piece_ended_s

    def step_goes_first(self, sessions: Collection[SessionId], delayed: bool) -> bool:
        """Whether a step of these sessions goes before a waiting piece; `delayed`: it has waited for one."""
        had_their_step = all(session in self._stepped for session in sessions)
        return delayed or (not had_their_step and self._steps_ms < self._piece_ms)

    def piece_begins(self) -> None:
        self._stepped.clear()
        self._steps_ms = 0.0

    def piece_ended(self, compute_ms: float, now: float) -> None:
        self._piece_ms, self._piece_ended_s = compute_ms, now

    def step_begins(self, sessions: Collection[SessionId]) -> None:
        self._stepped.update(sessions)

    def step_ended(self, compute_ms: float) -> None:
        self._steps_ms += compute_ms
