"""Probes that are going round a ring, on both lanes each."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarmnode.ring.messages import Envelope, Probe

PROBED_LANES = ("act", "pre")


@dataclass(slots=True)
class _UnderWay:
    started_s: float
    missing: set[str] = field(default_factory=lambda: set(PROBED_LANES))


class Probes:
    """Remembers when each probe left; it is back when both its lanes are."""

    def __init__(self) -> None:
        self._under_way: dict[int, _UnderWay] = {}

    def start(self, nonce: int, now: float) -> list[Envelope]:
        """What to send."""
        self._under_way[nonce] = _UnderWay(now)
        return [Envelope(lane, Probe(nonce, lane)) for lane in PROBED_LANES]

    def returned(self, nonce: int, lane: str, now: float) -> float | None:
        """The slower lane's time in ms once both are back; None before that, and for a probe nobody sent."""
        probe = self._under_way.get(nonce)
        if probe is None:
            return None
        probe.missing.discard(lane)
        if probe.missing:
            return None
        del self._under_way[nonce]
        return (now - probe.started_s) * 1e3

    def forget(self) -> None:
        self._under_way.clear()
