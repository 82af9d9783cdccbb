"""Where a ring stands between its loss and its next request: lost, probed again, reset, serving."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarmnode.ring.head_messages import Probed
from swarmnode.ring.messages import Envelope, Reset
from swarmnode.ring.probes import Probes

if TYPE_CHECKING:
    from swarmnode.ids import SessionId


class Relinking:
    """After `broke` nothing is served until a probe and then a reset came back; another loss begins it anew."""

    def __init__(self) -> None:
        self.serving = True
        self._probes = Probes()
        self._awaited: tuple[SessionId, Probed] | None = None
        """The reset that is going round, by its `below`, and the probe to report once it is back."""

    def broke(self) -> None:
        self.serving, self._awaited = False, None
        self._probes.forget()

    def mended(self) -> None:
        self.serving, self._awaited = True, None

    def probe(self, nonce: int, now: float) -> list[Envelope]:
        """What to send; while the ring is lost only the newest probe counts: earlier ones went with their links."""
        if not self.serving:
            self.broke()
        return self._probes.start(nonce, now)

    def probe_returned(self, nonce: int, lane: str, now: float) -> Probed | None:
        """The probe, once it is back on both lanes."""
        round_ms = self._probes.returned(nonce, lane, now)
        return None if round_ms is None else Probed(nonce, round_ms)

    def reset(self, below: SessionId, keep: tuple[SessionId, ...], probed: Probed) -> Envelope:
        """What to send; `below` is no other reset's."""
        self._awaited = below, probed
        return Envelope("act", Reset(below, keep))

    def reset_returned(self, below: SessionId) -> Probed | None:
        """The probe that asked for this reset; None for a reset of an earlier try."""
        if self._awaited is None or self._awaited[0] != below:
            return None
        return self._awaited[1]
