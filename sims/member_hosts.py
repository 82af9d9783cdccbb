"""Members in virtual time: hosts whose processes start, pause and die, and the ways between them and a coordinator.

What a host decides by is the product's own: `KnownMembers`, `LocalHealth` and a `Membership` of one, the coordinator.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from sims.member_frames import COORDINATOR, Answered, Beat, Closed, Dial, Message, Sent, Weather
from sims.timeline import Timeline, Violation
from swarmnode.cluster.local_health import TICK_S, LocalHealth
from swarmnode.cluster.member_table import KnownMembers
from swarmnode.cluster.membership import (
    BEAT_INTERVAL_S,
    DEAD_S,
    NOT_HEARD,
    Heard,
    Late,
    Membership,
    NodeState,
    StateChanged,
    next_incarnation,
)
from swarmnode.cluster.reconnecting import wait_s
from swarmnode.ids import BootId, NodeId

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarmnode.cluster.roll import Answer, Roll

LONG_LOST = 10
"""Attempts that failed before the first one seen here: the waits between them grow no more."""
STEADY_S = 12.0
"""After a stall a coordinator has its whole patience back: a score of at most 7 falls by one a second."""
SLACK_S = 2.0
"""A tick, and one in which it reads after a stall."""


@dataclass(slots=True)
class Host:
    """One member. Its `incarnation` is on its disk and outlives its processes; the rest does not."""

    node: NodeId
    incarnation: int = 0
    boot: BootId = NOT_HEARD
    running: bool = False
    paused: bool = False
    inbox: list[Sent] = field(default_factory=list)
    link: int = 0
    """The one that it beats on; 0: none."""
    known: KnownMembers = field(default_factory=KnownMembers)
    watch: Membership = field(default_factory=Membership)
    health: LocalHealth = field(default_factory=LocalHealth)
    heard_s: float = 0.0
    woke_s: float = 0.0
    """Since when it has run without a pause."""

    @property
    def who(self) -> Heard:
        return Heard(self.node, self.boot, self.incarnation)


class MemberHosts(Timeline, ABC):
    """Runs hosts at the ends of a star, and raises Violation where one waits for answers for too long, or takes an
    earlier table than it holds."""

    def __init__(self, count: int, seed: int, weather: Weather | None, known: type[KnownMembers]) -> None:
        super().__init__()
        self.random = Random(seed)
        self.weather = weather or Weather()
        self.hosts = {NodeId(f"m{index}"): Host(NodeId(f"m{index}")) for index in range(count)}
        self.cut: set[tuple[NodeId, NodeId]] = set()
        """Ways that lead nowhere now, each in one direction."""
        self.term = 0
        """Of the coordinator."""
        self.on_sent: Callable[[Sent, bool], None] = lambda _sent, _to_host: None
        """Called for every frame that is sent; True: to a host."""
        self.on_table: Callable[[Host], None] = lambda _: None
        """Called for a host that took an update."""
        self._known = known
        self._links = itertools.count(1)
        self._processes = itertools.count(1)

    @abstractmethod
    def _arrive(self, sent: Sent) -> None:
        """At the coordinator's machine."""

    def start(self, node: NodeId) -> None:
        """A process, from what the host's disk holds."""
        host = self.hosts[node]
        if host.running:
            return
        number = next(self._processes)
        self.hosts[node] = host = Host(
            node,
            next_incarnation(host.incarnation),
            BootId(str(number)),
            True,
            known=self._known(),
            woke_s=self.now_s,
        )
        self._dial(host, host.boot)
        self._tick_host(host, self.random.random() * TICK_S)

    def kill(self, node: NodeId) -> None:
        """Its kernel closes its connections."""
        host = self.hosts[node]
        if host.running and host.link:
            self._send(node, Closed(host.link, host.who))
        self.lose_power(node)

    def lose_power(self, node: NodeId) -> None:
        self.hosts[node].running = False

    def pause(self, node: NodeId) -> None:
        self.hosts[node].paused = True

    def resume(self, node: NodeId) -> None:
        host = self.hosts[node]
        if not host.paused:
            return
        host.paused, host.woke_s = False, self.now_s
        self._run_host(host)
        waiting, host.inbox = host.inbox, []
        for sent in waiting:
            self._take(host, sent.message)

    def _tick_host(self, host: Host, wait_s: float) -> None:
        def tick() -> None:
            if host.running:
                if not host.paused:
                    self._run_host(host)
                self._tick_host(host, TICK_S)

        self.at(self.now_s + wait_s, tick)

    def _run_host(self, host: Host) -> None:
        run_if_due(host.watch, self.now_s)
        host.health.tick(self.now_s)
        host.watch.receive(Late(host.health.score), self.now_s)
        if host.link and any(isinstance(e, StateChanged) and e.state is NodeState.DEAD for e in host.watch.events()):
            self._hang_up(host)
        steady = self.now_s - host.woke_s > STEADY_S + DEAD_S
        if host.link and steady and self.now_s - host.heard_s > DEAD_S + SLACK_S:
            raise Violation(f"{host.node} waits for answers since {self.now_s - host.heard_s:.1f} s")

    def _hang_up(self, host: Host) -> None:
        self._send(host.node, Closed(host.link, host.who))
        host.link = 0
        self._dial(host, host.boot)

    def _dial(self, host: Host, boot: BootId) -> None:
        """Until there is a link; each attempt has its own."""
        if not host.running or host.link or host.boot != boot:
            return
        if not host.paused:
            self._send(host.node, Dial(next(self._links), 0, host.who))
        self.at(self.now_s + wait_s(LONG_LOST, self.random.random), lambda: self._dial(host, boot))

    def _beat(self, host: Host, link: int) -> None:
        if not host.running or host.link != link:
            return
        if not host.paused:
            self._send(host.node, Beat(link, host.who, host.known.mark))
        self.at(self.now_s + BEAT_INTERVAL_S, lambda: self._beat(host, link))

    def _reach(self, sent: Sent) -> None:
        """A host's machine; what was meant for an earlier process of it is dropped as it is read."""
        host = self.hosts[sent.node]
        if not host.running or (COORDINATOR, sent.node) in self.cut:
            return
        if host.paused:
            host.inbox.append(sent)
        else:
            self._take(host, sent.message)

    def _take(self, host: Host, message: Message) -> None:
        match message:
            case Dial(link, 1, who) if who.boot == host.boot and not host.link:
                host.link, host.heard_s = link, self.now_s
                host.watch = Membership()
                self._hear_coordinator(host)
                self._send(host.node, Dial(link, 2, host.who))
                self._beat(host, link)
            case Answered(link, _, answer) if link == host.link:
                self._hear_coordinator(host)
                self._take_table(host, answer)
                self._refute(host, answer)
            case Answered(_, _, answer):  # read late, or meant for the process before: harder than sockets are
                self._take_table(host, answer)
            case Closed(link, _) if link == host.link:
                host.link = 0
                self._dial(host, host.boot)

    def _hear_coordinator(self, host: Host) -> None:
        host.heard_s = self.now_s
        host.watch.receive(Heard(COORDINATOR, BootId(str(host.link)), host.link), self.now_s)

    def _take_table(self, host: Host, answer: Answer) -> None:
        before = host.known.mark
        if answer.update is not None and host.known.take(answer.update, self.now_s):
            self.on_table(host)
        if host.known.mark < before:
            raise Violation(f"{host.node} went back from table {before} to {host.known.mark}")

    def _refute(self, host: Host, answer: Answer) -> None:
        if answer.above is not None and answer.above >= host.incarnation:
            host.incarnation = next_incarnation(host.incarnation, answer.above)
            self._send(host.node, Beat(host.link, host.who, host.known.mark))

    # ways

    def _send_host(self, node: NodeId, message: Message) -> None:
        self._carry(Sent(node, self.now_s, message, self.term), self._reach, to_host=True)

    def _send(self, node: NodeId, message: Message) -> None:
        self._carry(Sent(node, self.now_s, message, self.term), self._arrive, to_host=False)

    def _carry(self, sent: Sent, arrive: Callable[[Sent], None], *, to_host: bool) -> None:
        self.on_sent(sent, to_host)
        for way_s in self.weather.ways_s(self.random):
            if way_s is not None:
                self.at(self.now_s + way_s, lambda: arrive(sent))


def run_if_due(machine: Roll | Membership, now_s: float) -> None:
    """As a `Driver` does: a machine that was given a message meanwhile may want to be run later, or not at all."""
    due_s = machine.next_timer()
    if due_s is not None and now_s >= due_s:
        machine.handle_timer(now_s)
