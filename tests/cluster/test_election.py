"""The voters' promises, each as a short scene; the long torture is in tests/sims/test_voters.py."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from sims.voters import VotersWorld, Weather
from swarmnode.cluster.election import ELECTION_MAX_S, QUORUM_S, Election
from swarmnode.cluster.election_messages import (
    NOTHING,
    Append,
    Appended,
    Arrived,
    AskVote,
    Committed,
    Elected,
    Entry,
    Following,
    ForceAlone,
    Learners,
    Persist,
    ProposalRefused,
    Propose,
    SendTo,
    SteppedDown,
    Stored,
    VoteAnswer,
)
from swarmnode.cluster.entry_parts import LEFT_AFTER_S, MAX_UNDER_WAY, Inbound, part_of
from swarmnode.cluster.fence import Fence
from swarmnode.errors import StaleTerm
from swarmnode.ids import NodeId

if TYPE_CHECKING:
    from swarmnode.cluster.election_messages import Effect, VoterMessage

A, B, C, D = NodeId("a"), NodeId("b"), NodeId("c"), NodeId("d")
CALM = Weather(loss=0.0, double=0.0, late=0.0, crash_after_write=0.0)


def voter(*voters: NodeId, stored: Stored | None = None) -> Election:
    return Election(A, stored or Stored(0, None, Entry(0, 0, voters, b"")), 0.0, lambda: 0.0)


def coordinator() -> Election:
    """A of three voters, elected in term 1 and with B's copy of its first entry."""
    election = voter(A, B, C)
    election.handle_timer(5.0)
    arrive(election, B, VoteAnswer(1, granted=True, pre=True), 5.1)
    arrive(election, B, VoteAnswer(1, granted=True, pre=False), 5.2)
    arrive(election, B, Appended(1, (1, 1)), 5.3)
    election.outgoing()
    election.events()
    return election


def arrive(election: Election, sender: NodeId, message: VoterMessage, now: float) -> None:
    election.receive(Arrived(sender, message), now)


def sent(effects: list[Effect]) -> list[VoterMessage]:
    return [effect.message for effect in effects if isinstance(effect, SendTo)]


def test_a_single_voter_coordinates_at_once_and_after_its_own_entry_is_on_disk() -> None:
    election = voter(A)
    election.handle_timer(0.0)
    assert [type(event) for event in election.events()] == [Committed, Elected]
    assert isinstance(election.outgoing()[-1], Persist)
    assert election.coordinates


def test_a_vote_is_on_disk_before_it_is_given() -> None:
    election = voter(A, B, C)
    arrive(election, B, AskVote(1, (0, 0), pre=False), 6.0)
    effects = election.outgoing()
    assert effects[-1] == SendTo(B, VoteAnswer(1, granted=True, pre=False))
    kept = [effect.stored for effect in effects if isinstance(effect, Persist)]
    assert (kept[-1].term, kept[-1].vote) == (1, B)


def test_one_vote_a_term_even_after_a_restart() -> None:
    election = voter(A, B, C)
    arrive(election, B, AskVote(1, (0, 0), pre=False), 6.0)
    kept = [effect.stored for effect in election.outgoing() if isinstance(effect, Persist)][-1]
    restarted = voter(stored=kept)
    arrive(restarted, C, AskVote(1, (0, 0), pre=False), 7.0)
    assert sent(restarted.outgoing()) == [VoteAnswer(1, granted=False, pre=False)]


def test_a_pre_vote_changes_nothing() -> None:
    election = voter(A, B, C)
    arrive(election, B, AskVote(7, (0, 0), pre=True), 6.0)
    assert election.outgoing() == [SendTo(B, VoteAnswer(7, granted=True, pre=True))]
    assert election.term == 0


def test_who_lacks_an_entry_gets_no_vote() -> None:
    election = voter(stored=Stored(3, None, Entry(3, 9, (A, B, C), b"x")))
    arrive(election, B, AskVote(4, (2, 12), pre=False), 6.0)
    assert sent(election.outgoing()) == [VoteAnswer(4, granted=False, pre=False)]


def test_nobody_is_voted_for_while_the_coordinator_is_heard() -> None:
    election = voter(A, B, C)
    arrive(election, B, Append(1, (1, 1), (0, 0)), 1.0)
    election.outgoing()
    arrive(election, C, AskVote(9, (9, 9), pre=False), 5.9)
    assert election.outgoing() == []
    assert election.term == 1


