"""When a ring goes without being asked to: it was idle for too long, or room is needed for another one.

Whole rings, decided by the coordinator. A ring with running replies is never touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from swarmnode.errors import Conflict, LoadRefused
from swarmnode.machine import drain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from swarmnode.ids import NodeId, RingId

Planned = TypeVar("Planned")


@dataclass(frozen=True, slots=True)
class RingServes:
    """A ring is ready: from now on it is idle until a reply starts."""

    ring: RingId


@dataclass(frozen=True, slots=True)
class ReplyStarted:
    ring: RingId


@dataclass(frozen=True, slots=True)
class ReplyEnded:
    ring: RingId


@dataclass(frozen=True, slots=True)
class RingGone:
    """It is being unloaded, or lost."""

    ring: RingId


@dataclass(frozen=True, slots=True)
class IdleTooLong:
    """Nothing ran on this ring for the whole time."""

    ring: RingId
    idle_s: float


Use = RingServes | ReplyStarted | ReplyEnded | RingGone


class IdleRings:
    """A `Machine[Use, object, IdleTooLong]`: says once of a ring that it was idle for `limit_s` (0: never)."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._running: dict[RingId, int] = {}
        self._since_s: dict[RingId, float] = {}
        self._events: list[IdleTooLong] = []

    def receive(self, message: Use, now: float) -> None:
        ring = message.ring
        match message:
            case RingServes():
                self._running.setdefault(ring, 0)
                self._since_s[ring] = now
            case RingGone():
                self._running.pop(ring, None)
                self._since_s.pop(ring, None)
            case _ if ring not in self._running:
                pass  # a reply that ends with its ring
            case ReplyStarted():
                self._running[ring] += 1
                self._since_s[ring] = now
            case ReplyEnded():
                self._running[ring] = max(0, self._running[ring] - 1)
                self._since_s[ring] = now

    def handle_timer(self, now: float) -> None:
        for ring, deadline_s in list(self._deadlines().items()):
            if deadline_s <= now:
                self._events.append(IdleTooLong(ring, self._limit_s))
                self.receive(RingGone(ring), now)

    def next_timer(self) -> float | None:
        return min(self._deadlines().values(), default=None)

    def outgoing(self) -> list[object]:
        """It sends nothing."""
        return []

    def events(self) -> list[IdleTooLong]:
        return drain(self._events)

    def last_used_s(self, ring: RingId) -> float:
        """When a reply last began or ended there, or it became ready; before all others where it never did."""
        return self._since_s.get(ring, float("-inf"))

    def _deadlines(self) -> dict[RingId, float]:
        if not self._limit_s:
            return {}
        return {ring: self._since_s[ring] + self._limit_s for ring, count in self._running.items() if not count}


@dataclass(frozen=True, slots=True)
class RingUse:
    """A ring as a load that needs room sees it."""

    ring: RingId
    model: str
    nodes: frozenset[NodeId]
    last_used_s: float
    kept_because: str = ""
    """Why it may not go: it has running replies, or is loading."""


def find_room(
    rings: Sequence[RingUse],
    plan: Callable[[frozenset[RingId]], Planned],
    nodes_of: Callable[[Planned], frozenset[NodeId]],
) -> tuple[Planned, tuple[RingId, ...]]:
    """A plan beside what is there, else with the oldest idle rings gone, as few as it takes; and which ones those are.

    `plan` is told which rings to think away, and raises LoadRefused. Where only rings that may not go are in the way,
    raises Conflict; where nothing would help, what `plan` says of the empty peers.
    """
    idle = sorted((ring for ring in rings if not ring.kept_because), key=lambda ring: (ring.last_used_s, ring.ring))
    refused: LoadRefused | None = None
    for count in range(len(idle) + 1):
        gone = idle[:count]
        try:
            planned = plan(frozenset(ring.ring for ring in gone))
        except LoadRefused as error:
            refused = error
            continue
        held = nodes_of(planned)
        return planned, tuple(ring.ring for ring in gone if ring.nodes & held)
    assert refused is not None
    raise _why_not(rings, plan, refused)


def _why_not(
    rings: Sequence[RingUse], plan: Callable[[frozenset[RingId]], Planned], refused: LoadRefused
) -> Conflict | LoadRefused:
    kept = [ring for ring in rings if ring.kept_because]
    if not kept:
        return refused
    try:
        plan(frozenset(ring.ring for ring in rings))
    except LoadRefused as error:
        return error
    whose = ", ".join(f"{ring.model} ({ring.kept_because})" for ring in kept)
    return Conflict(f"there is no room beside {whose}; wait until that is over, or unload it with force")
