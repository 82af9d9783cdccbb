"""One document on a few voters: Raft over the whole document, with PreVote and CheckQuorum.

Raft's log is one entry here, the latest: every version of the document holds all earlier changes, so a voter that has
it lacks nothing (Ongaro and Ousterhout 2014, sections 5 and 9.6 of the dissertation for PreVote; CheckQuorum as in
etcd). Terms and versions order entries as a log's terms and indices would. `now` must be a clock that goes on while the
machine sleeps (CLOCK_BOOTTIME): a laptop that wakes up as coordinator steps down before it does anything else.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING

from swarmnode.cluster.election_messages import (
    NOTHING,
    Append,
    Appended,
    Arrived,
    AskVote,
    Committed,
    Effect,
    Elected,
    ElectionEvent,
    ElectionInput,
    Entry,
    Following,
    ForceAlone,
    Learners,
    Mark,
    Part,
    Persist,
    ProposalRefused,
    Propose,
    SendTo,
    SteppedDown,
    Stored,
    VoteAnswer,
    VoterMessage,
)
from swarmnode.cluster.entry_parts import MAX_UNDER_WAY, PART_BYTES, Inbound, Outbound
from swarmnode.machine import drain

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarmnode.ids import NodeId

HEARTBEAT_S = 1.0
"""Ten times a long way round the world."""
ELECTION_MIN_S, ELECTION_MAX_S = 5.0, 10.0
"""A voter that hears nothing asks for votes after a time between these; nobody is voted for before the first."""
RETRY_MIN_S, RETRY_MAX_S = 1.5, 3.0
"""After asking for nothing: an answer takes far less, so it was lost, or two asked at once."""
QUORUM_S = 5.0
"""A coordinator that has not heard a majority for so long stops being one; others may have elected by then."""
FORCED_TERMS = 1 << 20
"""What a forced promotion skips: a coordinator that was not gone after all, and knows of none other, would reach the
next term by itself, and one term must not have two."""


class Role(Enum):
    FOLLOWER = "follower"
    ASKING = "asking"
    """Gathers pre-votes."""
    CANDIDATE = "candidate"
    COORDINATOR = "coordinator"


class Election:
    """A `Machine[ElectionInput, Effect, ElectionEvent]`. Carry out effects in order, and events after them.

    A node whose own entry does not name it gives no vote. One without any entry that is told it were a voter has lost
    its disk: it may have promised otherwise, and held what nobody else does, so it takes no part until its removal
    reached it, and another entry lets it in anew.
    """

    part_bytes = PART_BYTES
    max_under_way = MAX_UNDER_WAY

    def __init__(self, node: NodeId, stored: Stored, now: float, draw: Callable[[], float]) -> None:
        """`draw` gives numbers from 0 to 1: voters that time out together would split the votes for ever."""
        self.node = node
        self.role = Role.FOLLOWER
        self.coordinator: NodeId | None = None
        self.committed: Mark = (0, 0)
        self._stored = stored
        self._draw = draw
        self._granted: set[NodeId] = set()
        self._heard_s: dict[NodeId, float] = {}
        """When each voter last answered this coordinator."""
        self._held: dict[NodeId, Mark] = {}
        """What each voter is known to have on disk."""
        self._outbound: dict[NodeId, Outbound] = {}
        self._beats = 0
        self._inbound = Inbound()
        self._learners: frozenset[NodeId] = frozenset()
        """They are given every entry, and count for nothing."""
        self._coordinator_s: float | None = None
        """When the coordinator was last heard."""
        self._heartbeat_s = now
        self._election_s = now if self._alone else self._next_election_s(now)
        self._announced: tuple[NodeId, int] | None = None
        self._effects: list[Effect] = []
        self._events: list[ElectionEvent] = []

    # the contract

    def receive(self, message: ElectionInput, now: float) -> None:
        self._check_quorum(now)
        match message:
            case Propose():
                self._propose(message, now)
            case ForceAlone():
                self._force_alone(now)
            case Learners():
                self._learners = message.nodes
                self._drop_others()
            case Arrived(sender=sender, message=inner):
                self._arrived(sender, inner, now)

    def handle_timer(self, now: float) -> None:
        self._check_quorum(now)
        if self.role is Role.COORDINATOR:
            if now >= self._heartbeat_s:
                self._send_heartbeats(now)
        elif now >= self._election_s:
            self._ask(now)

    def next_timer(self) -> float | None:
        if self.role is not Role.COORDINATOR:
            return self._election_s if self.node in self.voters else None
        return min(self._heartbeat_s, self._quorum_ends_s())

    def outgoing(self) -> list[Effect]:
        return drain(self._effects)

    def events(self) -> list[ElectionEvent]:
        return drain(self._events)

    # what it knows

    @property
    def term(self) -> int:
        return self._stored.term

    @property
    def entry(self) -> Entry:
        """The latest version here, committed or not."""
        return self._stored.entry

    @property
    def voters(self) -> tuple[NodeId, ...]:
        return self._stored.entry.voters

    @property
    def coordinates(self) -> bool:
        """A majority holds an entry of this voter's own term: what it says goes."""
        return self.role is Role.COORDINATOR and self.committed[0] == self.term

    def coordinates_at(self, now: float) -> bool:
        """The same, before the timer came that looks at the time: a machine that slept may have a successor."""
        return self.coordinates and now < self._quorum_ends_s()

    def up_to_date(self, now: float) -> frozenset[NodeId]:
        """The nodes that answered this coordinator a moment ago, and hold all that it holds."""
        return frozenset(
            node
            for node, heard_s in self._heard_s.items()
            if now - heard_s < QUORUM_S and self._held.get(node) == self.entry.mark
        )

    def answering(self, now: float) -> frozenset[NodeId]:
        """The nodes that answered this coordinator, and did so a moment ago."""
        return frozenset(node for node in self._held if now - self._heard_s.get(node, -QUORUM_S) < QUORUM_S)

    @property
    def blank(self) -> frozenset[NodeId]:
        """The nodes that answered this coordinator that they hold nothing at all."""
        return frozenset(node for node, mark in self._held.items() if mark == NOTHING)

    @property
    def _has_vote(self) -> bool:
        return self.node in self.voters

    @property
    def _alone(self) -> bool:
        return self.voters == (self.node,)

    @property
    def _others(self) -> list[NodeId]:
        return [voter for voter in self.voters if voter != self.node]

    @property
    def _receivers(self) -> list[NodeId]:
        return [*self._others, *sorted(self._learners - {self.node, *self.voters})]

    def _is_majority(self, nodes: set[NodeId]) -> bool:
        return 2 * len(nodes & set(self.voters)) > len(self.voters)

    # messages

    def _arrived(self, sender: NodeId, message: VoterMessage, now: float) -> None:
        if isinstance(message, AskVote):
            if self._has_vote:
                self._asked(sender, message, now)
            return
        if isinstance(message, Append) and self._has_lost_disk(message):
            self._send(sender, Appended(message.term, NOTHING, message.number))
            return
        if message.term > self.term and not (isinstance(message, VoteAnswer) and message.granted):
            self._follow(message.term, now, f"term {message.term} has begun")
        if self._is_stale(message):
            if isinstance(message, Append):
                self._send(sender, Appended(self.term, self.entry.mark, message.number))
            return
        match message:
            case Append():
                self._append(sender, message, now)
            case VoteAnswer():
                self._vote_answered(sender, message, now)
            case Appended():
                self._appended(sender, message, now)

    def _has_lost_disk(self, append: Append) -> bool:
        return not self.voters and append.part is not None and self.node in append.part.voters

    def _is_stale(self, message: VoterMessage) -> bool:
        return message.term < self.term

    def _asked(self, sender: NodeId, ask: AskVote, now: float) -> None:
        if self._knows_coordinator(now):
            return  # a voter that hears nobody is its own trouble, while a majority hears the coordinator
        if ask.pre:
            granted = ask.term > self.term and self._up_to_date(ask)
            self._send(sender, VoteAnswer(ask.term if granted else self.term, granted, pre=True))
            return
        if ask.term > self.term:
            self._follow(ask.term, now, f"term {ask.term} has begun")
        granted = ask.term == self.term and self._stored.vote in (None, sender) and self._up_to_date(ask)
        if granted:
            self._store(replace(self._stored, vote=sender))
            self._election_s = self._next_election_s(now)
        self._send(sender, VoteAnswer(self.term, granted, pre=False))

    def _up_to_date(self, ask: AskVote) -> bool:
        """Who lacks what this voter has may lack what a majority has, and must not coordinate."""
        return ask.last >= self.entry.mark

    def _knows_coordinator(self, now: float) -> bool:
        if self.role is Role.COORDINATOR:
            return True
        return self._coordinator_s is not None and now - self._coordinator_s < ELECTION_MIN_S

    def _vote_answered(self, sender: NodeId, answer: VoteAnswer, now: float) -> None:
        wanted = (Role.ASKING, self.term + 1) if answer.pre else (Role.CANDIDATE, self.term)
        if not answer.granted or (self.role, answer.term) != wanted:
            return
        self._granted.add(sender)
        self._count_votes(now)

    def _append(self, sender: NodeId, append: Append, now: float) -> None:
        self._coordinator_s = now
        self._election_s = self._next_election_s(now)
        if self.role is not Role.COORDINATOR:
            self.role = Role.FOLLOWER
        self.coordinator = sender
        if self._announced != (sender, self.term):
            self._announced = (sender, self.term)
            self._events.append(Following(sender, self.term))
        if append.part is not None and append.mark > self.entry.mark:
            entry = self._inbound.take(append.mark, append.part)
            if entry is not None:
                self._store(replace(self._stored, entry=entry))
        if append.committed == self.entry.mark and append.committed > self.committed:
            self._commit(append.committed)
        have_bytes = self._inbound.have_bytes(append.mark)
        self._send(sender, Appended(self.term, self.entry.mark, append.number, have_bytes))

    def _appended(self, sender: NodeId, answer: Appended, now: float) -> None:
        if self.role is not Role.COORDINATOR:
            return
        if answer.mark == NOTHING:
            self._held[sender] = NOTHING
        else:
            self._heard_s[sender] = now
            self._held[sender] = max(answer.mark, self._held.get(sender, answer.mark))
            self._count_copies()
        if sender in self._receivers and (outbound := self._outbound_to(sender)) is not None:
            outbound.answered(answer)
        self._send_parts(now)

    # elections

    def _ask(self, now: float) -> None:
        """Hold a pre-vote; until it is won nothing changed, here or elsewhere."""
        if not self._has_vote:
            return
        self.role, self.coordinator = Role.ASKING, None
        self._granted = {self.node}
        self._election_s = self._next_retry_s(now)
        for voter in self._others:
            self._send(voter, AskVote(self.term + 1, self.entry.mark, pre=True))
        self._count_votes(now)

    def _count_votes(self, now: float) -> None:
        if not self._is_majority(self._granted):
            return
        if self.role is Role.ASKING:
            self._stand(now)
        elif self.role is Role.CANDIDATE:
            self._take_office(now)

    def _stand(self, now: float) -> None:
        self.role = Role.CANDIDATE
        self._granted = {self.node}
        self._store(replace(self._stored, term=self.term + 1, vote=self.node))
        self._election_s = self._next_retry_s(now)
        for voter in self._others:
            self._send(voter, AskVote(self.term, self.entry.mark, pre=False))
        self._count_votes(now)

    def _take_office(self, now: float) -> None:
        """First an entry of the new term: only by that are those of earlier terms known to be safe (Raft, figure 8)."""
        self.role, self.coordinator = Role.COORDINATOR, self.node
        self._heard_s = dict.fromkeys(self._others, now)
        self._held, self._outbound = {}, {}
        self._write(self.entry.document, self.voters, now)

    def _follow(self, term: int, now: float, why: str) -> None:
        """Another term has begun."""
        self._step_down(why)
        self._inbound.forget()
        self._coordinator_s = None
        self._store(Stored(term, None, self.entry))
        self._election_s = self._next_election_s(now)

    def _step_down(self, why: str) -> None:
        if self.role is Role.COORDINATOR:
            self._events.append(SteppedDown(self.term, why))
        self.role, self.coordinator = Role.FOLLOWER, None

    def _force_alone(self, now: float) -> None:
        self._follow(self.term + FORCED_TERMS, now, "it was told to go on alone")
        self._store(replace(self._stored, vote=self.node, entry=replace(self.entry, voters=(self.node,))))
        self._take_office(now)

    # the coordinator

    def _propose(self, proposal: Propose, now: float) -> None:
        why = self._why_not(proposal)
        if why is not None:
            self._events.append(ProposalRefused(proposal.expected, self.entry.version, why))
            return
        self._write(proposal.document, proposal.voters or self.voters, now)

    def _why_not(self, proposal: Propose) -> str | None:
        if not self.coordinates:
            return "this node does not coordinate the swarm now"
        if proposal.expected != self.entry.version:
            return f"the swarm's document has changed: it is at version {self.entry.version}"
        if proposal.voters is not None:
            changed = set(proposal.voters) ^ set(self.voters)
            if (len(changed) > 1 and not self._alone) or self.node not in proposal.voters:
                return "voters come and go one at a time, and the coordinator stays one"
            if self.committed != self.entry.mark:
                return "the last change is not on a majority of the voters yet"
        return None

    def _write(self, document: bytes, voters: tuple[NodeId, ...], now: float) -> None:
        self._store(replace(self._stored, entry=Entry(self.term, self.entry.version + 1, voters, document)))
        self._drop_others()
        for voter in self._others:
            self._heard_s.setdefault(voter, now)
        self._heartbeat_s = now
        self._send_heartbeats(now)
        self._count_copies()

    def _send_heartbeats(self, now: float) -> None:
        self._heartbeat_s = now + HEARTBEAT_S
        for node in self._receivers:
            self._beat(node, self._next_part(node, now))

    def _send_parts(self, now: float) -> None:
        """To whom one is due, voters first, while there is room on the line."""
        for node in self._receivers:
            if (part := self._next_part(node, now)) is not None:
                self._beat(node, part)

    def _next_part(self, node: NodeId, now: float) -> Part | None:
        """That is due there, if there is room on the line; the next beat carries it, and its answer tells where to go
        on."""
        outbound = self._outbound_to(node)
        if outbound is None or not outbound.is_due:
            return None
        under_way = sum(other.is_under_way(now) for other in self._outbound.values())
        return outbound.send(self._beats + 1, self.part_bytes, now) if under_way < self.max_under_way else None

    def _drop_others(self) -> None:
        """What is under way to nodes that are given nothing any more: one that comes back is given what is new then."""
        receivers = self._receivers
        self._outbound = {node: outbound for node, outbound in self._outbound.items() if node in receivers}

    def _outbound_to(self, node: NodeId) -> Outbound | None:
        """What is to be sent there, if anything is."""
        held, outbound = self._held.get(node), self._outbound.get(node)
        if held == self.entry.mark:
            self._outbound.pop(node, None)
            return None
        if outbound is None:
            outbound = self._outbound[node] = Outbound(self.entry)
        elif outbound.entry.mark != self.entry.mark:
            arrives = outbound.has_begun and (held is None or held < outbound.entry.mark)
            if not arrives:
                outbound.replace(self.entry)
        return outbound

    def _beat(self, node: NodeId, part: Part | None) -> None:
        self._beats += 1
        outbound = self._outbound.get(node)
        mark = self.entry.mark if outbound is None else outbound.entry.mark
        self._send(node, Append(self.term, mark, self.committed, part, self._beats))

    def _count_copies(self) -> None:
        """Only an entry of this term is committed by counting; it carries all earlier ones with it."""
        have = {voter for voter, mark in self._held.items() if mark >= self.entry.mark}
        if self.committed < self.entry.mark and self._is_safe_with(have | {self.node}):
            first = self.committed[0] != self.term
            self._commit(self.entry.mark)
            if first:
                self._events.append(Elected(self.term))

    def _is_safe_with(self, holders: set[NodeId]) -> bool:
        return self._is_majority(holders)

    def _commit(self, mark: Mark) -> None:
        self.committed = mark
        self._events.append(Committed(self.entry))

    def _check_quorum(self, now: float) -> None:
        """Before anything else: a coordinator that slept, or was cut off, must not act on what it knew then."""
        if self.role is Role.COORDINATOR and now >= self._quorum_ends_s():
            self._step_down(f"no majority of the voters answered for {QUORUM_S:.0f} s")
            self._election_s = self._next_election_s(now)

    def _quorum_ends_s(self) -> float:
        """When the last majority that answered becomes too old."""
        heard = sorted((self._heard_s.get(voter, 0.0) for voter in self._others), reverse=True)
        needed = len(self.voters) // 2
        return heard[needed - 1] + QUORUM_S if needed else float("inf")

    # effects

    def _store(self, stored: Stored) -> None:
        self._stored = stored
        self._effects.append(Persist(stored))

    def _send(self, node: NodeId, message: VoterMessage) -> None:
        self._effects.append(SendTo(node, message))

    def _next_election_s(self, now: float) -> float:
        return now + ELECTION_MIN_S + self._draw() * (ELECTION_MAX_S - ELECTION_MIN_S)

    def _next_retry_s(self, now: float) -> float:
        return now + RETRY_MIN_S + self._draw() * (RETRY_MAX_S - RETRY_MIN_S)
