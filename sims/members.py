"""Members and their coordinator in virtual time: a star whose frames get lost, doubled and late, and machines that
pause, are slow, die, leave and come back.

What decides is the product's own: `Roll` (with `Membership` and `MemberTable`) at the coordinator; `KnownMembers`,
`LocalHealth` and a `Membership` of one, the coordinator, at every host. Here are only links, and what sockets would do.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING

from sims import timeline
from sims.timeline import Stuck, Timeline, Violation
from swarmnode.cluster.local_health import LATE_S, TICK_S, LocalHealth
from swarmnode.cluster.member_table import Heading, KnownMembers
from swarmnode.cluster.membership import (
    AWAIT_S,
    BEAT_INTERVAL_S,
    DEAD_S,
    NOT_HEARD,
    RETURN_S,
    Connected,
    Heard,
    Late,
    Membership,
    NodeState,
    Parted,
    StateChanged,
    next_incarnation,
)
from swarmnode.cluster.reconnecting import wait_s
from swarmnode.cluster.roll import Answer, Roll
from swarmnode.ids import BootId, NodeId

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarmnode.cluster.member_table import Mark

LONG_LOST = 10
"""Attempts that failed before the first one seen here: the waits between them grow no more."""
SLOW_S = 2 * DEAD_S
"""How long a slow coordinator takes to come to what has arrived; its timers are late by SLOW_TICK_S."""
SLOW_TICK_S = 0.6
STEADY_S = 12.0
"""After a stall a coordinator has its whole patience back: a score of at most 7 falls by one a second."""
SLACK_S = 2.0
"""A tick, and one in which it reads after a stall."""
COORDINATOR = NodeId("coordinator")


@dataclass(frozen=True, slots=True)
class Weather(timeline.Weather):
    """Frames are held up for longer than silence may last."""

    loss: float = 0.02
    late_s: float = 40.0


@dataclass(frozen=True, slots=True)
class Dial:
    """A handshake's beginning, its answer and its end: a link is up only when all three came through."""

    link: int
    step: int
    who: Heard


@dataclass(frozen=True, slots=True)
class Beat:
    link: int
    who: Heard
    held: Mark


@dataclass(frozen=True, slots=True)
class Answered:
    link: int
    who: Heard
    answer: Answer


@dataclass(frozen=True, slots=True)
class Closed:
    """The other end's socket was closed."""

    link: int
    who: Heard


Message = Dial | Beat | Answered | Closed


@dataclass(frozen=True, slots=True)
class Sent:
    node: NodeId
    """The host at the star's other end."""
    at_s: float
    message: Message
    term: int
    """Of the coordinator that it is from, or for."""


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


