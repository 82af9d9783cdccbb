"""The table of members: what a holder lacks is what it gets, however updates are lost, doubled and overtaken."""

from __future__ import annotations

from random import Random

import pytest

from swarmnode.cluster.member_table import MAX_MEMBERS, NOTHING, Heading, KnownMembers, MemberTable, Row, Update
from swarmnode.cluster.membership import NodeState
from swarmnode.ids import NodeId


def row(name: str, state: NodeState = NodeState.ALIVE) -> Row:
    return Row(NodeId(name), name, f"{name}:7700", state)


def table(term: int, *names: str) -> MemberTable:
    made = MemberTable(term)
    for name in names:
        made.put(row(name))
    return made


def taken(known: KnownMembers, update: Update | None, now: float = 0.0) -> bool:
    assert update is not None
    return known.take(update, now)


def test_who_holds_nothing_gets_everything_and_then_what_changed() -> None:
    author, known = table(1, "attic", "cellar"), KnownMembers()
    author.set_heading(Heading("desk", ("desk", "attic")))
    assert taken(known, author.since(NOTHING), 7.0)
    assert (known.rows, known.heading.voters, known.as_of_s) == (author.rows, ("desk", "attic"), 7.0)
    author.put(row("cellar", NodeState.DEAD))
    update = author.since(known.mark)
    assert update is not None
    assert [changed.name for changed in update.rows] == ["cellar"]
    assert taken(known, update, 9.0)
    assert known.rows == author.rows
    assert author.since(known.mark) is None


def test_what_changes_nothing_costs_nothing() -> None:
    author = table(1, "attic")
    mark = author.mark
    author.put(row("attic"))
    author.set_heading(Heading())
    author.drop(NodeId("nobody"))
    assert author.mark == mark


def test_a_row_that_left_leaves_every_copy() -> None:
    author, known = table(1, "attic", "cellar"), KnownMembers()
    taken(known, author.since(NOTHING))
    author.drop(NodeId("attic"))
    taken(known, author.since(known.mark))
    assert set(known.rows) == {"cellar"}
    author.put(row("attic"))
    taken(known, author.since(known.mark))
    assert set(known.rows) == {"cellar", "attic"}


def test_another_coordinators_table_is_taken_whole_and_an_earlier_ones_not_at_all() -> None:
    first, second, known = table(1, "attic", "den"), table(2, "cellar"), KnownMembers()
    late = first.since(NOTHING)
    taken(known, second.since(NOTHING))
    assert not taken(known, late)
    assert set(known.rows) == {"cellar"}
    assert second.since((1, 3)) == second.since(NOTHING), "what a holder has of another's is no beginning"


def test_an_update_that_follows_on_what_is_missing_is_not_taken() -> None:
    author, known = table(1, "attic"), KnownMembers()
    held = author.mark
    author.put(row("cellar"))
    assert not taken(known, author.since(held))
    assert known.rows == {}
    assert known.as_of_s is None


def test_a_confirmation_is_none_where_there_is_no_table() -> None:
    known = KnownMembers()
    known.confirm(5.0)
    assert known.as_of_s is None
    taken(known, table(1).since(NOTHING), 6.0)
    known.confirm(8.0)
    assert known.as_of_s == 8.0


def test_what_left_too_long_ago_is_made_up_for_by_the_whole_table() -> None:
    author, known = table(1, "first", "second"), KnownMembers()
    taken(known, author.since(NOTHING))
    for number in range(MAX_MEMBERS + 1):
        author.put(row(f"m{number}"))
        author.drop(NodeId(f"m{number}"))
        if number == 0:
            author.drop(NodeId("first"))
    update = author.since(known.mark)
    assert update is not None
    assert update.since == 0
    assert taken(known, update)
    assert set(known.rows) == {"second"}


def test_a_full_table_makes_room_by_its_dead_and_else_stays_as_it_is() -> None:
    author = table(1, *(f"m{number}" for number in range(MAX_MEMBERS)))
    author.put(row("one more"))
    assert "one more" not in author.rows
    author.put(row("m7", NodeState.DEAD))
    author.put(row("one more"))
    assert len(author.rows) == MAX_MEMBERS
    assert ("one more" in author.rows, "m7" in author.rows) == (True, False)


@pytest.mark.parametrize("seed", range(50))
def test_copies_converge_whatever_becomes_of_updates(seed: int) -> None:
    random, author, known, on_the_way = Random(seed), MemberTable(3), KnownMembers(), list[Update]()
    for _ in range(200):
        name = f"m{random.randrange(6)}"
        if random.random() < 0.3:
            author.drop(NodeId(name))
        else:
            author.put(row(name, random.choice(list(NodeState))))
        if update := author.since(known.mark):
            on_the_way.append(update)
        if on_the_way and random.random() < 0.4:  # out of order, and perhaps again later
            known.take(random.choice(on_the_way), 0.0)
    if update := author.since(known.mark):
        known.take(update, 0.0)
    assert known.rows == author.rows
