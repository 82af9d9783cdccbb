"""Who is in the swarm: alive, suspect, dead or left, by what was heard from each node and when.

What is believed of a node is ordered by its incarnation, which it alone counts up, with every start and whenever it
learns that it counts as dead; at one incarnation dead stands above all that is heard. So neither a frame that comes
late nor one of an earlier process brings back who is gone. A suspicion is this node's own and needs no such answer:
the next frame that it hears ends it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from swarmnode.cluster.local_health import LATE_S, MAX_SCORE, TICK_S
from swarmnode.ids import BootId
from swarmnode.machine import drain

if TYPE_CHECKING:
    from swarmnode.ids import NodeId

BEAT_INTERVAL_S = 2.0
SUSPECT_S = 6.0
"""Three beats missed: shown, not acted on; a node that is slow is not a node that is dead."""
DEAD_S = 15.0
"""Silence beyond this ends the node's rings; a stalled uplink of a few seconds must not."""
RETURN_S = 3.0
"""How long a node, or a lane of a ring, may be without a connection and come back: a Wi-Fi that roams, or a router that
reconnects, has done so by then; a reply may stand still for so long."""
AWAIT_S = 30.0
"""How long a node that was there under another coordinator may take to find this one: it misses that one for DEAD_S,
and may try places in vain that are gone, too."""
FORGET_S = 600.0
"""A dead node is then as one never seen: by now its connections are gone, too."""
NOT_HEARD = BootId("")
"""The process of a node that is expected; any that is heard follows it."""
_NO_INCARNATION = -1


