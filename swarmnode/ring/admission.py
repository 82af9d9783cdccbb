"""Who may start, grow, come back or must make room: one decision at a time, which the head carries out.

The order is fixed, so nobody starves. A session that runs and needs room goes first, the oldest before the others.
Parked conversations leave for it, then the youngest running session is paused. Paused ones come back before anyone
who waits, the oldest first, and only then the first in line starts; nobody overtakes.

No two sessions can pause each other for ever: a pause always meets the youngest, so the oldest is never paused and
runs to its end. A younger one comes back only into room that is free beside everyone's reservations, with
GROWTH_TOKENS more than it needs; to pause it again, an older one must have used up what it got by the last pause. So
every pause is paid by progress of an older session, which is bounded by its longest reply.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmnode.ring.head_config import MAX_IN_FLIGHT
from swarmnode.ring.kv_budget import GROWTH_TOKENS, KvBudget
from swarmnode.ring.leaving import Leaving
from swarmnode.ring.parking import Parking, packed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarmnode.ring.head_config import HeadConfig
    from swarmnode.ring.parking import Parked, Prefix
    from swarmnode.ring.session import Session


@dataclass(frozen=True, slots=True)
class Start:
    """The first in line starts, its room reserved; with `prefix` it continues a parked conversation."""

    session: Session
    prefix: Prefix | None = None
    move: bool = False


@dataclass(frozen=True, slots=True)
class Resume:
    """A paused session comes back, its room reserved."""

    session: Session


@dataclass(frozen=True, slots=True)
class Pause:
    session: Session


@dataclass(frozen=True, slots=True)
class Evict:
    parked: Parked


@dataclass(frozen=True, slots=True)
class CutShort:
    """Nobody is left who could make room for the session: its reply ends here."""

    session: Session


Move = Start | Resume | Pause | Evict | CutShort


class Admission:
    """Decides; the head carries out. What sessions hold is in `budget`, parked ones and departures included."""

    def __init__(self, config: HeadConfig) -> None:
        self.budget = KvBudget(config.kv_tokens)
        self.parking = Parking(exact=config.exact_prefix)
        self.leaving = Leaving()
        self.waiting: deque[Session] = deque()
        self.paused: list[Session] = []
        self.pauses = 0
        """How often a session had to make room, ever."""
        self._config = config
        self._max_in_flight = min(config.max_in_flight, MAX_IN_FLIGHT)

    def gauges(self) -> dict[str, int]:
        """Who waits, and who holds the budget's tokens."""
        parked_tokens = self.parking.tokens
        return {
            "waiting": len(self.waiting),
            "paused": len(self.paused),
            "pauses": self.pauses,
            "ending": len(self.leaving),
            "parked": len(self.parking),
            "kv_reserved_tokens": self.budget.used_tokens - parked_tokens,
            "kv_parked_tokens": parked_tokens,
            "kv_budget_tokens": self.budget.total_tokens,
        }

    # at the door

    def why_not(self, session: Session, running: int) -> tuple[str, str] | None:
        """The error of a request that is refused at the door, as (code, message)."""
        prompt, limit = len(session.prompt), min(self._config.context_tokens, self.budget.total_tokens)
        needed = prompt + (session.max_new_tokens if session.explicit_max else 1)
        if needed > limit:
            reply = f" + {needed - prompt:,} of max_tokens" if session.explicit_max else " and its reply"
            return (
                "context_too_long",
                f"this conversation needs {needed:,} tokens ({prompt:,} of prompt{reply}); "
                f"the ring serving this model holds {limit:,}",
            )
        waiting = len(self.waiting)
        if waiting >= self._config.max_waiting and (waiting or not self._starts_at_once(session, running)):
            return "overloaded", f"{waiting} requests are already waiting; try again later"
        return None

    def _starts_at_once(self, session: Session, running: int) -> bool:
        """Whether it need not wait for anybody; parked conversations only have to be told to go."""
        room = self.budget.free_tokens + self.parking.tokens
        return not self.paused and running < self._max_in_flight and self._first_reservation(session) <= room

    # inside

    def next_move(self, running: Sequence[Session]) -> Move | None:
        """What is to be done now, if anything; `running` is ordered by age, the oldest first."""
        short = [session for session in running if session.wants_room and not self.grow(session)]
        if short:
            return self._make_room(short, running)
        if len(running) >= self._max_in_flight:
            return None
        if self.paused:
            return self._come_back(self.paused[0])
        return self._start(self.waiting[0]) if self.waiting else None

    def grow(self, session: Session) -> bool:
        """Keep room for the next position; a reply without max_tokens grows its reservation as it goes.

        Where not even one more position fits, the session wants room and does not step until it has it.
        """
        needed, held = session.needed_tokens, self.budget.held_by(session.id)
        wanted = min(needed + GROWTH_TOKENS, session.longest_tokens, held + self.budget.free_tokens)
        fits = needed <= held or (needed <= wanted and self.budget.reserve(session.id, wanted))
        session.wants_room = not fits
        return fits

    def settle(self, session: Session) -> None:
        """What it took over is its own now: keep what it asked for, give back what the parked one held beyond."""
        self.budget.shrink(session.id, self._first_reservation(session))

    def _make_room(self, short: Sequence[Session], running: Sequence[Session]) -> Move | None:
        wanted = sum(min(GROWTH_TOKENS, s.longest_tokens - self.budget.held_by(s.id)) for s in short)
        if (evict := self._evict(wanted)) is not None:
            return evict
        if self.leaving:
            return None  # room is on its way
        return Pause(running[-1]) if len(running) > 1 else CutShort(short[0])

    def _evict(self, wanted: int, but: Parked | None = None) -> Evict | None:
        """The next parked one that has to go for `wanted` tokens of room; None: they are there, or on their way."""
        if self._room >= wanted:
            return None
        parked = next(self.parking.idle(but), None)
        return None if parked is None else Evict(parked)

    @property
    def _room(self) -> int:
        """Free now, or as soon as everyone who is leaving has left."""
        return self.budget.free_tokens + sum(self.budget.held_by(session) for session, _ in self.leaving)

    def _come_back(self, session: Session) -> Move | None:
        wanted = session.longest_tokens
        if not session.explicit_max:
            wanted = min(wanted, session.needed_tokens + GROWTH_TOKENS)
        wanted = min(wanted, self.budget.total_tokens)
        if self.leaving.awaits(session.id):
            return None
        if wanted > self.budget.free_tokens:
            return self._evict(wanted)
        self.paused.remove(session)
        self.budget.reserve(session.id, wanted)
        return Resume(session)

    def _start(self, session: Session) -> Move | None:
        """A parked conversation that the prompt continues as a whole is taken over; else its beginning is copied.

        Where a copy has no room beside it, it is taken over, too: it would have to go anyway.
        """
        needed = self._first_reservation(session)
        prefix = self.parking.longest(session.prompt)
        if self._comes_round(session, prefix):
            return None
        source, move = (prefix.source, self._takes_over(prefix, needed)) if prefix is not None else (None, False)
        extra = needed - source.held_tokens if source is not None and move else needed
        if extra > self.budget.free_tokens:
            return self._evict(extra, but=source)
        self.waiting.popleft()
        if source is not None and move:
            self.parking.remove(source)
            self.budget.transfer(source.id, session.id, source.held_tokens)
        self.budget.reserve(session.id, needed)
        return Start(session, prefix, move)

    def _comes_round(self, session: Session, prefix: Prefix | None) -> bool:
        """Whether a conversation that the prompt continues as a whole has just ended: a client that answers at once
        waits for its end's one trip round the ring, and not for all of it to be read again."""
        best = prefix.length if prefix is not None else 0
        coming = [departure.parked for departure in self.leaving.values() if departure.parked is not None]
        longer = [parked for parked in coming if parked.length > best and not parked.spoiled]
        return bool(longer) and any(packed(session.prompt[:-1]).startswith(parked.tokens) for parked in longer)

    def _takes_over(self, prefix: Prefix, needed: int) -> bool:
        source = prefix.source
        beside = self._room + sum(parked.held_tokens for parked in self.parking.idle(but=source))
        return not source.pins and (prefix.is_whole or beside < needed)

    def _first_reservation(self, session: Session) -> int:
        reply = session.max_new_tokens
        if not session.explicit_max:
            reply = min(reply, self._config.typical_tokens)
        return min(len(session.prompt) + reply, self.budget.total_tokens)