class MembersWorld(Timeline):
    """Runs a coordinator and its members, and raises Violation where a promise is broken.

    1. Nobody dies of silence while what it sent is unread, or before DEAD_S in which the coordinator could hear it; of
       those that a new coordinator expects nobody before AWAIT_S.
    2. Whoever is silent for that long is dead, and whoever gets no answer for as long looks for another coordinator.
    3. What was sent before a death, or by an earlier process, brings nobody back.
    4. No copy of the table goes back to an earlier one.
    """

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
        super().__init__()
        self.random = Random(seed)
        self.weather = weather or Weather()
        self.hosts = {NodeId(f"m{index}"): Host(NodeId(f"m{index}")) for index in range(count)}
        self.cut: set[tuple[NodeId, NodeId]] = set()
        """Ways that lead nowhere now, each in one direction."""
        self.changes: list[tuple[float, StateChanged]] = []
        self.faults = 0
        self.on_sent: Callable[[Sent, bool], None] = lambda _sent, _to_host: None
        """Called for every frame that is sent; True: to a host."""
        self.on_change: Callable[[StateChanged], None] = lambda _: None
        """Called for what the coordinator believes of somebody from now on."""
        self.on_table: Callable[[Host], None] = lambda _: None
        """Called for a host that took an update."""
        self._kinds = (membership, roll, known)
        self._links = itertools.count(1)
        self._processes = itertools.count(1)
        self.term = 0
        self.slow = self._was_slow = False
        self._paused_s: float | None = None
        self._asleep_s = 0.0
        self._stalls = 0
        self._inbox: list[Sent] = []
        self._backlog: deque[Sent] = deque()
        self._reading: Sent | None = None
        self.succeed()

    # the coordinator

    def succeed(self) -> None:
        """A new coordinator, which was one of the members; every connection of the one before is closed."""
        membership, roll, _ = self._kinds
        elected = self.random.choice(list(self.hosts.values()))
        self.term += 1
        self.roll = roll(self.term, membership())
        self.roll.inherit(elected.known.rows.values(), self.now_s)
        self.health = LocalHealth()
        self.links: dict[NodeId, int] = {}
        """The latest of each host."""
        self._welcomed: set[int] = set()
        self._closed: set[int] = set()
        self.arrivals = {node: Arrivals() for node in self.hosts}
        self._inbox.clear()
        self._backlog.clear()
        self._paused_s, self._awake_since_s = None, self.now_s
        self._began_s = self._listened_s()
        self.slow = self._was_slow = False
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

    @property
    def paused(self) -> bool:
        return self._paused_s is not None

    def pause_coordinator(self) -> None:
        if not self.paused:
            self._paused_s = self.now_s
            self._stalls += 1

    def resume_coordinator(self) -> None:
        """It looks at its timers before it reads: the worse order of the two."""
        if self._paused_s is None:
            return
        self._asleep_s += self.now_s - self._paused_s
        self._paused_s, self._awake_since_s = None, self.now_s
        self._tick_late()
        waiting, self._inbox = self._inbox, []
        for sent in waiting:
            self._read(sent)

    def set_slow(self, slow: bool) -> None:
        self.slow, self._was_slow = slow, True
        self._awake_since_s = self.now_s
        self._stalls += 1
        while self._backlog and not slow:
            self._read_later(self._backlog[0])

    def _listened_s(self) -> float:
        """Seconds in which the coordinator ran."""
        return (self.now_s if self._paused_s is None else self._paused_s) - self._asleep_s

    def _tick_coordinator(self, term: int) -> None:
        if term != self.term:
            return
        late_s = SLOW_TICK_S if self.slow else 0.0
        if not self.paused:
            self._tick_in_time() if not self.slow else self._tick_late()
            self._check_noticed()
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
        _run_if_due(self.roll, self.now_s)
        self._drain()

    def _arrive(self, sent: Sent) -> None:
        """At the coordinator's machine, whose kernel takes it in any case."""
        if (sent.node, COORDINATOR) in self.cut or sent.term != self.term:
            return
        arrivals = self.arrivals[sent.node]
        if self._is_life(sent.message, arrivals):
            arrivals.last_s, arrivals.stalls = self._listened_s(), self._stalls
        arrivals.unread[sent.message.who.boot] += isinstance(sent.message, Beat)
        if self.paused:
            self._inbox.append(sent)
        elif self.slow:
            self._backlog.append(sent)
            self.at(self.now_s + SLOW_S, lambda: self._read_later(sent))
        else:
            self._read(sent)

    def _is_life(self, message: Message, arrivals: Arrivals) -> bool:
        """A beat of the latest process, on a link of this coordinator."""
        if not isinstance(message, Beat) or message.link not in self._welcomed:
            return False
        return _process(message.who.boot) >= arrivals.boot

    def _read_later(self, sent: Sent) -> None:
        if not self._backlog or self._backlog[0] is not sent:
            return  # it has caught up since
        self._backlog.popleft()
        if self.paused:
            self._inbox.append(sent)
        else:
            self._read(sent)

    def _read(self, sent: Sent) -> None:
        self._reading = sent
        arrivals = self.arrivals[sent.node]
        arrivals.unread[sent.message.who.boot] -= isinstance(sent.message, Beat)
        if self._is_life(sent.message, arrivals):
            arrivals.read_s = self._listened_s()
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
        arrivals = self.arrivals[who.node]
        arrivals.parted_s, arrivals.read_s = None, self._listened_s()
        self.roll.introduce(who.node, who.node, f"{who.node}:7700")
        self.roll.receive(Connected(who.node, who.boot, who.incarnation), self.now_s)
        self._drain()

    def _parted(self, who: Heard) -> None:
        self.arrivals[who.node].parted_s = self._listened_s()
        self.roll.receive(Parted(who.node, who.boot), self.now_s)
        self._drain()

    def _drain(self) -> None:
        for event in self.roll.events():
            if isinstance(event, StateChanged):
                self.changes.append((self.now_s, event))
                self._check_change(event)
                self.on_change(event)
                if event.state is NodeState.DEAD and (link := self.links.get(event.node)):
                    self._send_host(event.node, Closed(link, self.hosts[event.node].who))

    # its promises

    def _check_change(self, event: StateChanged) -> None:
        if event.boot == NOT_HEARD:
            self._check_awaited(event)
            return
        arrivals, process = self.arrivals[event.node], _process(event.boot)
        if event.state is NodeState.ALIVE:
            if process < arrivals.boot:
                raise Violation(f"an earlier process of {event.node} came back, {process} after {arrivals.boot}")
            sent_s = self.now_s if self._reading is None else self._reading.at_s
            if process == arrivals.boot and arrivals.died_s is not None and sent_s < arrivals.died_s:
                raise Violation(f"{event.node} came back by what it sent before it was dead")
            arrivals.boot, arrivals.died_s = process, None
        elif event.state is NodeState.DEAD:
            arrivals.died_s = self.now_s
            if self._reading is None:  # else another process of it was heard, or it said goodbye
                self._check_death(event, arrivals)

    def _check_awaited(self, event: StateChanged) -> None:
        waited_s = self._listened_s() - self._began_s
        overlooked_s = (TICK_S + LATE_S) * self._stalls
        if event.state is not NodeState.DEAD or waited_s < AWAIT_S - overlooked_s - 1e-6:
            raise Violation(
                f"{event.node}, which was expected, was declared {event.state.value} after {waited_s:.1f} s"
            )

    def _check_death(self, event: StateChanged, arrivals: Arrivals) -> None:
        node, parted_s = event.node, arrivals.parted_s
        if arrivals.unread[event.boot] and not (parted_s is not None and self._was_slow):
            raise Violation(f"{node} was declared dead before what it sent was read")
        allowed_s = TICK_S * (self._stalls - arrivals.stalls) + 1e-6
        silent_s = self._listened_s() - arrivals.last_s
        away_s = 0.0 if parted_s is None else self._listened_s() - parted_s
        if silent_s < DEAD_S - allowed_s and away_s < RETURN_S - allowed_s:
            raise Violation(f"{node} was declared dead after {silent_s:.1f} s of silence")

    def _check_noticed(self) -> None:
        awake_s = self.now_s - self._awake_since_s
        if self.slow or awake_s < STEADY_S:
            return
        for node, arrivals in self.arrivals.items():
            awaited = self.roll.members.awaits(node)
            silent_s = awake_s if awaited else self._listened_s() - arrivals.read_s
            allowed_s = (AWAIT_S if awaited else DEAD_S) + SLACK_S
            if silent_s > allowed_s and self.roll.members.state(node) is not NodeState.DEAD:
                raise Violation(f"{node} is silent for {silent_s:.1f} s and not dead")

    # hosts

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
            known=self._kinds[2](),
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
        _run_if_due(host.watch, self.now_s)
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

    # wholeness

    def heal(self) -> None:
        """Everything runs that has not left, and every way is open."""
        self.weather = replace(self.weather, late=0.0)
        self.cut.clear()
        if self.slow:
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


