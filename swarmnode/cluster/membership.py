"""Who is in the swarm: alive, suspect, dead or gone, by what was heard from each node and when."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from swarmnode.machine import drain

if TYPE_CHECKING:
    from swarmnode.ids import BootId, NodeId

BEAT_INTERVAL_S = 2.0
SUSPECT_S = 6.0
"""Three beats missed: shown, not acted on; a node that is slow is not a node that is dead."""
DEAD_S = 15.0
"""Silence beyond this ends the node's rings; a stalled uplink of a few seconds must not."""
FORGET_S = 600.0
"""A dead node, or a boot that another followed, is then as one never seen: by now its connections are gone, too."""
MAX_REPLACED = 1024
"""Boots remembered that others followed; whoever makes up new ones without end drives out the oldest."""


class NodeState(Enum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"


_PATIENCE_S = {NodeState.ALIVE: SUSPECT_S, NodeState.SUSPECT: DEAD_S, NodeState.DEAD: FORGET_S}


@dataclass(frozen=True, slots=True)
class Heard:
    """Any authenticated progress of a node counts as life, not only its beats."""

    node: NodeId
    boot: BootId


@dataclass(frozen=True, slots=True)
class Left:
    """The node said goodbye, or its process is known to be gone."""

    node: NodeId
    boot: BootId


@dataclass(frozen=True, slots=True)
class StateChanged:
    node: NodeId
    boot: BootId
    state: NodeState


@dataclass(slots=True)
class _Entry:
    boot: BootId
    heard_s: float
    state: NodeState = NodeState.ALIVE


class Membership:
    """A `Machine[Heard | Left, Never, StateChanged]`. A new boot id of a node declares the old boot dead first."""

    def __init__(self) -> None:
        self._entries: dict[NodeId, _Entry] = {}
        self._replaced: dict[BootId, float] = {}
        """Boots that a newer one of their node followed, and when: what is still read from their connections is no
        life."""
        self._events: list[StateChanged] = []

    def state(self, node: NodeId) -> NodeState:
        entry = self._entries.get(node)
        return entry.state if entry is not None else NodeState.DEAD

    def silence_s(self, node: NodeId, now: float) -> float | None:
        """Seconds since the node was last heard; None for a node never seen."""
        entry = self._entries.get(node)
        return None if entry is None else now - entry.heard_s

    def receive(self, message: Heard | Left, now: float) -> None:
        entry = self._entries.get(message.node)
        if isinstance(message, Left):
            if entry is not None and entry.boot == message.boot:
                self._change(message.node, entry, NodeState.DEAD)
            return
        if message.boot in self._replaced:
            return
        if entry is None or entry.boot != message.boot:
            if entry is not None:
                self._replace(entry.boot, now)
                self._change(message.node, entry, NodeState.DEAD)
            self._entries[message.node] = _Entry(message.boot, now)
            self._events.append(StateChanged(message.node, message.boot, NodeState.ALIVE))
        else:
            # a dead node's connections were closed, so what is heard now came over new ones: it is back
            entry.heard_s = now
            self._change(message.node, entry, NodeState.ALIVE)

    def handle_timer(self, now: float) -> None:
        for boot in [boot for boot, at_s in self._replaced.items() if now - at_s >= FORGET_S]:
            del self._replaced[boot]
        for node, entry in list(self._entries.items()):
            silence_s = now - entry.heard_s
            if entry.state is NodeState.DEAD:
                if silence_s >= FORGET_S:
                    del self._entries[node]
            elif silence_s >= DEAD_S:
                self._change(node, entry, NodeState.DEAD)
            elif silence_s >= SUSPECT_S:
                self._change(node, entry, NodeState.SUSPECT)

    def next_timer(self) -> float | None:
        deadlines = [entry.heard_s + _PATIENCE_S[entry.state] for entry in self._entries.values()]
        oldest_s = next(iter(self._replaced.values()), None)
        return min(deadlines if oldest_s is None else [*deadlines, oldest_s + FORGET_S], default=None)

    def outgoing(self) -> list[object]:
        return []

    def events(self) -> list[StateChanged]:
        return drain(self._events)

    def _replace(self, boot: BootId, now: float) -> None:
        self._replaced[boot] = now
        if len(self._replaced) > MAX_REPLACED:
            del self._replaced[next(iter(self._replaced))]

    def _change(self, node: NodeId, entry: _Entry, state: NodeState) -> None:
        if entry.state is not state:
            entry.state = state
            self._events.append(StateChanged(node, entry.boot, state))
