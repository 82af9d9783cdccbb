"""Who was told to leave the ring and has not been answered: until the last stage says so, the room stays reserved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmnode.ids import SessionId

if TYPE_CHECKING:
    from swarmnode.ring.parking import Parked


@dataclass(frozen=True, slots=True)
class Departure:
    """`parked` is what stays of the session once every stage has seen its end; None: nothing."""

    since_s: float
    parked: Parked | None = None


class Leaving(dict[tuple[SessionId, int | None], Departure]):
    """Departures by session and the generation of its `Drop` (None: an `End`), in the order they were sent."""

    def awaits(self, session: SessionId) -> bool:
        return any(session == leaving for leaving, _ in self)

    def oldest_s(self) -> float:
        """Since when the first of them is awaited; inf while nobody is."""
        return min((departure.since_s for departure in self.values()), default=math.inf)

    def spoil(self, session: SessionId, gen: int) -> None:
        """A stage failed the session after its end was sent: what it parked there is not to be continued."""
        departure = self.get((session, None))
        if departure is not None and departure.parked is not None and departure.parked.gen == gen:
            departure.parked.spoiled = True
