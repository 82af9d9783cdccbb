"""Voters on virtual time, over links in memory and with real files: elections, writes, disks that are full, sleep."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
from contexts import never_removed

from swarmnode.cluster.election import ELECTION_MAX_S, QUORUM_S
from swarmnode.cluster.node_book import NodeRecord
from swarmnode.cluster.voter_book import Seated
from swarmnode.errors import Conflict, NoSpace, NotCoordinator
from swarmnode.ids import BootId, NodeId
from swarmnode.roles.ballot import Ballot
from swarmnode.roles.seats import Seats
from swarmnode.roles.swarm_document import SwarmDocument, decode_document
from swarmnode.roles.swarm_state import SwarmState
from swarmnode.roles.voting import WRITE_S, Voting
from swarmnode.wire.address import Address
from swarmnode.wire.dialing import Way
from swarmnode.wire.limits import MAX_DOCUMENT_BYTES
from swarmnode.wire.link import Identity, LinkOptions
from swarmnode.wire.memory import MemoryNetwork
from swarmnode.wire.routes import DIRECT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from swarmnode.cluster.node_book import NodeBook
    from swarmnode.cluster.voter_book import VoterBook
    from swarmnode.wire.link import Channel, Hello

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
PLACES = {node: (f"127.0.0.1:{port}",) for node, port in ((A, 1), (B, 2), (C, 3))}
SOON_S = 3.0


@dataclass
class Machine:
    """A voter's process, which may be killed and started anew on its disk."""

    node: NodeId
    network: MemoryNetwork
    folder: Path
    asleep_s: float = 0.0
    """What its clock went on while it slept."""
    moved_to: int | None = None
    """Another port than the others look for it at."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    def __post_init__(self) -> None:
        self.identity = Identity(self.node, BootId("b"), self.node, ("coordinator", "peer"))
        self.voting = self._voting()

    def _voting(self) -> Voting:
        ballot = Ballot(self.folder / f"{self.node}.json")
        return Voting(
            self.node,
            ballot,
            self._ways,
            lambda document: PLACES if document else {},
            never_removed,
            begins=self.node == A,
            clock=lambda: trio.current_time() + self.asleep_s,
        )

    def _ways(self, node: NodeId, places: Sequence[str]) -> list[Way[Channel]]:
        at = Address("127.0.0.1", int(places[0].rpartition(":")[2]))
        dial = partial(self.network.dial, at, "votes", self.identity, LinkOptions(node=node))
        return [Way(DIRECT, dial, places[0])]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async def serve(_: str, hello: Hello, channel: Channel) -> None:
            await self.voting.serve(hello, channel)

        with self.scope:
            async with trio.open_nursery() as nursery:
                port = self.moved_to or int(PLACES[self.node][0].rpartition(":")[2])
                await nursery.start(self.network.listen, Address("127.0.0.1", port), serve, self.identity)
                await nursery.start(self.voting.run)
                task_status.started()

    async def restart(self, nursery: trio.Nursery) -> None:
        self.scope.cancel()
        await trio.sleep(0.1)
        self.scope = trio.CancelScope()
        self.voting = self._voting()
        await nursery.start(self.run)


async def until(holds: Callable[[], bool], what: str) -> None:
    with trio.move_on_after(2 * ELECTION_MAX_S) as waiting:
        while not holds():  # noqa: ASYNC110 - several machines' own tasks
            await trio.sleep(0.05)
    assert not waiting.cancelled_caught, what


@pytest.fixture
def network(writes_in_place: None) -> MemoryNetwork:
    return MemoryNetwork(latency_s=0.02)


async def three(network: MemoryNetwork, folder: Path, nursery: trio.Nursery) -> dict[NodeId, Machine]:
    """A begins alone, B and C are given the document, and then all three vote."""
    machines = {node: Machine(node, network, folder) for node in (A, B, C)}
    for machine in machines.values():
        await nursery.start(machine.run)
    first = machines[A].voting
    await until(lambda: first.coordinates, "A coordinates")
    await first.write(b"{}", first.entry.version)
    await first.seat(frozenset({A, B, C}))
    await until(lambda: first.up_to_date == {B, C}, "B and C hold the document")
    await first.write(b"{}", first.entry.version, (A, B, C))
    return machines


@pytest.fixture
async def machines(network: MemoryNetwork, tmp_path: Path, nursery: trio.Nursery) -> dict[NodeId, Machine]:
    """All three vote, until the test ends. That takes seconds: whoever uses this wants `autojump_clock`, too."""
    return await three(network, tmp_path, nursery)


async def test_what_was_acknowledged_outlives_the_coordinator(
    machines: dict[NodeId, Machine], autojump_clock: object, nursery: trio.Nursery
) -> None:
    first = machines[A].voting
    await first.write(b'{"kept":1}', first.entry.version)
    machines[A].scope.cancel()
    rest = [machines[B].voting, machines[C].voting]
    await until(lambda: any(voting.coordinates for voting in rest), "another coordinates")
    (second,) = [voting for voting in rest if voting.coordinates]
    assert second.entry.document == b'{"kept":1}'
    with pytest.raises(Conflict):
        await second.write(b"{}", second.entry.version - 1)
    await second.write(b'{"kept":2}', second.entry.version)
    await machines[A].restart(nursery)
    again = machines[A].voting
    await until(lambda: again.entry.document == b'{"kept":2}', "the old one follows")
    assert not again.coordinates
    assert again.coordinator == second.node
    with pytest.raises(NotCoordinator):
        await again.write(b"{}", again.entry.version)


async def test_a_document_that_takes_long_to_send_is_written_by_a_coordinator_that_stays_one(
    writes_in_place: None, tmp_path: Path, autojump_clock: object
) -> None:
    """Far longer than a coordinator does without a majority, and than a small change is waited for."""
    async with trio.open_nursery() as nursery:
        machines = await three(MemoryNetwork(latency_s=0.3), tmp_path, nursery)
        first = machines[A].voting
        term, document, began_s = first.term, json.dumps("x" * (MAX_DOCUMENT_BYTES - 2)).encode(), trio.current_time()
        await first.write(document, first.entry.version)
        assert trio.current_time() - began_s > 2 * WRITE_S
        await until(lambda: first.up_to_date == {B, C}, "both have it")
        assert (first.coordinates, first.term) == (True, term)
        assert machines[B].voting.entry.document == document
        nursery.cancel_scope.cancel()


async def test_a_voter_without_which_no_majority_is_connected_stays(
    machines: dict[NodeId, Machine], autojump_clock: object
) -> None:
    """C is killed: then B may not go, while C may."""
    first = machines[A].voting
    records = {node: NodeRecord(node, f"node {node}", math.inf) for node in (B, C)}
    await first.write(SwarmDocument().encode(), first.entry.version)
    state = SwarmState(first)

    def edit(book: VoterBook, _: NodeBook) -> None:
        for node in (A, B, C):
            book.seat(Seated(node, f"node {node}", PLACES[node]))

    await state.change_seats(edit)
    unused: Any = None
    me = Seated(A, "node a", PLACES[A])
    seats = Seats(me, state, first, unused, unused, admits=True, emit=unused, told=unused)
    await until(lambda: first.connected == {B, C}, "both are connected")
    seats.check_leaving(records[B])
    machines[C].scope.cancel()
    await until(lambda: first.connected == {B}, "C is away")
    with pytest.raises(Conflict, match=r"without node b .* away are node c\. Start them again, or remove them"):
        seats.check_leaving(records[B])
    seats.check_leaving(records[C])
    assert [(link["name"], link["up"]) for link in seats.voter_links()] == [("node b", True), ("node c", False)]


async def test_a_change_that_nobody_waits_for_any_more_is_not_undone_by_the_next(
    machines: dict[NodeId, Machine], autojump_clock: object, network: MemoryNetwork
) -> None:
    first = machines[A].voting
    await first.write(SwarmDocument().encode(), first.entry.version)
    state, ring = SwarmState(first), {"ring": "r"}
    with trio.move_on_after(network.latency_s / 2) as waiting:
        await state.keep_rings([ring])
    assert waiting.cancelled_caught, "its caller left before the others had answered"
    await state.change_seats(lambda book, _: book.seat(Seated(A, "node a", PLACES[A])))
    assert (decode_document(first.entry.document).rings, state.rings) == ((ring,), (ring,))


async def test_without_a_majority_a_write_ends_unacknowledged(
    machines: dict[NodeId, Machine], autojump_clock: object
) -> None:
    first = machines[A].voting
    for node in (B, C):
        machines[node].scope.cancel()
    began_s = trio.current_time()
    with pytest.raises(NotCoordinator, match="majority"):
        await first.write(b'{"lost":1}', first.entry.version)
    assert trio.current_time() - began_s <= QUORUM_S + SOON_S
    assert not first.coordinates


async def test_two_voters_that_moved_at_once_and_the_third_make_a_majority_again(
    machines: dict[NodeId, Machine], autojump_clock: object, nursery: trio.Nursery
) -> None:
    """The third is who has the latest entry, so that only it can be elected, and it reaches neither of them itself."""
    first = machines[A].voting
    for node in (B, C):
        machines[node].scope.cancel()
    with pytest.raises(NotCoordinator):
        await first.write(b'{"newer":1}', first.entry.version)
    for node, port in ((B, 12), (C, 13)):
        machines[node].moved_to = port
        await machines[node].restart(nursery)
    await until(lambda: first.coordinates, "the third is elected")
    await first.write(b'{"kept":1}', first.entry.version)
    await until(lambda: first.up_to_date == {B, C}, "both hold it")
    term, ends_s = first.term, trio.current_time() + 4 * QUORUM_S
    while trio.current_time() < ends_s:
        assert (first.coordinates, first.term) == (True, term), "it stays so"
        await trio.sleep(0.1)


async def test_a_coordinator_that_slept_is_none_before_it_does_anything(
    machines: dict[NodeId, Machine], autojump_clock: object
) -> None:
    assert machines[A].voting.coordinates
    machines[A].asleep_s = 3600.0
    assert not machines[A].voting.coordinates
    with pytest.raises(NotCoordinator):
        await machines[A].voting.write(b'{"stale":1}', machines[A].voting.entry.version)


def test_a_voters_clock_goes_on_while_its_machine_sleeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unused: Any = None
    voting = Voting(A, Ballot(tmp_path / "a.json"), unused, lambda _: {}, never_removed, begins=True)
    clocks = {time.CLOCK_BOOTTIME: 3600.0}
    monkeypatch.setattr(time, "clock_gettime", clocks.__getitem__)
    assert voting._clock() == 3600.0


async def test_a_change_that_a_full_disk_refuses_never_was(
    machines: dict[NodeId, Machine], autojump_clock: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = machines[A].voting
    before = first.entry

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Ballot, "write", full)
        with pytest.raises(NoSpace, match="No space left"):
            await first.write(b'{"lost":1}', before.version)
    assert first.entry == before
    assert first.coordinates
    await first.write(b'{"kept":1}', before.version)
    await until(lambda: machines[B].voting.entry.document == b'{"kept":1}', "the next one counts")


async def test_a_term_and_a_vote_are_found_again(
    machines: dict[NodeId, Machine], autojump_clock: object, nursery: trio.Nursery, tmp_path: Path
) -> None:
    kept = Ballot(tmp_path / "b.json").read(())
    assert kept.entry.voters == (A, B, C)
    assert kept.term == machines[A].voting.term
    await machines[B].restart(nursery)
    assert machines[B].voting.entry == kept.entry
