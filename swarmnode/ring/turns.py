"""Whose turn it is on a stage: a decode step or a prompt piece.

A step waits for one piece at most on its whole way round, however many stages there are, because all stages run their
pieces at the same place in the order of the steps. Stage 0 sees when all who decode have had their step: behind the
step that ends such a round (it is marked; the place is a *slot*) a stage may begin a piece, whoever is late. Who comes
next waits for a piece on stage 0 and so comes that much later to stage 1, which ran its own piece meanwhile, and so on.
Besides:

- In a slot further pieces may follow until the next step is there or late: a long way round carries more than one, and
  the last of them holds a step up by what is left of it.
- Where a round takes longer than `SLOT_AFTER_PIECES` of them on the slowest stage, there is a slot behind the step that
  ends after that time: on a long road each holds up others, among very many chats all wait longer, and a prompt is not
  starved.
- What is missing for longer than pieces explain waits for memory or for a link. No round waits for it, and no piece.

So a round takes its steps and one piece where every stage is full, which is what chats were promised, and a step that
is late for reasons of its own costs the prompt nothing. A session's first step is not looked out for: no stage has seen
one yet that would say when it is due. No question here changes anything.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from swarmnode.ids import SessionId

LATE = 1.05
"""A step is late from so many rounds' time on: steps vary, and one that is only a little slow was not held up."""
LATEST_MS = 500.0
LATEST_ROUNDS = 3
"""A piece holds a step up by this or by so many rounds at most (`cost_schedule` sizes pieces so). What is later yet
does not wait for a piece but for memory or for a link, and no piece waits for it."""
SLOT_AFTER_PIECES = 4.0
"""From one slot to the next it takes at most a step and so many pieces' time where they take longest: a prompt has that
share of the slowest stage."""
PIECES_SEEN = 8
"""The longest of so many counts: a prompt's last piece may be short."""


class Turns:
    """What a stage knows of its slot, and of steps that are elsewhere. Whoever holds the queues says what begins."""

    def __init__(self) -> None:
        self._in_slot = False
        """A step that ended a round was the last one that ran."""
        self._slot_is_new = False
        """No piece has begun in it yet."""
        self._away: dict[SessionId, tuple[float, float]] = {}
        """Sessions whose next step is elsewhere: when it is due back, and when it is no longer waited for."""

    # questions

    def piece_is_next(self, step_waits: bool, now: float) -> bool:
        """Whether a piece that waits goes before the steps that wait, and those that are to come."""
        if self._slot_is_new:
            return True
        return not step_waits and self.held_until_s(now) <= now

    def held_until_s(self, now: float) -> float:
        """No piece follows another before this while no step comes; outside of a slot none while any is to come."""
        away = self._away.values()
        return max((given_up_s for due_s, given_up_s in away if due_s < now or not self._in_slot), default=now)

    def missing(self, session: SessionId, now: float) -> bool:
        """Its step is so late that nothing waits for it."""
        _, given_up_s = self._away.get(session, (now, now + 1))
        return given_up_s <= now

    # what happens on this stage

    def piece_begins(self) -> None:
        self._slot_is_new = False

    def idles(self) -> None:
        """Nothing is to be run: what comes next does not follow right behind a step."""
        self._slot_is_new = False

    def step_begins(self) -> None:
        self._in_slot = self._slot_is_new = False

    def step_ended(self, *, slot: bool) -> None:
        """`slot`: with it a round has ended."""
        self._in_slot = self._slot_is_new = slot

    # steps that are elsewhere

    def left(self, sessions: Iterable[SessionId], round_ms: float, compute_ms: float, now: float) -> None:
        """A step of these sessions went on; a whole round takes `round_ms`, of which `compute_ms` were spent here."""
        due_s = now + max(0.0, LATE * round_ms - compute_ms) / 1e3
        given_up_s = due_s + max(LATEST_MS, LATEST_ROUNDS * round_ms) / 1e3
        for session in sessions:
            self._away[session] = due_s, given_up_s

    def over(self, session: SessionId) -> None:
        """No step of the session is elsewhere: it came, or the session has ended or was paused."""
        self._away.pop(session, None)

    def all_over(self) -> None:
        self._away.clear()


class Rounds:
    """Where the slots are: stage 0 counts who had their step since the last one."""

    def __init__(self) -> None:
        self._stepped: set[SessionId] = set()
        self._slot_s = -math.inf
        """When the last one began."""
        self._pieces_ms: deque[float] = deque(maxlen=PIECES_SEEN)

    def piece_done(self, slowest_ms: float) -> None:
        """How long a piece took on the stage where it takes longest: there the chats wait for it."""
        self._pieces_ms.append(slowest_ms)

    def all_is_read(self) -> None:
        """What comes next to be read may come in longer pieces; steps that are under way then are not to find two
        slots in one round."""
        self._pieces_ms.clear()

    def step_ends_one(self, sessions: Iterable[SessionId], expected: Iterable[SessionId], now: float) -> bool:
        """A step of these sessions ended. Whether a slot follows: all who are `expected` to step have done so."""
        self._stepped.update(sessions)
        long_ago_s = now - SLOT_AFTER_PIECES * max(self._pieces_ms, default=math.inf) / 1e3
        if self._slot_s > long_ago_s and not self._stepped.issuperset(expected):
            return False
        self._stepped.clear()
        self._slot_s = now
        return True
