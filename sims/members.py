"""Members and their coordinator in virtual time: a star whose frames get lost, doubled and late, and machines that
pause, are slow, die, leave and come back.

What decides at the coordinator is the product's own: `Roll` with `Membership` and `MemberTable`. Here are only links,
and what sockets would do.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from sims.member_frames import COORDINATOR, Answered, Beat, Closed, Dial, Sent, Weather
from sims.member_hosts import MemberHosts, run_if_due
from sims.member_promises import Listening, Promises
from swarmnode.cluster.local_health import TICK_S, LocalHealth
from swarmnode.cluster.member_table import Heading, KnownMembers
from swarmnode.cluster.membership import DEAD_S, Connected, Heard, Late, Membership, NodeState, Parted, StateChanged
from swarmnode.cluster.roll import Answer, Roll

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarmnode.cluster.member_table import Mark
    from swarmnode.ids import NodeId

SLOW_S = 2 * DEAD_S
"""How long a slow coordinator takes to come to what has arrived; its timers are late by SLOW_TICK_S."""
SLOW_TICK_S = 0.6


class MembersWorld(MemberHosts):
    """Runs a coordinator and its members, and raises Violation where one of their promises is broken: those of
    `Promises`, and of a host that it does not wait for answers for ever and that its table never goes back."""

    def __init__(
        self,
        count: int,
        seed: int,
        weather: Weather | None = None,
        *,
        membership: type[Membership] = Membership,
        roll: type[Roll] = Roll,
        known: type[KnownMembers] = KnownMembers,
    ) -> None:
        super().__init__(count, seed, weather, known)
        self.changes: list[tuple[float, StateChanged]] = []
        self.faults = 0
        self.on_change: Callable[[StateChanged], None] = lambda _: None
        """Called for what the coordinator believes of somebody from now on."""
        self._kinds = (membership, roll)
        self.listening = Listening(lambda: self.now_s)
        self._inbox: list[Sent] = []
        self._backlog: deque[Sent] = deque()
        self._reading: Sent | None = None
        self.succeed()

    # its office

    def succeed(self) -> None:
        """A new coordinator, which was one of the members; every connection of the one before is closed."""
        membership, roll = self._kinds
        elected = self.random.choice(list(self.hosts.values()))
        self.term += 1
        self.roll = roll(self.term, membership())
        self.roll.inherit(elected.known.rows.values(), self.now_s)
        self.health = LocalHealth()
        self.links: dict[NodeId, int] = {}
        """The latest of each host."""
        self._welcomed: set[int] = set()
        self._closed: set[int] = set()
        self._inbox.clear()
        self._backlog.clear()
        self.listening.begin()
        self._promises = Promises(self.hosts, self.listening)
        self._hang_up_all()
        self._tick_coordinator(self.term)

    def kill_coordinator(self) -> None:
        """Its connections are closed, and until somebody succeeds it nothing is answered."""
        self.pause_coordinator()
        self._hang_up_all()

    def _hang_up_all(self) -> None:
        for host in self.hosts.values():
            if host.link:
                self._send_host(host.node, Closed(host.link, host.who))

    def pause_coordinator(self) -> None:
        self.listening.pause()

    def resume_coordinator(self) -> None:
        """It looks at its timers before it reads: the worse order of the two."""
        if not self.listening.paused:
            return
        self.listening.resume()
        self._tick_late()
        waiting, self._inbox = self._inbox, []
        for sent in waiting:
            self._read(sent)

    def set_slow(self, slow: bool) -> None:
        self.listening.set_slow(slow)
        while self._backlog and not slow:
            self._read_later(self._backlog[0])

    # its timers

    def _tick_coordinator(self, term: int) -> None:
        if term != self.term:
            return
        late_s = SLOW_TICK_S if self.listening.slow else 0.0
        if not self.listening.paused:
            self._tick_in_time() if not self.listening.slow else self._tick_late()
            self._promises.check_noticed(self.roll.members)
        self.at(self.now_s + TICK_S + late_s, lambda: self._tick_coordinator(term))

    def _tick_in_time(self) -> None:
        """What its loop's watch says moves the timer on, as every message does."""
        self._take_score()
        self._run_timer()

    def _tick_late(self) -> None:
        """Both are overdue, and come in any order: the timer first is the worse one."""
        self._run_timer()
        self._take_score()

    def _take_score(self) -> None:
        self.health.tick(self.now_s)
        self.roll.receive(Late(self.health.score), self.now_s)
        self._drain()

    def _run_timer(self) -> None:
        run_if_due(self.roll, self.now_s)
        self._drain()

    # what it reads

    def _arrive(self, sent: Sent) -> None:
        """At the coordinator's machine, whose kernel takes it in any case."""
        if (sent.node, COORDINATOR) in self.cut or sent.term != self.term:
            return
        self._promises.arrived(sent, sent.message.link in self._welcomed)
        if self.listening.paused:
            self._inbox.append(sent)
        elif self.listening.slow:
            self._backlog.append(sent)
            self.at(self.now_s + SLOW_S, lambda: self._read_later(sent))
        else:
            self._read(sent)

    def _read_later(self, sent: Sent) -> None:
        if not self._backlog or self._backlog[0] is not sent:
            return  # it has caught up since
        self._backlog.popleft()
        if self.listening.paused:
            self._inbox.append(sent)
        else:
            self._read(sent)

    def _read(self, sent: Sent) -> None:
        self._reading = sent
        self._promises.read(sent, sent.message.link in self._welcomed)
        match sent.message:
            case Dial(link, 0, who):
                self.dialed(sent.node, link, who)
            case Dial(link, _, who):
                self._link_up(link, who)
            case Beat(link) if link not in self._welcomed:
                self._send_host(sent.node, Closed(link, sent.message.who))
            case Beat(link, who, held):
                self._link_up(link, who)
                self.roll.receive(who, self.now_s)
                self._drain()
                self._send_host(sent.node, Answered(link, who, self._answer(who, held)))
            case Closed(link, who) if self.links.get(sent.node) == link and link not in self._closed:
                self._closed.add(link)
                self._parted(who)
        self._reading = None

    def dialed(self, node: NodeId, link: int, who: Heard) -> None:
        """Somebody wants a link; that proves nothing yet."""
        self._welcomed.add(link)
        self._send_host(node, Dial(link, 1, who))

    def _answer(self, who: Heard, held: Mark) -> Answer:
        self.roll.table.set_heading(Heading(f"coordinator {self.term}"))
        return self.roll.answer(who, held)

    def _link_up(self, link: int, who: Heard) -> None:
        if link <= self.links.get(who.node, 0):
            return
        self.links[who.node] = link
        self._promises.linked(who)
        self.roll.introduce(who.node, who.node, f"{who.node}:7700")
        self.roll.receive(Connected(who.node, who.boot, who.incarnation), self.now_s)
        self._drain()

    def _parted(self, who: Heard) -> None:
        self._promises.parted(who)
        self.roll.receive(Parted(who.node, who.boot), self.now_s)
        self._drain()

    def _drain(self) -> None:
        for event in self.roll.events():
            if isinstance(event, StateChanged):
                self.changes.append((self.now_s, event))
                self._promises.changed(event, self._reading, self.now_s)
                self.on_change(event)
                if event.state is NodeState.DEAD and (link := self.links.get(event.node)):
                    self._send_host(event.node, Closed(link, self.hosts[event.node].who))

    # wholeness

    def heal(self) -> None:
        """Everything runs that has not left, and every way is open."""
        self.weather = replace(self.weather, late=0.0)
        self.cut.clear()
        if self.listening.slow:
            self.set_slow(False)
        self.resume_coordinator()
        for node in self.hosts:
            self.resume(node)

    def differences(self) -> list[str]:
        """What is not yet as it is to be: everybody who runs is alive, nobody else is, and all hold the same table."""
        found = []
        for node, host in self.hosts.items():
            alive = self.roll.members.state(node) is NodeState.ALIVE
            if alive is not host.running:
                found.append(f"{node} is {'not alive' if host.running else 'alive'}")
            if host.running and host.known.rows != self.roll.table.rows:
                found.append(f"{node} holds table {host.known.mark}, not {self.roll.table.mark}")
        return found
