"""Voters in virtual time: messages that get lost, doubled and late, machines that pause, crash and are cut off.

The voters are `cluster/election.py` itself. Everything is drawn from one seed, so a failure is replayed by its number.
"""

from __future__ import annotations

import itertools
import json
import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING

from sims import timeline
from sims.timeline import Stuck, Timeline, Violation
from swarmnode.cluster.election import Election
from swarmnode.cluster.election_messages import (
    Append,
    Arrived,
    Committed,
    Elected,
    ElectionEvent,
    ElectionInput,
    Entry,
    Following,
    Learners,
    Persist,
    ProposalRefused,
    Propose,
    SendTo,
    SteppedDown,
    Stored,
)
from swarmnode.cluster.fence import Fence
from swarmnode.errors import StaleTerm
from swarmnode.ids import NodeId

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarmnode.cluster.election_messages import VoterMessage

FRAME_BYTES = 200
"""Of a message without a document, about, TLS and HTTP/2 included."""
LATE_COMMAND_S = 5.0
"""A command's mean way to a peer: long enough that elections overtake it."""


@dataclass(frozen=True, slots=True)
class Weather(timeline.Weather):
    """What befalls messages and disks."""

    crash_after_write: float = 0.02
    """Share of writes to disk after which the machine restarts at once: the worst moment for what it only remembers."""
    uplink_bytes_per_s: float = math.inf
    """Of every machine; what it sends stands in line there."""


@dataclass(slots=True)
class Voter:
    """One machine: what its disk holds outlives it."""

    node: NodeId
    disk: Stored
    election: Election | None = None
    """None while it is down."""
    paused: bool = False
    asleep: list[Arrived] = field(default_factory=list)
    """What reached it while it was paused; a SIGSTOPped process reads it when it goes on."""
    timer: int = 0


