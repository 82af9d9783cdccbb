"""Voters under loss, doubles, late frames, pauses, one-way cuts and crashes; every planted bug must be found."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from sims.timeline import Stuck, Violation
from sims.voters import VotersWorld, Weather, torture
from swarmnode.cluster.election import ELECTION_MAX_S, Election
from swarmnode.cluster.entry_parts import MAX_UNDER_WAY, Inbound
from swarmnode.cluster.fence import Fence
from swarmnode.cluster.voter_book import MAX_SEATED, MAX_VOTERS
from swarmnode.roles.voting import longest_write_s
from swarmnode.wire.limits import MAX_DOCUMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarmnode.cluster.election_messages import Append, AskVote, Entry, Mark, Part, Stored, VoterMessage
    from swarmnode.ids import NodeId

SEEDS = 2000
SEEDS_OF_A_MAJORITY = 500
SEEDS_TO_FIND_A_BUG = 1000


class SmallParts(Election):
    """So that a few numbers already make an entry of many parts."""

    part_bytes = 40


@pytest.mark.parametrize("part", range(4))
def test_nothing_breaks_the_promises(part: int) -> None:
    elections = faults = disks = 0
    for seed in range(part * SEEDS // 4, (part + 1) * SEEDS // 4):
        world = torture(seed, SmallParts if seed % 2 else Election, count=5 if seed % 4 == 0 else 3)
        elections, faults = elections + len(world.coordinators), faults + world.faults
        disks += world.disks_lost
    assert elections > SEEDS / 4  # the faults did end terms of office
    assert faults > 10 * SEEDS / 4
    assert disks > SEEDS / 4


@pytest.mark.parametrize("part", range(2))
def test_a_majority_that_is_connected_needs_nobody_else(part: int) -> None:
    for seed in range(part * SEEDS_OF_A_MAJORITY // 2, (part + 1) * SEEDS_OF_A_MAJORITY // 2):
        torture(seed, SmallParts if seed % 3 else Election, count=5 if seed % 2 else 3, whole=False)


MBIT_PER_S = 125_000
STEADY = {"least_s": 0.05, "most_s": 0.05, "loss": 0.0, "double": 0.0, "late": 0.0, "crash_after_write": 0.0}


def _slow_line(machine: type[Election], document_bytes: int, mbit_per_s: float) -> VotersWorld:
    """A swarm's first minutes behind such uplinks, with a write; as over TCP nothing overtakes anything."""
    weather = Weather(**STEADY, uplink_bytes_per_s=mbit_per_s * MBIT_PER_S)
    world = VotersWorld(3, 1, weather, machine=machine, document_bytes=document_bytes)
    takes_s = 2 * document_bytes / world.weather.uplink_bytes_per_s + ELECTION_MAX_S + 30.0
    world.run_until(takes_s)
    assert world.write(1)
    world.run_until(world.now_s + takes_s)
    return world


@pytest.mark.parametrize(("document_bytes", "mbit_per_s"), [(3 << 20, 10), (MAX_DOCUMENT_BYTES, 1), (50_000, 0.1)])
def test_a_document_of_any_size_ends_no_term_of_office_on_a_slow_line(document_bytes: int, mbit_per_s: float) -> None:
    world = _slow_line(Election, document_bytes, mbit_per_s)
    assert (len(world.coordinators), world.acknowledged) == (1, {1})
    assert world.delivered_bytes == 4 * document_bytes, "twice to each of the others, and nothing again"


@pytest.mark.parametrize("document_bytes", [1 << 19, MAX_DOCUMENT_BYTES])
def test_nor_where_many_wait_to_become_voters(document_bytes: int) -> None:
    """Five voters and as many others as may be seated; a write is over before its coordinator gives it up."""
    begun = MAX_UNDER_WAY  # of what the others were given before the write; the rest get that alone
    assert _seated_line(Election, document_bytes).delivered_bytes == (4 + begun + 15) * document_bytes


class AllAtOnce(Election):
    """Sends a part to every receiver, and so its beats stand behind fifteen."""

    max_under_way = MAX_SEATED


def test_where_all_are_sent_parts_at_once_it_would() -> None:
    with pytest.raises(AssertionError):
        _seated_line(AllAtOnce, 1 << 19)


