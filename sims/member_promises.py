"""What a coordinator promises its members, checked by somebody who sees all that reaches it and what it believes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sims.member_frames import Beat
from sims.member_hosts import SLACK_S, STEADY_S
from sims.timeline import Violation
from swarmnode.cluster.local_health import LATE_S, TICK_S
from swarmnode.cluster.membership import AWAIT_S, DEAD_S, NOT_HEARD, RETURN_S, NodeState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sims.member_frames import Message, Sent
    from swarmnode.cluster.membership import Heard, Membership, StateChanged
    from swarmnode.ids import BootId, NodeId


class Listening:
    """When the coordinator's machine ran, and whether it was slow to read; `now` is virtual time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._paused_s: float | None = None
        self._asleep_s = 0.0
        self.stalls = 0
        self.begin()

    def begin(self) -> None:
        """Another machine coordinates."""
        self.slow = self.was_slow = False
        self._paused_s, self._awake_since_s = None, self._now()

    @property
    def paused(self) -> bool:
        return self._paused_s is not None

    @property
    def awake_s(self) -> float:
        """Since it last stalled or changed its pace."""
        return self._now() - self._awake_since_s

    def seconds(self) -> float:
        """In which it ran, from the world's beginning."""
        return (self._now() if self._paused_s is None else self._paused_s) - self._asleep_s

    def pause(self) -> None:
        if self._paused_s is None:
            self._paused_s = self._now()
            self.stalls += 1

    def resume(self) -> None:
        if self._paused_s is not None:
            self._asleep_s += self._now() - self._paused_s
            self._paused_s, self._awake_since_s = None, self._now()

    def set_slow(self, slow: bool) -> None:
        self.slow, self.was_slow = slow, True
        self._awake_since_s = self._now()
        self.stalls += 1


@dataclass(slots=True)
class Arrivals:
    """What reached the coordinator's machine from one host, read or not."""

    boot: int = 0
    """The latest process of it that was heard."""
    last_s: float = 0.0
    """When its last beat came, by the coordinator's listening."""
    read_s: float = 0.0
    """When one was read."""
    stalls: int = 0
    """Of the coordinator until the last one."""
    unread: Counter[BootId] = field(default_factory=Counter)
    """Beats, by process."""
    parted_s: float | None = None
    """When its goodbye was read, by the coordinator's listening."""
    died_s: float | None = None
    """When that process was declared dead; None: it is not."""


class Promises:
    """Those of one coordinator; each broken one raises Violation.

    1. Nobody dies of silence while what it sent is unread, or before DEAD_S in which the coordinator could hear it; of
       those that a new coordinator expects nobody before AWAIT_S.
    2. Whoever is silent for that long is dead.
    3. What was sent before a death, or by an earlier process, brings nobody back.
    """

    def __init__(self, nodes: Iterable[NodeId], listening: Listening) -> None:
        self._arrivals = {node: Arrivals() for node in nodes}
        self._listening = listening
        self._began_s = listening.seconds()

    def arrived(self, sent: Sent, welcome: bool) -> None:
        """A frame reached the machine, whose kernel takes it in any case. `welcome`: its link is this coordinator's."""
        arrivals = self._arrivals[sent.node]
        if welcome and _is_life(sent.message, arrivals):
            arrivals.last_s, arrivals.stalls = self._listening.seconds(), self._listening.stalls
        arrivals.unread[sent.message.who.boot] += isinstance(sent.message, Beat)

    def read(self, sent: Sent, welcome: bool) -> None:
        """The coordinator is about to deal with it."""
        arrivals = self._arrivals[sent.node]
        arrivals.unread[sent.message.who.boot] -= isinstance(sent.message, Beat)
        if welcome and _is_life(sent.message, arrivals):
            arrivals.read_s = self._listening.seconds()

    def linked(self, who: Heard) -> None:
        arrivals = self._arrivals[who.node]
        arrivals.parted_s, arrivals.read_s = None, self._listening.seconds()

    def parted(self, who: Heard) -> None:
        self._arrivals[who.node].parted_s = self._listening.seconds()

    def changed(self, event: StateChanged, reading: Sent | None, now_s: float) -> None:
        """The coordinator believes this from now on, because of what it is `reading`, or of its timer alone."""
        if event.boot == NOT_HEARD:
            self._check_awaited(event)
            return
        arrivals = self._arrivals[event.node]
        if event.state is NodeState.ALIVE:
            _check_return(event, arrivals, now_s if reading is None else reading.at_s)
            arrivals.boot, arrivals.died_s = _process(event.boot), None
        elif event.state is NodeState.DEAD:
            arrivals.died_s = now_s
            if reading is None:  # else another process of it was heard, or it said goodbye
                self._check_death(event, arrivals)

    def _check_awaited(self, event: StateChanged) -> None:
        waited_s = self._listening.seconds() - self._began_s
        overlooked_s = (TICK_S + LATE_S) * self._listening.stalls
        if event.state is not NodeState.DEAD or waited_s < AWAIT_S - overlooked_s - 1e-6:
            raise Violation(
                f"{event.node}, which was expected, was declared {event.state.value} after {waited_s:.1f} s"
            )

    def _check_death(self, event: StateChanged, arrivals: Arrivals) -> None:
        node, parted_s, heard_s = event.node, arrivals.parted_s, self._listening.seconds()
        if arrivals.unread[event.boot] and not (parted_s is not None and self._listening.was_slow):
            raise Violation(f"{node} was declared dead before what it sent was read")
        allowed_s = TICK_S * (self._listening.stalls - arrivals.stalls) + 1e-6
        silent_s = heard_s - arrivals.last_s
        away_s = 0.0 if parted_s is None else heard_s - parted_s
        if silent_s < DEAD_S - allowed_s and away_s < RETURN_S - allowed_s:
            raise Violation(f"{node} was declared dead after {silent_s:.1f} s of silence")

    def check_noticed(self, members: Membership) -> None:
        """Nobody whom a steady coordinator does not hear is alive for longer than it may be."""
        awake_s = self._listening.awake_s
        if self._listening.slow or awake_s < STEADY_S:
            return
        for node, arrivals in self._arrivals.items():
            awaited = members.awaits(node)
            silent_s = awake_s if awaited else self._listening.seconds() - arrivals.read_s
            allowed_s = (AWAIT_S if awaited else DEAD_S) + SLACK_S
            if silent_s > allowed_s and members.state(node) is not NodeState.DEAD:
                raise Violation(f"{node} is silent for {silent_s:.1f} s and not dead")


def _is_life(message: Message, arrivals: Arrivals) -> bool:
    """A beat of the latest process."""
    return isinstance(message, Beat) and _process(message.who.boot) >= arrivals.boot


def _check_return(event: StateChanged, arrivals: Arrivals, sent_s: float) -> None:
    process = _process(event.boot)
    if process < arrivals.boot:
        raise Violation(f"an earlier process of {event.node} came back, {process} after {arrivals.boot}")
    if process == arrivals.boot and arrivals.died_s is not None and sent_s < arrivals.died_s:
        raise Violation(f"{event.node} came back by what it sent before it was dead")


def _process(boot: BootId) -> int:
    return int(boot)
