"""A voter: joins an `Election` to its disk, to the other voters, and to whoever changes the swarm's document."""

from __future__ import annotations

import copy
import logging
import random
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from swarmnode.cluster.election import QUORUM_S, Election
from swarmnode.cluster.election_messages import (
    Append,
    Appended,
    Arrived,
    AskVote,
    ElectionInput,
    Learners,
    Persist,
    ProposalRefused,
    Propose,
    VoteAnswer,
)
from swarmnode.errors import Conflict, NoSpace, NotCoordinator, ProtocolError
from swarmnode.roles.voter_links import VoterLinks
from swarmnode.wire.nursery import open_flat_nursery

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from swarmnode.cluster.election_messages import ElectionEvent, Entry, VoterMessage
    from swarmnode.errors import NodeRemoved
    from swarmnode.ids import NodeId
    from swarmnode.roles.ballot import Ballot
    from swarmnode.wire.dialing import Way
    from swarmnode.wire.link import Channel, Hello, Identity

WRITE_S = 2 * QUORUM_S
"""A coordinator that has no majority has stepped down by then, unless it is still sending."""
LINE_BYTES_PER_S = 100_000
"""What a line of 1 Mbit/s brings of a document beside beats and frames' own bytes, to all voters together."""
DISK_RETRY_S = 1.0

_log = logging.getLogger(__name__)


