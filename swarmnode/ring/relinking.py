"""Where a ring stands between its loss and its next request: lost, probed again, reset, serving."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarmnode.ids import SessionId
    from swarmnode.ring.head_messages import Probed


@dataclass(frozen=True, slots=True)
class _Reset:
    below: SessionId
    probed: Probed


class Relinking:
    """After `broke` nothing is served until a probe and then a reset came back; another loss begins it anew."""

    def __init__(self) -> None:
        self.serving = True
        self._reset: _Reset | None = None

    def broke(self) -> None:
        self.serving, self._reset = False, None

    def resets(self, below: SessionId, probed: Probed) -> None:
        """A reset goes round; `probed` is what will be reported when it is back."""
        self._reset = _Reset(below, probed)

    def returned(self, below: SessionId) -> Probed | None:
        """The ring serves again; None for a reset of an earlier try."""
        reset = self._reset
        if reset is None or reset.below != below:
            return None
        self.mended()
        return reset.probed

    def mended(self) -> None:
        self.serving, self._reset = True, None