def _process(boot: BootId) -> int:
    return int(boot)


def _run_if_due(machine: Roll | Membership, now_s: float) -> None:
    """As a `Driver` does: a machine that was given a message meanwhile may want to be run later, or not at all."""
    due_s = machine.next_timer()
    if due_s is not None and now_s >= due_s:
        machine.handle_timer(now_s)


WHOLE_S = 90.0
"""Within this of a whole network everybody holds one table: deaths are noticed, old links given up, new ones made."""
FAULTS_EVERY_S = 6.0


def torture(
    seed: int,
    *,
    count: int = 3,
    seconds: float = 90.0,
    faults_every_s: float = FAULTS_EVERY_S,
    weather: Weather | None = None,
    world: Callable[..., MembersWorld] = MembersWorld,
) -> MembersWorld:
    """Random faults, then a whole network; raises Violation, or Stuck where the tables do not become one in time."""
    made = world(count, seed, weather)
    for node in made.hosts:
        made.at(made.random.random(), lambda node=node: made.start(node))  # type: ignore[misc]
    at_s = made.random.expovariate(1 / faults_every_s)
    while at_s < seconds:
        made.at(at_s, lambda: _fault(made))
        at_s += made.random.expovariate(1 / faults_every_s)
    made.run_until(seconds)
    made.heal()
    while made.differences():
        if made.now_s >= seconds + WHOLE_S:
            raise Stuck(f"{WHOLE_S:.0f} s after the network is whole: {made.differences()}")
        made.run_until(made.now_s + 1.0)
    return made


def _fault(world: MembersWorld) -> None:
    """One thing goes wrong, or right again."""
    world.faults += 1
    node = world.random.choice(list(world.hosts))
    match world.random.randrange(12):
        case 0:
            world.kill(node)
        case 1:
            world.lose_power(node)
        case 2 | 3:
            world.start(node)
        case 4:
            world.pause(node)
        case 5:
            world.resume(node)
        case 6:
            world.pause_coordinator()
        case 7:
            world.resume_coordinator()
        case 8:
            world.cut.add(world.random.choice([(node, COORDINATOR), (COORDINATOR, node)]))
        case 9:
            world.cut.clear()
        case 10:
            world.set_slow(not world.slow)
        case _:
            world.succeed()


def returns_under_cut(seed: int, seconds: float = 300.0, world: Callable[..., MembersWorld] = MembersWorld) -> int:
    """How often a host came back under a cut of one of its two ways that lasts; it and the coordinator run on."""
    made = world(2, seed, None)
    for node in made.hosts:
        made.start(node)
    made.run_until(30.0 + made.random.random())
    node = next(iter(made.hosts))
    made.cut.add(made.random.choice([(node, COORDINATOR), (COORDINATOR, node)]))
    cut_s = made.now_s
    made.run_until(cut_s + seconds)
    after = [change for at_s, change in made.changes if at_s > cut_s and change.node == node]
    return sum(change.state is NodeState.ALIVE for change in after)
