"""All sessions of a head by id, and the questions its rules ask about them."""

from __future__ import annotations

from collections import Counter

from swarmnode.ids import SessionId
from swarmnode.ring.schedule import Pass
from swarmnode.ring.session import Phase, Session


class Sessions(dict[SessionId, Session]):
    """In the order they were opened; a session leaves when nobody holds anything of it any more."""

    def alive(self, session_id: SessionId) -> Session | None:
        """The session, unless it is unknown or ending: whatever still comes for those is late."""
        session = self.get(session_id)
        return session if session is not None and session.phase is not Phase.ENDING else None

    def active(self) -> list[Session]:
        """All that have not ended for their requests."""
        return [s for s in self.values() if s.phase is not Phase.ENDING]

    def ready(self) -> list[Session]:
        """Those whose next decode step may go round."""
        return [s for s in self.values() if s.phase is Phase.DECODE and s.last_token is not None]

    @property
    def running(self) -> int:
        """How many have started and not ended."""
        return sum(s.phase in (Phase.PREFILL, Phase.DECODE) for s in self.values())

    @property
    def reading(self) -> bool:
        """Prompt pieces are in the ring."""
        return any(s.pieces for s in self.values())

    def gen(self, session_id: SessionId) -> int:
        session = self.get(session_id)
        return session.gen if session is not None else 0

    def pass_now(self, bytes_per_position: int) -> Pass:
        """What is ready and under way, for one decision."""
        groups = Counter(s.group for s in self.values() if s.phase is Phase.DECODE and s.in_flight)
        under_way = [piece for s in self.values() for piece in s.pieces]
        return Pass(
            ready=len(self.ready()),
            groups_in_flight=tuple(groups.values()),
            pieces_in_flight=len(under_way),
            positions_in_flight=sum(piece.n for piece in under_way),
            bytes_per_position=bytes_per_position,
        )
