"""The roll: what membership believes stands in the table that everybody gets, and ghosts leave both."""

from __future__ import annotations

from swarmnode.cluster.member_table import KnownMembers
from swarmnode.cluster.membership import DEAD_S, FORGET_S, SUSPECT_S, Connected, Heard, NodeState
from swarmnode.cluster.roll import Roll
from swarmnode.ids import BootId, NodeId

ATTIC, BOOT = NodeId("attic"), BootId("b")


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