def boot_s() -> float:
    """Seconds of a clock that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def longest_write_s(document_bytes: int, others: int) -> float:
    """How long a coordinator that has its majority may take until enough of the other voters hold a document: at worst
    it is sent to all of them before."""
    return WRITE_S + others * document_bytes / LINE_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class Caller:
    """Who dialled, as its HELLO says, and the address its packets came from; none where a tunnel brought them."""

    identity: Identity
    source: str


class Voting:
    """`run` it. Every input is carried out whole, its writes to disk first, before the next one is looked at.

    An input whose write fails is as one that never came: what it would have changed is not on disk and was told nobody.
    """

    def __init__(
        self,
        node: NodeId,
        ballot: Ballot,
        ways: Callable[[NodeId, Sequence[str]], Sequence[Way[Channel]]],
        places_in: Callable[[bytes], Mapping[NodeId, tuple[str, ...]]],
        removed: Callable[[NodeRemoved], None],
        *,
        begins: bool,
        clock: Callable[[], float] = boot_s,
    ) -> None:
        """`begins`: where nothing is kept yet, a swarm begins with this node as its only voter. `places_in` reads from
        a document where its voters, and those that may become one, are reached. `removed` hears where another voter
        refuses this node for good: it would wait for the others for ever, and nobody would know why."""
        self.node = node
        self._ballot = ballot
        self._clock = clock
        self._places_in = places_in
        stored = ballot.read((node,) if begins else ())
        self._election = Election(node, stored, clock(), random.Random().random)
        self._links = VoterLinks(ways, self._arrived, removed)
        self.callers: dict[NodeId, Caller] = {}
        """The nodes that may coordinate, too, and have dialled this one; a voter that moved is known by it alone."""
        self._one_at_a_time = trio.Lock()
        self._changed = trio.Event()
        self._seated: frozenset[NodeId] = frozenset()
        self._read: bytes | None = None
        self._places: Mapping[NodeId, tuple[str, ...]] = {}
        """What was read of the document: it is looked at after every message, and seldom changes."""

    # what is known

    @property
    def entry(self) -> Entry:
        return self._election.entry

    @property
    def term(self) -> int:
        return self._election.term

    @property
    def coordinates(self) -> bool:
        """By the clock, too: false from the first moment after a machine slept for too long."""
        return self._election.coordinates_at(self._clock())

    @property
    def coordinator(self) -> NodeId | None:
        """Who coordinates, as far as this voter knows."""
        return self._election.coordinator

    @property
    def up_to_date(self) -> frozenset[NodeId]:
        """The nodes that hold this coordinator's document and answered a moment ago."""
        return self._election.up_to_date(self._clock())

    @property
    def connected(self) -> frozenset[NodeId]:
        """The nodes whose link from this coordinator is up, and that answered on it a moment ago; not this one."""
        return self._links.up & self._election.answering(self._clock())

    @property
    def blank(self) -> frozenset[NodeId]:
        """The nodes that told this coordinator that they hold nothing."""
        return self._election.blank

    async def changed(self) -> None:
        """Wait until anything of that may be different."""
        await self._changed.wait()

    # what it is told

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with open_flat_nursery() as nursery:
            await nursery.start(self._links.run)
            self._follow_document()
            task_status.started()
            while True:
                await self._sleep_until_due()
                try:
                    await self._carry_out(None)
                except NoSpace as error:
                    _log.error("%s", error)
                    await trio.sleep(DISK_RETRY_S)

    async def _sleep_until_due(self) -> None:
        """The timer is of another clock than trio's: after the machine slept it is looked at once more."""
        changed, due_s = self._changed, self._election.next_timer()
        if due_s is None:
            await changed.wait()
        elif (wait_s := due_s - self._clock()) > 0:
            with trio.move_on_after(wait_s):
                await changed.wait()

    async def write(self, document: bytes, expected: int, voters: tuple[NodeId, ...] | None = None) -> None:
        """Make `document` the next version after `expected`, and wait until a majority of the voters has it on disk.

        Raises Conflict where another version came first, NoSpace where this disk does not take it, and NotCoordinator
        where this node does not coordinate (any more): then it may be kept or not, as the next coordinator knows.
        """
        events = await self._carry_out(Propose(document, expected, voters))
        if refused := next((event for event in events if isinstance(event, ProposalRefused)), None):
            raise (Conflict if self.coordinates else NotCoordinator)(refused.why)
        mark = (self.term, expected + 1)
        with trio.move_on_after(longest_write_s(len(document), len(self._election.voters) - 1)):
            while self._election.committed < mark and self.term == mark[0] and self.coordinates:
                await self._changed.wait()
        if self.term != mark[0] or self._election.committed < mark:
            raise NotCoordinator(
                "no majority of the voters took the change in time, so another one may coordinate now; whether it is "
                "kept shows there"
            )

    async def seat(self, nodes: frozenset[NodeId]) -> None:
        """These nodes are given the document, whether they vote or not."""
        if nodes != self._seated:
            self._seated = nodes
            await self._carry_out(Learners(nodes))

    async def serve(self, hello: Hello, channel: Channel) -> None:
        """A `votes` channel of another node, which must be certified to coordinate: it holds the swarm's key."""
        certified = channel.certified
        if certified is not None and "coordinator" not in certified.roles:
            raise ProtocolError(f"node {certified.node:.8} is not certified to coordinate")
        caller = Caller(hello.identity, channel.direct_source)
        self.callers[hello.identity.node] = caller
        try:
            await self._links.serve(hello.identity.node, channel)
        finally:
            if self.callers.get(hello.identity.node) is caller:
                del self.callers[hello.identity.node]

    async def _arrived(self, sender: NodeId, message: VoterMessage) -> None:
        with suppress(NoSpace):  # then it is not answered, as if it were lost
            await self._carry_out(Arrived(sender, message))

    # carrying out

    async def _carry_out(self, message: ElectionInput | None) -> list[ElectionEvent]:
        """Give the election a message (None: the time) and do what it says; a cancelled caller stops nothing."""
        events: list[ElectionEvent] = []
        with trio.CancelScope(shield=True):
            async with self._one_at_a_time:
                before = copy.deepcopy(self._election)
                try:
                    await self._give(message)
                except OSError as error:
                    self._election = before
                    raise NoSpace(f"the swarm's document cannot be written: {error}") from error
                events = self._election.events()
                self._follow_document()
                self._changed.set()
                self._changed = trio.Event()
        return events

    async def _give(self, message: ElectionInput | None) -> None:
        if message is None:
            self._election.handle_timer(self._clock())
        else:
            self._election.receive(message, self._clock())
        for effect in self._election.outgoing():
            if isinstance(effect, Persist):
                await trio.to_thread.run_sync(self._ballot.write, effect.stored)
            else:
                self._send(effect.node, effect.message)

    def _send(self, node: NodeId, message: VoterMessage) -> None:
        match message:
            case AskVote() | Append():
                self._links.post(node, message)
            case VoteAnswer() | Appended():
                self._links.answer(node, message)

    def _follow_document(self) -> None:
        """Links to the other voters, and a coordinator's to all that are seated."""
        election = self._election
        wanted = set(election.voters) if self.node in election.voters else set()
        if election.coordinator == self.node:
            wanted |= self._seated
        if self._read is not election.entry.document:
            self._read, self._places = election.entry.document, self._places_in(election.entry.document)
        self._links.follow({node: self._places[node] for node in wanted - {self.node} if node in self._places})
