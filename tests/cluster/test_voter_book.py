"""Which nodes vote: an odd number of those that hold everything, changed one at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.cluster.voter_book import MAX_SEATED, MAX_VOTERS, Seated, VoterBook, lacking_without, next_voters
from swarmnode.errors import Conflict
from swarmnode.ids import NodeId

A, B, C, D, E, F = (NodeId(letter) for letter in "abcdef")


@pytest.mark.parametrize(
    ("voters", "seated", "ready", "wanted"),
    [
        ((A,), {A}, (), None),
        ((A,), {A, B}, (B,), None),  # two would stop at the loss of either
        ((A,), {A, B, C}, (B, C), (A, B, C)),
        ((A,), {A, B, C}, (B,), None),
        ((A, B, C), {A, B, C, D}, (B, C, D), None),
        ((A, B, C), {A, B, C, D, E}, (B, C, D, E), (A, B, C, D)),
        ((A, B, C, D), {A, B, C, D, E}, (B, C, D, E), (A, B, C, D, E)),
        ((A, B, C, D, E), {A, B, C, D, E, F}, (B, C, D, E, F), None),
        ((A, B, C), {A, C}, (C,), (A, C)),  # B was removed from the swarm
        ((A, C), {A, C, D}, (C, D), (A, C, D)),
        ((A, C), {A, C}, (C,), (A,)),
        ((A, B, C, D), {A, B, C, D}, (B, D), (A, B, D)),  # who does not answer goes first
        ((A, B, C), {A, B, C}, (), None),  # a voter that is away stays one
    ],
)
def test_the_next_change(
    voters: tuple[NodeId, ...], seated: set[NodeId], ready: tuple[NodeId, ...], wanted: tuple[NodeId, ...] | None
) -> None:
    assert next_voters(voters, A, seated, ready) == wanted


@pytest.mark.parametrize(
    ("leaving", "voters", "connected", "lacking"),
    [
        (B, (A, B, C), (A, B, C), ()),
        (B, (A, B, C), (A, B), (C,)),  # A alone is half of what would be left
        (C, (A, B, C), (A, B), ()),  # who is away may go
        (B, (A, B, C, D, E), (A, B, C, D, E), ()),
        (B, (A, B, C, D, E), (A, B, C, D), ()),
        (B, (A, B, C, D, E), (A, B, C), (D, E)),
        (D, (A, B, C, D, E), (A, B, C), ()),
        (B, (A, B), (A, B), ()),  # on the way from three to one
        (D, (A, B, C), (A,), ()),  # it does not vote
    ],
)
def test_a_voter_leaves_only_a_majority_that_is_connected(
    leaving: NodeId, voters: tuple[NodeId, ...], connected: tuple[NodeId, ...], lacking: tuple[NodeId, ...]
) -> None:
    assert lacking_without(leaving, voters, connected) == lacking


NODES = st.frozensets(st.sampled_from([B, C, D, E, F]))


@given(NODES, NODES, NODES)
def test_changes_come_to_rest_at_an_odd_number_without_unsafe_steps(
    others: frozenset[NodeId], seated: frozenset[NodeId], ready: frozenset[NodeId]
) -> None:
    voters, allowed = (A, *sorted(others)[: MAX_VOTERS - 1]), {A, *seated}
    for _ in range(2 * MAX_VOTERS):
        following = next_voters(voters, A, allowed, ready)
        if following is None:
            break
        assert A in following
        assert len({*following} ^ {*voters}) == 1 or voters == (A,)
        voters = following
    assert following is None
    assert len(voters) in (1, 3, 5)
    assert {*voters} <= allowed


def test_a_book_holds_places_and_its_limit() -> None:
    book = VoterBook()
    assert book.seat(Seated(A, "attic", ("192.0.2.1:7700",)))
    assert not book.seat(Seated(A, "attic", ("192.0.2.1:7700",)))
    assert book.seat(Seated(A, "attic", ("192.0.2.7:7700",))), "it moved"
    for number in range(MAX_SEATED - 1):
        book.seat(Seated(NodeId(f"n{number}"), f"n{number}", ("192.0.2.2:7700",)))
    with pytest.raises(Conflict, match="remove one"):
        book.seat(Seated(B, "one too many", ("192.0.2.3:7700",)))
    assert VoterBook.from_json(book.as_json()).records() == book.records()
    book.remove(A)
    book.remove(A)
    assert book.get(A) is None