def test_a_write_counts_only_with_a_majority() -> None:
    election = coordinator()
    election.receive(Propose(b"new", election.entry.version), 6.0)
    assert election.events() == []
    arrive(election, C, Appended(1, election.entry.mark), 6.1)
    assert [event for event in election.events() if isinstance(event, Committed)] == [Committed(election.entry)]


def test_a_write_against_an_older_version_is_refused_with_the_present_one() -> None:
    election = coordinator()
    election.receive(Propose(b"new", 0), 6.0)
    (refused,) = election.events()
    assert isinstance(refused, ProposalRefused)
    assert (refused.expected, refused.version) == (0, 1)


def test_who_does_not_coordinate_writes_nothing() -> None:
    election = voter(A, B, C)
    election.receive(Propose(b"new", 0), 1.0)
    (refused,) = election.events()
    assert isinstance(refused, ProposalRefused)
    assert election.outgoing() == []


def test_a_coordinator_that_slept_steps_down_before_it_acts() -> None:
    election = coordinator()
    election.receive(Propose(b"new", election.entry.version), 5.3 + QUORUM_S + 1)
    assert [type(event) for event in election.events()] == [SteppedDown, ProposalRefused]
    assert election.outgoing() == []


def test_a_later_term_ends_a_coordinator() -> None:
    election = coordinator()
    arrive(election, C, Appended(4, (0, 0)), 6.0)
    assert [type(event) for event in election.events()] == [SteppedDown]
    assert election.term == 4


def test_a_stale_coordinator_is_told_the_term() -> None:
    election = voter(stored=Stored(5, None, Entry(5, 2, (A, B, C), b"")))
    arrive(election, B, Append(4, (4, 9), (4, 9), part_of(Entry(4, 9, (A, B, C), b"old"))), 1.0)
    assert sent(election.outgoing()) == [Appended(5, (5, 2))]
    assert election.entry.document == b""


def test_an_entry_that_came_late_does_not_undo_a_newer_one() -> None:
    election = voter(A, B, C)
    for version in (2, 1):
        entry = Entry(1, version, (A, B, C), str(version).encode())
        arrive(election, B, Append(1, entry.mark, (0, 0), part_of(entry)), 1.0)
    assert election.entry.document == b"2"


def test_a_follower_says_whom_it_follows_once_a_term() -> None:
    election = voter(A, B, C)
    for at_s in (1.0, 2.0):
        arrive(election, B, Append(1, (1, 1), (0, 0)), at_s)
    assert election.events() == [Following(B, 1)]


def test_voters_change_one_at_a_time_and_only_from_safe_ground() -> None:
    election = coordinator()
    for voters in ((A,), (A, B, C, NodeId("d"), NodeId("e")), (B, C)):
        election.receive(Propose(b"", election.entry.version, voters), 6.0)
    assert [type(event) for event in election.events()] == [ProposalRefused] * 3
    election.receive(Propose(b"", election.entry.version, (A, B, C, NodeId("d"))), 6.0)
    assert election.events() == []
    arrive(election, B, Appended(1, election.entry.mark), 6.1)
    assert election.events() == []  # two of four are no majority


def test_two_voters_do_not_go_on_alone_unless_told() -> None:
    election = voter(A, B)
    for at_s in (5.0, 15.0, 25.0):
        election.handle_timer(at_s)
    assert not election.coordinates
    election.receive(ForceAlone(), 30.0)
    assert election.coordinates
    assert election.voters == (A,)


def test_a_lone_voter_takes_in_two_at_once_and_then_needs_one_of_them() -> None:
    """Whoever holds the majority of one can only be it; so no majority of three can form behind its back."""
    election = voter(A)
    election.handle_timer(0.0)
    assert election.coordinates
    election.receive(Propose(b"d", 1, (A, B, C)), 0.1)
    assert (election.voters, election.committed) == ((A, B, C), (1, 1))
    arrive(election, B, Appended(1, (1, 2)), 0.2)
    assert election.committed == (1, 2)
    election.receive(Propose(b"d", 2, (A,)), 0.3)
    assert isinstance(election.events()[-1], ProposalRefused), "not back in one step: two of three would know nothing"


