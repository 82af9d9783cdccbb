"""Whose turn it is on a stage: a decode step or a prompt piece.

A step waits for one piece at most on its whole way round, however many stages there are:

- On one stage, what has waited for a piece goes before the next. Beyond that a piece follows once every session that
  is ready had its step since the last one, or once steps have taken as long as that piece did: so few chats hardly
  feel a prompt, and many do not starve it.
- Over all stages, a step that should be back by now is being held up elsewhere, and no piece begins here before it
  came and had its turn. So a piece begins no later than the step would have come unhindered, on whatever stage: it is
  late by what is left of the longest of them, never by their sum.
- A piece that was held back for a round of all sessions begins behind the last of them, whoever is late: all steps
  of the next round are behind it alike.

A session's first step is not looked out for: no stage has seen one yet that would say when it is due.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from swarmnode.ids import SessionId

    Waiting = Collection[tuple[Collection[SessionId], bool]]
    """Steps that are ready: of which sessions, and whether a piece has held them up already."""

LATE = 1.05
"""A step is late from so many rounds' time on: steps vary, and one that is only a little slow was not held up."""
LATEST_MS = 500.0
LATEST_ROUNDS = 3
"""A piece holds a step up by this or by so many rounds at most (`cost_schedule` sizes pieces so). What is later yet
does not wait for a piece but for memory or for a link, and no piece waits for it."""
HELD_ROUNDS = 1
"""Where many sessions step, somebody is late at any time: after so many rounds a piece waits for nobody."""


class Turns:
    """What one stage ran since its last piece. Whoever holds the queues marks what waits when a piece begins."""

    def __init__(self) -> None:
        self._stepped: set[SessionId] = set()
        """Since the last piece."""
        self._round: set[SessionId] = set()
        """Those that had their step in the round under way."""
        self._behind_step = False
        """A step has just ended and nothing came in between."""
        self._held_rounds = 0
        """Rounds that ended while a piece was waiting."""
        self._away: dict[SessionId, tuple[float, float]] = {}
        """Sessions whose next step is elsewhere: when it is due back, and when it is no longer waited for."""
        self._piece_ms = 0.0
        self._steps_ms = 0.0
        self._piece_ended_s = -math.inf

    # decisions

    def piece_is_next(self, waiting: Waiting, now: float) -> bool:
        """Whether the piece that waits goes before all the steps that wait, and those that are to come."""
        if self._ends_round(waiting, now):
            self._held_rounds += 1
            if self._held_rounds > HELD_ROUNDS:
                return True
        return not any(self._goes_first(*step) for step in waiting) and self.held_until_s(now) <= now

    def held_until_s(self, now: float) -> float:
        """No piece begins before this, unless the steps that are late by now come (or end) earlier."""
        return max((given_up_s for due_s, given_up_s in self._away.values() if due_s < now < given_up_s), default=now)

    def _goes_first(self, sessions: Collection[SessionId], delayed: bool) -> bool:
        had_their_step = all(session in self._stepped for session in sessions)
        return delayed or (not had_their_step and self._steps_ms < self._piece_ms)

    def _ends_round(self, waiting: Waiting, now: float) -> bool:
        if not self._behind_step:
            return False
        here = (session for sessions, _ in waiting for session in sessions)
        away = (session for session, (_, given_up_s) in self._away.items() if now < given_up_s)
        return self._round.issuperset(here) and self._round.issuperset(away)

    # what happens on this stage

    def arrived(self, sessions: Iterable[SessionId], now: float) -> bool:
        """A step of these sessions came (at `now`, maybe some time ago); whether a piece has held it up, here or
        elsewhere."""
        due_s = [self._away.pop(session)[0] for session in sessions if session in self._away]
        return now < self._piece_ended_s or now > min(due_s, default=now)

    def piece_begins(self) -> None:
        self._stepped.clear()
        self._round.clear()
        self._held_rounds = 0
        self._behind_step = False
        self._steps_ms = 0.0

    def piece_ended(self, compute_ms: float, now: float) -> None:
        self._piece_ms, self._piece_ended_s = compute_ms, now

    def step_begins(self, sessions: Collection[SessionId]) -> None:
        if not self._round.isdisjoint(sessions):
            self._round.clear()
        self._round.update(sessions)
        self._stepped.update(sessions)

    def step_ended(self, compute_ms: float) -> None:
        self._steps_ms += compute_ms
        self._behind_step = True

    def idles(self) -> None:
        """There is nothing to run: whatever comes next does not follow right behind a step."""
        self._behind_step = False

    # steps that are elsewhere

    def left(self, sessions: Iterable[SessionId], round_ms: float, compute_ms: float, now: float) -> None:
        """A step of these sessions went on; a whole round takes `round_ms`, of which `compute_ms` were spent here."""
        due_s = now + max(0.0, LATE * round_ms - compute_ms) / 1e3
        given_up_s = due_s + max(LATEST_MS, LATEST_ROUNDS * round_ms) / 1e3
        for session in sessions:
            self._away[session] = due_s, given_up_s

    def over(self, session: SessionId) -> None:
        """The session has ended or was paused: no step of it is to come."""
        self._away.pop(session, None)

    def all_over(self) -> None:
        self._away.clear()