class VotersWorld(Timeline):
    """Runs voters until a second, keeps what they promised, and raises Violation where they break it."""

    def __init__(
        self,
        count: int,
        seed: int,
        weather: Weather | None = None,
        *,
        machine: type[Election] = Election,
        fence: type[Fence] = Fence,
        document_bytes: int = 0,
    ) -> None:
        """`document_bytes`: the document has at least so many."""
        super().__init__()
        self.random = Random(seed)
        self.weather = weather or Weather()
        self.acknowledged: set[int] = set()
        """Writes that a coordinator confirmed to whoever asked for them."""
        self.coordinators: dict[int, NodeId] = {}
        """By term: who was elected, or followed by another."""
        self.elected_s: list[float] = []
        self.faults = 0
        names = [NodeId(f"v{index}") for index in range(count)]
        self.obeying = names[0]
        """A voter that holds stages besides, and takes commands of whoever coordinates."""
        self.peer = fence(voted=lambda: self.voters[self.obeying].disk.term)
        self.obeyed: list[int] = []
        """The terms of the commands it carried out."""
        self.document_bytes = document_bytes
        self.delivered_bytes = 0
        """Of documents."""
        self._uplink_free_s: dict[NodeId, float] = {}
        first = Entry(0, 1, tuple(names), self._document(set()))
        self.voters = {name: Voter(name, Stored(0, None, first)) for name in names}
        self.cut: set[tuple[NodeId, NodeId]] = set()
        """Ways that lead nowhere now, each in one direction."""
        self.lost: set[NodeId] = set()
        """Voters whose disk was lost, until they have a vote again."""
        self.disks_lost = 0
        self._machine = machine
        self._waiting: dict[NodeId, dict[int, int]] = {name: {} for name in names}
        """By coordinator: write → the version that must be committed before it is acknowledged."""
        for name in names:
            self.start(name)

    # what happens to voters

    def start(self, node: NodeId) -> None:
        """From what its disk holds."""
        voter = self.voters[node]
        if voter.election is None:
            voter.election = self._machine(node, voter.disk, self.now_s, self.random.random)
            voter.paused, voter.asleep = False, []
            self._carry_out(voter)

    def crash(self, node: NodeId) -> None:
        voter = self.voters[node]
        voter.election = None
        voter.timer += 1
        self._waiting[node].clear()

    def _restart(self, node: NodeId) -> None:
        self.crash(node)
        self.start(node)

    def lose_disk(self, node: NodeId) -> None:
        """It is started anew with nothing. More than a minority at once would take what they alone held with them."""
        if node in self.lost or 2 * (len(self.lost) + 1) >= len(self.voters):
            return
        self.crash(node)
        self.disks_lost += 1
        self.lost.add(node)
        self.voters[node].disk = Stored(0, None, Entry(0, 0, (), self._document(set())))
        self.start(node)

    def seat(self, count: int) -> None:
        """Nodes that wait to become voters are given the document by whoever coordinates now."""
        learners = frozenset(NodeId(f"l{index}") for index in range(count))
        for name in sorted(learners):
            self.voters[name] = Voter(name, Stored(0, None, Entry(0, 0, (), b"[]")))
            self._waiting[name] = {}
            self.start(name)
        if (leader := self.coordinator()) is not None:
            self._receive(self.voters[leader], Learners(learners))

    def readmit(self) -> None:
        """What a coordinator does about voters that lost their disks: it takes them out, and lets them in anew when
        that has reached them."""
        leader = self.coordinator()
        election = None if leader is None else self.voters[leader].election
        if leader is None or election is None:
            return
        self._receive(self.voters[leader], Learners(frozenset(self.lost)))
        for node in sorted(self.lost):
            entry = election.entry
            others = tuple(other for other in entry.voters if other != node)
            if node in entry.voters and node in election.blank:
                self._receive(self.voters[leader], Propose(entry.document, entry.version, others))
            elif node not in entry.voters and node in election.up_to_date(self.now_s):
                self._receive(self.voters[leader], Propose(entry.document, entry.version, (*others, node)))

    def pause(self, node: NodeId) -> None:
        self.voters[node].paused = True

    def resume(self, node: NodeId) -> None:
        voter = self.voters[node]
        voter.paused = False
        asleep, voter.asleep = voter.asleep, []
        for arrived in asleep:
            self._receive(voter, arrived)
        self._tick(voter, voter.timer)

    def heal(self) -> None:
        """Everything runs and goes on running, and every way is open."""
        self.weather = replace(self.weather, crash_after_write=0.0)
        self.cut.clear()
        for name, voter in self.voters.items():
            if voter.election is None:
                self.start(name)
            elif voter.paused:
                self.resume(name)

    def heal_majority(self) -> None:
        """As many voters as elect run and reach each other. Of the rest each is down, or cut off in one direction: it
        hears the others and is not heard, or speaks to them and hears nothing."""
        able = sorted(set(self.voters) - self.lost)
        core = set(self.random.sample(able, len(self.voters) // 2 + 1))
        apart = {node: self.random.choice(["down", "mute", "deaf"]) for node in self.voters if node not in core}
        self.heal()
        for node, how in apart.items():
            if how == "down":
                self.crash(node)
            self.cut |= {(node, other) if how == "mute" else (other, node) for other in core if how != "down"}

    def write(self, number: int) -> bool:
        """Ask whoever believes to coordinate to add `number` to the document; whether somebody took it."""
        for voter in self.voters.values():
            election = voter.election
            if election is None or voter.paused or not election.coordinates:
                continue
            entry = election.entry
            self._waiting[voter.node][number] = entry.version + 1
            self._command(election.term)
            self._receive(voter, Propose(self._document(_numbers(entry.document) | {number}), entry.version))
            return True
        return False

    def _command(self, term: int) -> None:
        """Tell the peer something; on a bad line it arrives when another may coordinate."""
        self._late(lambda: self._meet(term))

    def _late(self, happens: Callable[[], None]) -> None:
        self.at(self.now_s + self.random.expovariate(1 / LATE_COMMAND_S), happens)

    def _meet(self, term: int) -> None:
        """The peer connects; the command comes after that."""
        with suppress(StaleTerm):
            self.peer.admit(term)
            self._late(lambda: self._obey(term))

    def _obey(self, term: int) -> None:
        try:
            self.peer.check(term)
        except StaleTerm:
            return
        if term < (voted := self.voters[self.obeying].disk.term):
            raise Violation(f"a command of term {term} was carried out by a voter of term {voted}")
        if self.obeyed and term < self.obeyed[-1]:
            raise Violation(f"a command of term {term} was carried out after one of term {self.obeyed[-1]}")
        self.obeyed.append(term)

    # time

    def coordinator(self) -> NodeId | None:
        """The running voter that coordinates, of the latest term."""
        leading = [
            (voter.election.term, name)
            for name, voter in self.voters.items()
            if voter.election is not None and not voter.paused and voter.election.coordinates
        ]
        return max(leading)[1] if leading else None

    # delivery

    def _send(self, sender: NodeId, effect: SendTo) -> None:
        arrived = Arrived(sender, effect.message)
        sent_s = self._leaves_s(sender, effect.message)
        for way_s in self.weather.ways_s(self.random):
            if way_s is None:
                self.faults += 1
            else:
                self.at(sent_s + way_s, lambda: self._deliver(effect.node, arrived))

    def _leaves_s(self, sender: NodeId, message: VoterMessage) -> float:
        """When the last byte is on its way: what was sent before is in front."""
        free_s = max(self.now_s, self._uplink_free_s.get(sender, 0.0))
        free_s += (FRAME_BYTES + _part_bytes(message)) / self.weather.uplink_bytes_per_s
        self._uplink_free_s[sender] = free_s
        return free_s

    def _deliver(self, node: NodeId, arrived: Arrived) -> None:
        voter = self.voters.get(node)
        if voter is None or voter.election is None or (arrived.sender, node) in self.cut:
            return
        self.delivered_bytes += _part_bytes(arrived.message)
        if voter.paused:
            voter.asleep.append(arrived)
        else:
            self._receive(voter, arrived)

    def _receive(self, voter: Voter, message: ElectionInput) -> None:
        if voter.election is not None:
            voter.election.receive(message, self.now_s)
            self._carry_out(voter)

    def _tick(self, voter: Voter, timer: int) -> None:
        if voter.timer != timer or voter.election is None or voter.paused:
            return
        voter.election.handle_timer(self.now_s)
        self._carry_out(voter)

    def _carry_out(self, voter: Voter) -> None:
        election = voter.election
        if election is None:
            return
        for effect in election.outgoing():
            if isinstance(effect, Persist):
                voter.disk = effect.stored
                if voter.node in voter.disk.entry.voters:
                    self.lost.discard(voter.node)
                if self.random.random() < self.weather.crash_after_write:
                    self.at(self.now_s, lambda: self._restart(voter.node))
            else:
                self._send(voter.node, effect)
        for event in election.events():
            self._happened(voter, event)
        voter.timer += 1
        deadline_s, timer = election.next_timer(), voter.timer
        if deadline_s is not None:
            self.at(max(deadline_s, self.now_s), lambda: self._tick(voter, timer))

    def _document(self, numbers: set[int]) -> bytes:
        return json.dumps(sorted(numbers)).encode().ljust(self.document_bytes)

    # promises

    def _happened(self, voter: Voter, event: ElectionEvent) -> None:
        match event:
            case Elected(term=term):
                self._one_coordinator(term, voter.node)
                self.elected_s.append(self.now_s)
            case Following(node=node, term=term):
                self._one_coordinator(term, node)
            case Committed(entry=entry):
                self._committed(voter, entry)
            case SteppedDown() | ProposalRefused():
                self._waiting[voter.node].clear()

    def _one_coordinator(self, term: int, node: NodeId) -> None:
        other = self.coordinators.setdefault(term, node)
        if other != node:
            raise Violation(f"term {term} has two coordinators, {other} and {node}")

    def _committed(self, voter: Voter, entry: Entry) -> None:
        """Nothing that was acknowledged is missing; what this voter coordinates and waited for is acknowledged now."""
        missing = self.acknowledged - _numbers(entry.document)
        election = voter.election
        if missing and election is not None and election.coordinates:
            raise Violation(f"acknowledged writes are lost in {entry.mark} of {voter.node}: {sorted(missing)[:5]}")
        waiting = self._waiting[voter.node]
        for number in [number for number, version in waiting.items() if version <= entry.version]:
            del waiting[number]
            if election is not None and election.coordinates:
                self.acknowledged.add(number)


def _part_bytes(message: VoterMessage) -> int:
    return len(message.part.data) if isinstance(message, Append) and message.part is not None else 0


def _numbers(document: bytes) -> set[int]:
    try:
        return set(json.loads(document))
    except ValueError as error:
        raise Violation(f"a document was put together wrong: {document[:80]!r}") from error


HEAL_S = 90.0
"""Within this of a whole network somebody coordinates: several rounds of split votes and late frames."""
KEPT_S = 20.0
"""Within this a majority has a write: any of its parts may be lost, or late by 8 s."""
FAULTS_EVERY_S = 4.0


def torture(
    seed: int,
    machine: type[Election] = Election,
    *,
    fence: type[Fence] = Fence,
    count: int = 3,
    seconds: float = 120.0,
    faults_every_s: float = FAULTS_EVERY_S,
    weather: Weather | None = None,
    whole: bool = True,
) -> VotersWorld:
    """Random faults and writes, then a whole network, or with `whole` False only a majority that is connected; raises
    Violation, or Stuck where nobody takes office in time."""
    world = VotersWorld(count, seed, weather, machine=machine, fence=fence)
    numbers = itertools.count(1)
    at_s = world.random.expovariate(1 / faults_every_s)
    while at_s < seconds:
        world.at(at_s, lambda: _fault(world))
        world.at(at_s + world.random.random() * faults_every_s, lambda: _write(world, next(numbers)))
        at_s += world.random.expovariate(1 / faults_every_s)
    world.run_until(seconds)
    if whole:
        world.heal()
        for after_s in range(int(HEAL_S)):
            world.at(seconds + after_s, world.readmit)
    else:
        world.heal_majority()
    world.run_until(seconds + HEAL_S)
    if whole and world.lost:
        raise Stuck(f"{sorted(world.lost)} lost their disks and have no vote {HEAL_S:.0f} s after the network is whole")
    last = next(numbers)
    if not world.write(last):
        raise Stuck(f"nobody coordinates {HEAL_S:.0f} s after a majority is connected")
    world.run_until(seconds + HEAL_S + KEPT_S)
    if last not in world.acknowledged:
        raise Stuck("a write was not acknowledged while a majority is connected")
    return world


def _write(world: VotersWorld, number: int) -> None:
    """Whoever asks does not mind if nobody coordinates just now."""
    world.write(number)


def _fault(world: VotersWorld) -> None:
    """One thing goes wrong, or right again."""
    world.faults += 1
    node, other = world.random.sample(list(world.voters), 2)
    voter = world.voters[node]
    world.readmit()
    match world.random.randrange(7):
        case 0:
            world.crash(node)
        case 1:
            world.start(node)
        case 2 if voter.election is not None:
            world.pause(node)
        case 3 if voter.paused:
            world.resume(node)
        case 4:
            world.cut.add((node, other))
        case 5:
            world.lose_disk(node)
        case _:
            world.cut.clear()
