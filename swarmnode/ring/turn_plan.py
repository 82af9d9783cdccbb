"""What stage 0 computes next: whose prompt piece or whose decode step; the schedule says how much of it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from swarmnode.ring.session import Phase
from swarmnode.ring.turns import Rounds, Turns
from swarmnode.ring.work import GroupWork, PieceWork, Work

if TYPE_CHECKING:
    from collections.abc import Iterable

    from swarmnode.ids import SessionId
    from swarmnode.ring.cost_model import CostModel
    from swarmnode.ring.schedule import Pass, Schedule
    from swarmnode.ring.session import Session
    from swarmnode.ring.sessions import Sessions


class TurnPlan:
    """Sessions read their prompts in turn; a step goes to those that have waited longest for theirs."""

    def __init__(self, schedule: Schedule, sessions: Sessions, costs: CostModel) -> None:
        self.turns = Turns()
        self._rounds = Rounds()
        self.bytes_per_position = 0
        """Of hidden state on stage 0's link; 0 until a piece was sent."""
        self._schedule = schedule
        self._costs = costs
        self._sessions = sessions
        self.wakes_s: float | None = None
        """When a piece that waits for a late step stops waiting."""
        self.round_ms = 0.0
        """Of the group that was begun last: how long it takes round the ring where no piece holds it up."""
        self._reading: deque[Session] = deque()
        self._next_group_id = 1

    def reads(self, session: Session) -> None:
        """It has something to read in pieces."""
        self._reading.append(session)

    def forget(self, session: Session) -> None:
        self.turns.over(session.id)
        if session in self._reading:
            self._reading.remove(session)

    def next_work(self, now: float) -> Work | None:
        """A piece where it is a piece's turn, else a step; what the schedule holds back gives its turn to the other."""
        self.wakes_s = None
        chosen = self._sessions.pass_now(self.bytes_per_position)
        if self._reading and self.turns.piece_is_next(chosen.ready > 0, now):
            work = self._next_piece(chosen, now) or self._next_group(chosen, now)
        else:
            work = self._next_group(chosen, now) or self._piece_if_no_step_is_due(chosen, now)
        if work is None:
            self.turns.idles()
        return work

    def piece_done(self, slowest_ms: float) -> None:
        """A piece went through all stages; how long it took on the slowest."""
        self._rounds.piece_done(slowest_ms)

    def step_ended(self, stepped: Iterable[SessionId], now: float) -> bool:
        """Whether a slot for pieces is behind that step, on every stage."""
        sessions = self._sessions.values()
        if not any(s.phase is Phase.PREFILL for s in sessions):
            self._rounds.all_is_read()
        decoding = (s.id for s in sessions if s.phase is Phase.DECODE and not s.wants_room)
        expected = [session for session in decoding if not self.turns.missing(session, now)]
        slot = self._rounds.step_ends_one(stepped, expected, now)
        self.turns.step_ended(slot=slot)
        return slot

    def _piece_if_no_step_is_due(self, chosen: Pass, now: float) -> PieceWork | None:
        if not self._reading:
            return None
        held_until_s = self.turns.held_until_s(now)
        if held_until_s > now:
            self.wakes_s = held_until_s
            return None
        return self._next_piece(chosen, now)

    def _next_piece(self, chosen: Pass, now: float) -> PieceWork | None:
        session = self._reading[0]
        end = len(session.reading)
        n = self._schedule.piece_positions(chosen, end - session.next_piece, end - session.cached_tokens)
        if n == 0:
            return None
        self._reading.popleft()
        work = session.take_piece(n, now)
        if not work.last:
            self._reading.append(session)
        self.turns.piece_begins()
        return work

    def _next_group(self, chosen: Pass, now: float) -> GroupWork | None:
        if not chosen.ready:
            return None
        rows = self._schedule.group_rows(chosen)
        ready = sorted(self._sessions.ready(), key=lambda s: s.ready_s)[:rows]
        if not ready:
            return None
        self._next_group_id += 1
        whole, rest = divmod(chosen.ready, len(ready))
        alike = [len(ready)] * whole + [rest] * (rest > 0)  # who is ready together after a piece goes as it did before
        self.round_ms = self._costs.round_ms([*alike, *chosen.groups_in_flight])
        self.turns.step_begins()
        return GroupWork(tuple(session.take_step(self._next_group_id, len(ready), now) for session in ready))
