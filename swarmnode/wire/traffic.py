"""Bytes and frames counted per channel kind, ring, lane and peer (links of all implementations count here)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class Route:
    """What is counted together. A link that was dialed again goes on with the same counts."""

    kind: str
    peer: str
    ring: str = ""
    lane: str = ""


@dataclass(slots=True)
class Counts:
    frames_in: int = 0
    bytes_in: int = 0
    frames_out: int = 0
    bytes_out: int = 0

    def took(self, n_bytes: int, frames: int = 1) -> None:
        self.frames_in += frames
        self.bytes_in += n_bytes

    def add(self, other: Counts) -> None:
        self.frames_in += other.frames_in
        self.bytes_in += other.bytes_in
        self.frames_out += other.frames_out
        self.bytes_out += other.bytes_out

    def gave(self, n_bytes: int, frames: int = 1) -> None:
        self.frames_out += frames
        self.bytes_out += n_bytes


@dataclass(slots=True)
class Traffic:
    """One node's counters."""

    _routes: dict[Route, Counts] = field(default_factory=dict)

    def counts(self, route: Route) -> Counts:
        return self._routes.setdefault(route, Counts())

    def find(self, route: Route) -> Counts | None:
        """None: nothing went that way."""
        return self._routes.get(route)

    def forget_ring(self, ring: str) -> None:
        """A ring was unloaded; its routes would otherwise stay for ever."""
        for route in [route for route in self._routes if route.ring == ring]:
            del self._routes[route]

    def snapshot(self) -> list[dict[str, str | int]]:
        """One record per route, as JSON."""
        return [{**asdict(route), **asdict(counts)} for route, counts in self._routes.items()]
