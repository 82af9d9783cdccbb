"""All sessions of a head by id, and the questions its rules ask about them."""

from __future__ import annotations

from collections import Counter

from swarmnode.ids import SessionId
from swarmnode.ring.schedule import Pass
from swarmnode.ring.session import Phase, Session


class Sessions(dict[SessionId, Session]):
    """In the order they were opened; a session leaves when its request has ended."""

    def running(self) -> list[Session]:
        """Those that have started and not been paused, by age."""
        return [s for s in self.values() if s.phase in (Phase.PREFILL, Phase.DECODE)]

    def in_flight(self) -> list[Session]:
        """Those of which something is travelling round the ring."""
        return [s for s in self.values() if s.in_flight]

    def alive(self, session_id: SessionId, gen: int) -> Session | None:
        """The session while it runs in that generation: whatever else comes for it is late."""
        session = self.get(session_id)
        if session is None or session.gen != gen or session.phase not in (Phase.PREFILL, Phase.DECODE):
            return None
        return session

    def ready(self) -> list[Session]:
        """Those whose next decode step may go round."""
        return [s for s in self.values() if s.phase is Phase.DECODE and s.last_token is not None and not s.wants_room]

    @property
    def reading(self) -> bool:
        """Prompt pieces are in the ring."""
        return any(s.pieces for s in self.values())

    def pass_now(self, bytes_per_position: int) -> Pass:
        """What is ready and under way, for one decision."""
        groups = Counter(s.group for s in self.values() if s.phase is Phase.DECODE and s.in_flight)
        under_way = [piece for s in self.values() for piece in s.pieces]
        return Pass(
            ready=len(self.ready()),
            groups_in_flight=tuple(groups.values()),
            prompts=sum(s.phase is Phase.PREFILL for s in self.values()),
            pieces_in_flight=len(under_way),
            positions_in_flight=sum(piece.n for piece in under_way),
            bytes_per_position=bytes_per_position,
        )
