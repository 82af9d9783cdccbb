"""Who may start: the waiting room in order, the in-flight limit, and the room every conversation reserves."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from swarmnode.ring.kv_budget import GROWTH_TOKENS, KvBudget
from swarmnode.ring.session import Phase

if TYPE_CHECKING:
    from swarmnode.ring.head_config import HeadConfig
    from swarmnode.ring.session import Session


class Admission:
    """Decides nothing but who starts and who grows; `running` is how many sessions have started and not ended."""

    def __init__(self, config: HeadConfig) -> None:
        self.budget = KvBudget(config.kv_tokens)
        self.waiting: deque[Session] = deque()
        self._config = config

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
        if waiting >= self._config.max_waiting and (waiting or not self._can_start(session, running)):
            return "overloaded", f"{waiting} requests are already waiting; try again later"
        return None

    def next_start(self, running: int) -> Session | None:
        """The first in line, with its room reserved, if it may start now: nobody overtakes it."""
        if not self.waiting or not self._can_start(self.waiting[0], running):
            return None
        session = self.waiting.popleft()
        self.budget.reserve(session.id, self._first_reservation(session))
        session.phase = Phase.PREFILL
        return session

    def grow(self, session: Session) -> bool:
        """Keep room for the next position; a reply without max_tokens grows its reservation as it goes."""
        needed = len(session.prompt) + session.generated + 1
        held = self.budget.held_by(session.id)
        if needed <= held:
            return True
        longest = len(session.prompt) + session.max_new_tokens
        wanted = min(needed + GROWTH_TOKENS, longest, held + self.budget.free_tokens)
        return needed <= wanted and self.budget.reserve(session.id, wanted)

    def _can_start(self, session: Session, running: int) -> bool:
        return running < self._config.max_in_flight and self._first_reservation(session) <= self.budget.free_tokens

    def _first_reservation(self, session: Session) -> int:
        reply = session.max_new_tokens
        if not session.explicit_max:
            reply = min(reply, self._config.typical_tokens)
        return min(len(session.prompt) + reply, self.budget.total_tokens)
