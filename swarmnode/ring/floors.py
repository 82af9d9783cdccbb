"""Floors of a stage: sessions whose frames are skipped until their end, or drop, has come on both lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarmnode.ids import SessionId

EVERY_GEN = 1 << 31
"""The floor of an `End`: above every generation."""
LANES = 2


class Floors:
    """By session: up to which generation frames are skipped, and on which lanes that was said."""

    def __init__(self) -> None:
        self._seen: dict[SessionId, dict[int, set[str]]] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def __contains__(self, session: SessionId) -> bool:
        return session in self._seen

    def stands(self, session: SessionId, gen: int) -> bool:
        """Whether this very one was said on a lane already."""
        return gen in self._seen.get(session, ())

    def covers(self, session: SessionId, gen: int) -> bool:
        return gen <= max(self._seen.get(session, ()), default=-1)

    def lay(self, session: SessionId, gen: int, lane: str) -> bool:
        """Note that it was said on `lane`; True, and the floor is gone, when that was the second one."""
        floors = self._seen.setdefault(session, {})
        lanes = floors.setdefault(gen, set())
        lanes.add(lane)
        if len(lanes) < LANES:
            return False
        del floors[gen]
        if not floors:
            del self._seen[session]
        return True

    def clear(self) -> None:
        self._seen.clear()