def test_learners_are_given_everything_and_count_for_nothing() -> None:
    election = voter(A)
    election.receive(Learners(frozenset({A, D})), 0.0)
    election.handle_timer(0.0)
    written = [effect for effect in election.outgoing() if isinstance(effect, SendTo)]
    assert [(effect.node, effect.message.part) for effect in written] == [(D, part_of(election.entry))]  # type: ignore[union-attr]
    assert election.committed == (1, 1), "without its answer"
    assert not election.up_to_date(0.1)
    arrive(election, D, Appended(1, (1, 1)), 0.2)
    assert election.up_to_date(0.3) == {D}
    assert not election.up_to_date(0.2 + QUORUM_S), "it has not answered for long"
    election.receive(Propose(b"d", 1), 5.0)
    assert not election.up_to_date(5.0), "it lacks the last change"


class OneByteAtATime(Election):
    part_bytes = 1


def test_who_is_seated_again_is_given_what_is_new_and_nothing_meanwhile() -> None:
    election = OneByteAtATime(A, Stored(0, None, Entry(0, 0, (A,), b"old")), 0.0, lambda: 0.0)
    election.receive(Learners(frozenset({D})), 0.0)
    election.handle_timer(0.0)
    begun = sent(election.outgoing())[-1]
    assert isinstance(begun, Append)
    arrive(election, D, Appended(0, (0, 0), begun.number, 1), 0.1)
    election.receive(Learners(frozenset()), 0.2)
    election.outgoing()
    arrive(election, D, Appended(1, (0, 0), begun.number + 1, 2), 0.3)
    election.receive(Propose(b"new", 1), 0.4)
    assert not sent(election.outgoing())
    election.receive(Learners(frozenset({D})), 0.5)
    election.handle_timer(2.0)
    (again,) = sent(election.outgoing())
    assert isinstance(again, Append)
    assert (again.mark, again.part) == (election.entry.mark, part_of(election.entry, 0, 1))


def test_parts_go_to_voters_first_and_their_room_comes_back_from_who_answers_nothing() -> None:
    election, learners = coordinator(), [NodeId(f"z{index}") for index in range(MAX_UNDER_WAY + 1)]
    last = learners[-1]

    def given() -> list[NodeId]:
        effects = [effect for effect in election.outgoing() if isinstance(effect, SendTo)]
        return [effect.node for effect in effects if isinstance(effect.message, Append) and effect.message.part]

    election.receive(Learners(frozenset(learners)), 5.4)
    arrive(election, C, Appended(1, election.entry.mark, 100), 5.5)
    assert given() == learners[:-1]
    election.receive(Propose(b"new", 1), 5.6)
    assert given() == [], "the line is full"
    arrive(election, learners[0], Appended(1, NOTHING, 100), 5.7)
    assert given() == [B]
    arrive(election, B, Appended(1, election.entry.mark, 100), 5.8)
    assert given() == [C]
    arrive(election, C, Appended(1, election.entry.mark, 100), 5.9)
    assert given() == [learners[0]]
    election.handle_timer(5.4 + LEFT_AFTER_S)
    assert given() == [], "they may still be on it"
    arrive(election, B, Appended(1, election.entry.mark, 200), 5.7 + LEFT_AFTER_S)
    assert given() == [last]


def test_an_entry_is_joined_of_parts_that_have_something_and_undone_where_it_was_not_kept() -> None:
    inbound, whole = Inbound(), replace(NAMED, document=b"abc")
    assert inbound.take(whole.mark, part_of(whole, 0, 1)) is None
    assert inbound.take(whole.mark, replace(part_of(whole, 1, 1), data=b"")) is None
    before = copy.deepcopy(inbound)
    assert inbound.take(whole.mark, part_of(whole, 1, 1)) is None
    assert (before.have_bytes(whole.mark), inbound.have_bytes(whole.mark)) == (1, 2)
    assert before.take(whole.mark, part_of(whole, 1)) == whole
    empty = replace(NAMED, version=9, document=b"")
    assert before.take(empty.mark, part_of(empty)) == empty


EMPTY = Entry(0, 0, (), b"")
NAMED = Entry(2, 3, (A, B, C), b"x")
WITHOUT = Entry(2, 4, (B, C), b"x")


def test_a_voter_that_lost_its_disk_takes_no_part() -> None:
    """It may have voted in a later term than this coordinator's, and have held what a later one wrote."""
    election = voter(stored=Stored(0, None, EMPTY))
    for pre in (True, False):
        arrive(election, B, AskVote(7, (9, 9), pre), 1.0)
    assert election.outgoing() == []
    arrive(election, B, Append(2, NAMED.mark, NAMED.mark, part_of(NAMED)), 1.0)
    assert election.outgoing() == [SendTo(B, Appended(2, (0, 0)))], "nothing was kept"
    election.handle_timer(100.0)
    assert (election.outgoing(), election.events(), election.next_timer()) == ([], [], None)