def _seated_line(machine: type[Election], document_bytes: int) -> VotersWorld:
    world = VotersWorld(
        MAX_VOTERS, 1, Weather(**STEADY, uplink_bytes_per_s=MBIT_PER_S), machine=machine, document_bytes=document_bytes
    )
    all_s = MAX_SEATED * document_bytes / MBIT_PER_S
    world.run_until(ELECTION_MAX_S + 30.0 + 2 * all_s)
    world.seat(MAX_SEATED - MAX_VOTERS)
    world.run_until(world.now_s + 10.0)
    assert world.write(1)
    world.run_until(world.now_s + longest_write_s(document_bytes, MAX_VOTERS - 1))
    assert world.acknowledged == {1}
    world.run_until(world.now_s + 3 * all_s)
    assert len(world.coordinators) == 1
    return world


class WholeAtOnce(Election):
    """Sends a document in one piece: who waits for its end is silent meanwhile."""

    part_bytes = MAX_DOCUMENT_BYTES


def test_in_one_piece_it_would() -> None:
    with pytest.raises(AssertionError):
        _slow_line(WholeAtOnce, MAX_DOCUMENT_BYTES, 10)


class AsksAnybodyAnyTime(Election):
    """Without PreVote, and votes while it hears a coordinator."""

    def _ask(self, now: float) -> None:
        if self._has_vote:
            self._stand(now)

    def _knows_coordinator(self, now: float) -> bool:
        return False


def test_one_that_nobody_reaches_keeps_a_connected_majority_from_electing_where_none_asks_first() -> None:
    stuck = 0
    for seed in range(40):
        try:
            torture(seed, AsksAnybodyAnyTime, whole=False)
        except Stuck:
            stuck += 1
    assert stuck > 0


class VotesWithoutLooking(Election):
    """Votes for who lacks what it has."""

    def _up_to_date(self, ask: AskVote) -> bool:
        return True


class AcknowledgesAlone(Election):
    """Acknowledges before a majority holds the write."""

    def _is_safe_with(self, holders: set[NodeId]) -> bool:
        return True


class ForgetsItsVote(Election):
    """Has kept its vote in memory only."""

    def __init__(self, node: NodeId, stored: Stored, now: float, draw: Callable[[], float]) -> None:
        super().__init__(node, replace(stored, vote=None), now, draw)


class BelievesStaleTerms(Election):
    """Takes answers and entries of terms that are over."""

    def _is_stale(self, message: VoterMessage) -> bool:
        return False


class VotesWithoutADisk(Election):
    """Goes on after the loss of its disk as if it had never voted, and never held an entry."""

    @property
    def _has_vote(self) -> bool:
        return True

    def _has_lost_disk(self, append: Append) -> bool:
        return False


class Careless(Inbound):
    """Puts on whatever comes, also what came twice."""

    def take(self, mark: Mark, part: Part) -> Entry | None:
        return super().take(mark, replace(part, start=self.have_bytes(mark)))


class JoinsWhatComes(Election):
    part_bytes = 10

    def __init__(self, node: NodeId, stored: Stored, now: float, draw: Callable[[], float]) -> None:
        super().__init__(node, stored, now, draw)
        self._inbound = Careless()


@pytest.mark.parametrize(
    "bug",
    [JoinsWhatComes, VotesWithoutLooking, AcknowledgesAlone, ForgetsItsVote, BelievesStaleTerms, VotesWithoutADisk],
)
def test_planted_bugs_are_found(bug: type[Election]) -> None:
    with pytest.raises(Violation):
        _hunt(machine=bug)


class OpenFence(Fence):
    """Carries out whatever comes."""

    def check(self, term: int) -> None:
        pass


class HeardOnly(Fence):
    """Knows of the terms that coordinators told it, and nothing of its own votes."""

    def check(self, term: int) -> None:
        Fence(self.term).check(term)


@pytest.mark.parametrize(
    ("bug", "found"),
    [(OpenFence, "carried out (after one|by a voter) of term"), (HeardOnly, "carried out by a voter of term")],
)
def test_a_node_without_a_whole_fence_obeys_a_coordinator_of_the_past(bug: type[Fence], found: str) -> None:
    with pytest.raises(Violation, match=found):
        _hunt(fence=bug)


def _hunt(machine: type[Election] = Election, fence: type[Fence] = Fence) -> None:
    """Machines that restart at the worst moments: what it takes to catch one that only remembered its vote."""
    weather = Weather(crash_after_write=0.3, late=0.1)
    for seed in range(SEEDS_TO_FIND_A_BUG):
        with suppress(Stuck):  # that nothing goes on is a lesser fault than those that were planted
            torture(seed, machine, fence=fence, count=3 if seed % 2 else 5, faults_every_s=2.0, weather=weather)


def test_the_same_seed_gives_the_same_history() -> None:
    assert _history(torture(7)) == _history(torture(7))


def _history(world: VotersWorld) -> tuple[object, ...]:
    return sorted(world.coordinators.items()), sorted(world.acknowledged), world.faults, world.elected_s