class NodeState(Enum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"
    """It said so. Else as dead: at one incarnation nothing stands above it."""

    @property
    def gone(self) -> bool:
        return self in (NodeState.DEAD, NodeState.LEFT)


@dataclass(frozen=True, slots=True)
class Heard:
    """Any authenticated progress of a node counts as life, not only its beats."""

    node: NodeId
    boot: BootId
    incarnation: int


@dataclass(frozen=True, slots=True)
class Connected:
    """A new connection of the node is up, which is life as well; a parting is over."""

    node: NodeId
    boot: BootId
    incarnation: int


@dataclass(frozen=True, slots=True)
class Parted:
    """The node's connection ended: it is gone unless it is back within RETURN_S."""

    node: NodeId
    boot: BootId


@dataclass(frozen=True, slots=True)
class Left:
    """The node said goodbye, or was removed."""

    node: NodeId
    boot: BootId


@dataclass(frozen=True, slots=True)
class Expected:
    """The node was there under a coordinator before this one, or counted as `dead`; it was not heard here yet."""

    node: NodeId
    dead: bool


@dataclass(frozen=True, slots=True)
class Late:
    """How late this node's own loop is (`LocalHealth.score`): it waits 1 + score times as long before it judges."""

    score: int


@dataclass(frozen=True, slots=True)
class StateChanged:
    node: NodeId
    boot: BootId
    state: NodeState


@dataclass(frozen=True, slots=True)
class Forgotten:
    """The node was dead, or had left, for FORGET_S."""

    node: NodeId


def next_incarnation(own: int, above: int = 0) -> int:
    """What a node says from now on that said `own`: at its next start, or because it counts as dead at `above`."""
    return max(own, above) + 1


MembershipInput = Heard | Connected | Parted | Left | Expected | Late
MembershipEvent = StateChanged | Forgotten


@dataclass(slots=True)
class _Entry:
    boot: BootId
    incarnation: int
    heard_s: float
    """Moved on by every stall of this node's own: in that time nothing could be heard."""
    parted_s: float | None = None
    state: NodeState = NodeState.ALIVE


class Membership:
    """A `Machine[MembershipInput, Never, MembershipEvent]`. A new boot of a node declares the old one dead first.

    Silence counts only while this node listens: it asks to be run every TICK_S, and where that comes late, the time
    between is nobody's silence, and nobody is judged before one more tick in which what arrived meanwhile is read. (Not
    twice in a row: a loop that is always late still judges in the end.)
    """

    def __init__(self) -> None:
        self._entries: dict[NodeId, _Entry] = {}
        self._factor = 1
        self._ran_s = 0.0
        self._judge_at_s = 0.0
        self._put_off = False
        """Since the last stall nobody could be judged yet. The timer alone does not end it: where messages come oftener
        than every TICK_S, it is for deadlines only."""
        self._events: list[MembershipEvent] = []

    def state(self, node: NodeId) -> NodeState:
        entry = self._entries.get(node)
        return entry.state if entry is not None else NodeState.DEAD

    def awaits(self, node: NodeId) -> bool:
        """Whether it is expected, and there is time left for it to come. Until then it is a suspect."""
        entry = self._entries.get(node)
        return entry is not None and entry.boot == NOT_HEARD and not entry.state.gone

    def silence_s(self, node: NodeId, now: float) -> float | None:
        """Seconds for which nothing was heard of the node while this one listened; None for a node never seen."""
        entry = self._entries.get(node)
        return None if entry is None else now - entry.heard_s

    def above(self, said: Heard) -> int | None:
        """The incarnation that the sender of `said` must pass before it counts as alive; None: it does."""
        entry = self._entries.get(said.node)
        if entry is None or (entry.boot == said.boot and not entry.state.gone):
            return None
        return entry.incarnation

    def receive(self, message: MembershipInput, now: float) -> None:
        self._listen(now)
        match message:
            case Late(score):
                self._factor = 1 + min(score, MAX_SCORE)
            case Heard():
                self._hear(message, now)
            case Connected():
                self._hear(message, now)
                entry = self._entries[message.node]
                if entry.boot == message.boot:
                    entry.parted_s = None
            case Parted():
                parted = self._entries.get(message.node)
                if parted is not None and parted.boot == message.boot and not parted.state.gone:
                    parted.parted_s = now
            case Left():
                left = self._entries.get(message.node)
                if left is not None and left.boot == message.boot and not left.state.gone:
                    self._change(message.node, left, NodeState.LEFT)
            case Expected(node, dead) if node not in self._entries:
                state = NodeState.DEAD if dead else NodeState.SUSPECT
                self._entries[node] = _Entry(NOT_HEARD, _NO_INCARNATION, now, state=state)

    def handle_timer(self, now: float) -> None:
        self._listen(now)
        judges = now >= self._judge_at_s
        self._put_off = self._put_off and not judges  # a loop that is always late has no other end of it
        for node, entry in list(self._entries.items()):
            if entry.state.gone:
                if now - entry.heard_s >= FORGET_S:
                    del self._entries[node]
                    self._events.append(Forgotten(node))
            elif judges and now >= self._dead_at_s(entry):
                self._change(node, entry, NodeState.DEAD)
            elif judges and now >= self._suspect_at_s(entry):
                self._change(node, entry, NodeState.SUSPECT)

    def next_timer(self) -> float | None:
        deadlines = [self._deadline_s(entry) for entry in self._entries.values()]
        if any(not entry.state.gone for entry in self._entries.values()):
            deadlines.append(self._ran_s + TICK_S)
        return min(deadlines, default=None)

    def outgoing(self) -> list[object]:
        return []

    def events(self) -> list[MembershipEvent]:
        return drain(self._events)

    def _listen(self, now: float) -> None:
        """It runs; see whether it could before."""
        deaf_s = now - self._ran_s - TICK_S
        self._ran_s = now
        if deaf_s < LATE_S:
            self._put_off = self._put_off and now < self._judge_at_s
            return
        for entry in self._entries.values():
            if not entry.state.gone:
                entry.heard_s += deaf_s
                entry.parted_s = None if entry.parted_s is None else entry.parted_s + deaf_s
        if not self._put_off:
            self._put_off, self._judge_at_s = True, now + TICK_S

    def _hear(self, message: Heard | Connected, now: float) -> None:
        entry = self._entries.get(message.node)
        if entry is None or (entry.boot != message.boot and message.incarnation > entry.incarnation):
            if entry is not None and entry.boot != NOT_HEARD and not entry.state.gone:
                self._change(message.node, entry, NodeState.DEAD)
            self._entries[message.node] = _Entry(message.boot, message.incarnation, now)
            self._events.append(StateChanged(message.node, message.boot, NodeState.ALIVE))
            return
        if entry.boot != message.boot:
            return  # an earlier process of the node, or a copy of it
        if entry.state.gone and message.incarnation <= entry.incarnation:
            return  # said before it knew
        entry.incarnation = max(entry.incarnation, message.incarnation)
        entry.heard_s = now
        self._change(message.node, entry, NodeState.ALIVE)

    def _suspect_at_s(self, entry: _Entry) -> float:
        return entry.heard_s + SUSPECT_S * self._factor

    def _dead_at_s(self, entry: _Entry) -> float:
        silent_s = entry.heard_s + (AWAIT_S if entry.boot == NOT_HEARD else DEAD_S) * self._factor
        return silent_s if entry.parted_s is None else min(silent_s, entry.parted_s + RETURN_S * self._factor)

    def _deadline_s(self, entry: _Entry) -> float:
        match entry.state:
            case NodeState.DEAD | NodeState.LEFT:
                return entry.heard_s + FORGET_S
            case NodeState.SUSPECT:
                return max(self._judge_at_s, self._dead_at_s(entry))
            case NodeState.ALIVE:
                return max(self._judge_at_s, min(self._suspect_at_s(entry), self._dead_at_s(entry)))

    def _change(self, node: NodeId, entry: _Entry, state: NodeState) -> None:
        if entry.state is not state:
            entry.state = state
            entry.parted_s = None if state.gone else entry.parted_s
            self._events.append(StateChanged(node, entry.boot, state))
