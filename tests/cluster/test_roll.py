"""The roll: what membership believes stands in the table that everybody gets, and ghosts leave both."""

from __future__ import annotations

from swarmnode.cluster.local_health import TICK_S
from swarmnode.cluster.member_table import NOTHING, KnownMembers, MemberTable, Row
from swarmnode.cluster.membership import (
    AWAIT_S,
    DEAD_S,
    FORGET_S,
    SUSPECT_S,
    Connected,
    Heard,
    NodeState,
    StateChanged,
)
from swarmnode.cluster.roll import Roll
from swarmnode.ids import BootId, NodeId

ATTIC, DEN, GHOST = NodeId("attic"), NodeId("den"), NodeId("ghost")
BOOT = BootId("b")


def wait(roll: Roll, now: float, seconds: float) -> float:
    end_s = now + seconds
    while (at_s := roll.next_timer()) is not None and at_s <= end_s:
        roll.handle_timer(at_s)
        roll.events()
    return end_s


def test_every_belief_reaches_who_holds_the_table_and_a_ghost_leaves_it() -> None:
    roll, known = Roll(term=4), KnownMembers()

    def seen() -> NodeState | None:
        update = roll.answer(Heard(ATTIC, BOOT, 1), known.mark).update
        if update is not None:
            assert known.take(update, 0.0)
        row = known.rows.get(ATTIC)
        return None if row is None else row.state

    roll.introduce(ATTIC, "attic", "192.0.2.1:7700")
    roll.receive(Connected(ATTIC, BOOT, 1), 10.0)
    assert seen() is NodeState.ALIVE
    now = wait(roll, 10.0, SUSPECT_S)
    assert seen() is NodeState.SUSPECT
    now = wait(roll, now, DEAD_S - SUSPECT_S)
    assert seen() is NodeState.DEAD
    assert roll.answer(Heard(ATTIC, BOOT, 1), known.mark).above == 1
    wait(roll, now, FORGET_S)
    assert seen() is None
    assert known.rows == {}
    assert known.mark == roll.table.mark


def told(*rows: Row) -> KnownMembers:
    """What a member holds of a table with these rows."""
    table, known = MemberTable(term=4), KnownMembers()
    for row in rows:
        table.put(row)
    update = table.since(NOTHING)
    assert update is not None
    assert known.take(update, 0.0)
    return known


def test_a_coordinator_begins_with_the_table_that_it_had_as_a_member_and_awaits_who_is_in_it() -> None:
    known = told(
        Row(ATTIC, "attic", "192.0.2.1:7700", NodeState.ALIVE),
        Row(DEN, "den", "", NodeState.SUSPECT),
        Row(GHOST, "ghost", "", NodeState.DEAD),
    )
    roll = Roll(term=5)
    roll.inherit(known.rows.values(), 100.0)
    assert [row.name for row in roll.awaited()] == ["attic", "den"]
    assert {row.name: row.state for row in roll.table.rows.values()} == {
        "attic": NodeState.SUSPECT,
        "den": NodeState.SUSPECT,
        "ghost": NodeState.DEAD,
    }
    roll.introduce(ATTIC, "attic", "192.0.2.1:7700")
    roll.receive(Connected(ATTIC, BOOT, 1), 105.0)
    assert roll.events() == [StateChanged(ATTIC, BOOT, NodeState.ALIVE)], "no process of it was declared dead first"
    assert [row.name for row in roll.awaited()] == ["den"]


def test_who_is_awaited_is_a_suspect_until_the_time_to_come_is_over_and_may_come_later_all_the_same() -> None:
    roll = Roll(term=5)
    roll.inherit(told(Row(DEN, "den", "", NodeState.ALIVE)).rows.values(), 100.0)
    now = wait(roll, 100.0, AWAIT_S - 0.01)
    assert roll.members.state(DEN) is NodeState.SUSPECT
    now = wait(roll, now, 0.01 + TICK_S)
    assert (roll.members.state(DEN), roll.awaited()) == (NodeState.DEAD, [])
    assert roll.answer(Heard(DEN, BOOT, 1), NOTHING).above is not None
    roll.receive(Heard(DEN, BOOT, 1), now)
    assert roll.members.state(DEN) is NodeState.ALIVE
    assert roll.answer(Heard(DEN, BOOT, 1), NOTHING).above is None


def test_whoever_was_heard_is_not_expected_any_more() -> None:
    roll = Roll(term=5)
    roll.receive(Connected(DEN, BOOT, 1), 100.0)
    roll.inherit([Row(DEN, "den", "", NodeState.DEAD)], 100.5)
    assert roll.members.state(DEN) is NodeState.ALIVE
    assert roll.awaited() == []