def test_it_votes_again_by_an_entry_that_is_later_than_its_removal() -> None:
    election = voter(stored=Stored(0, None, EMPTY))
    arrive(election, B, Append(2, WITHOUT.mark, NAMED.mark, part_of(WITHOUT)), 1.0)
    assert sent(election.outgoing())[-1] == Appended(2, WITHOUT.mark)
    arrive(election, B, Append(2, NAMED.mark, NAMED.mark, part_of(NAMED)), 1.0)
    arrive(election, B, AskVote(3, (2, 4), pre=False), 20.0)
    assert not [message for message in sent(election.outgoing()) if isinstance(message, VoteAnswer)], "not let in yet"
    again = replace(NAMED, version=5)
    arrive(election, B, Append(2, again.mark, WITHOUT.mark, part_of(again)), 21.0)
    assert sent(election.outgoing()) == [Appended(2, again.mark)]
    assert election.next_timer() is not None


def test_a_coordinator_knows_who_holds_nothing_and_does_not_count_it() -> None:
    election = coordinator()
    arrive(election, B, Appended(1, (0, 0)), 5.4)
    assert election.blank == {B}
    election.handle_timer(5.3 + QUORUM_S)
    assert not election.coordinates, "it was no voice of a majority"


def test_a_forced_promotion_leaves_no_term_to_share() -> None:
    """The one that was given up for lost comes back, and elects itself as it knows of no other voter."""
    forced, lost = voter(A, D), Election(D, Stored(0, None, Entry(0, 0, (D,), b"")), 0.0, lambda: 0.0)
    forced.receive(ForceAlone(), 0.0)
    lost.handle_timer(0.0)
    assert forced.coordinates
    assert lost.coordinates, "each is the only voter that it knows of"
    assert lost.term < forced.term
    arrive(lost, A, Append(forced.term, forced.entry.mark, forced.committed, part_of(forced.entry)), 1.0)
    assert not lost.coordinates
    assert lost.voters == (A,)


def test_a_node_that_is_no_voter_never_asks() -> None:
    election = voter(B, C)
    assert election.next_timer() is None
    election.handle_timer(100.0)
    assert election.outgoing() == []


@pytest.mark.parametrize("seed", range(20))
def test_a_killed_coordinator_has_a_successor_that_knows_all(seed: int) -> None:
    world = VotersWorld(3, seed, CALM)
    world.run_until(30.0)
    first = world.coordinator()
    assert first is not None
    assert world.write(1)
    world.run_until(32.0)
    world.crash(first)
    world.run_until(32.0 + 20.0)
    second = world.coordinator()
    assert second not in (None, first)
    assert world.acknowledged == {1}
    assert world.write(2)
    world.run_until(60.0)
    assert world.acknowledged == {1, 2}


class NoPreVote(Election):
    def _ask(self, now: float) -> None:
        self._stand(now)


def _disturbed(machine: type[Election]) -> bool:
    """Whether a voter that was cut off for a minute and comes back ends a good coordinator's term."""
    world = VotersWorld(3, 4, CALM, machine=machine)
    world.run_until(30.0)
    leader = world.coordinator()
    assert leader is not None
    term = max(world.coordinators)
    alone = next(name for name in world.voters if name != leader)
    world.cut |= {pair for other in world.voters if other != alone for pair in ((alone, other), (other, alone))}
    world.run_until(90.0)
    world.heal()
    world.run_until(90.0 + 2 * ELECTION_MAX_S)
    return max(world.coordinators) != term


def test_a_voter_that_was_cut_off_disturbs_nobody() -> None:
    assert not _disturbed(Election)


def test_without_pre_votes_it_would() -> None:
    assert _disturbed(NoPreVote)


def test_the_fence_lets_no_earlier_term_through() -> None:
    fence = Fence()
    for term in (2, 2, 5):
        fence.admit(term)
        assert fence.term == term
    with pytest.raises(StaleTerm, match="term 4"):
        fence.admit(4)


def test_the_fence_of_a_voter_knows_its_votes() -> None:
    fence = Fence(5, voted=lambda: 7)
    fence.check(7)
    for refuse in (fence.check, fence.admit):
        with pytest.raises(StaleTerm, match="term 6 speaks, and term 7 has begun"):
            refuse(6)
