"""P2: whose turn it is, a decode step's or a prompt piece's."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.ids import SessionId
from swarmnode.ring.turns import PIECES_SEEN, SLOT_AFTER_PIECES, Rounds, Turns

A, B, C = (SessionId(n) for n in (1, 2, 3))


def in_slot(*away: SessionId) -> Turns:
    """Right behind a step that ended a round of 100 ms, 20 of them here; of these sessions steps left at 1.0 s."""
    turns = Turns()
    turns.step_begins()
    turns.step_ended(slot=True)
    turns.left(away, 100.0, 20.0, now=1.0)
    return turns


def test_a_piece_begins_right_behind_a_step_that_ended_a_round_whoever_waits_or_is_late() -> None:
    assert in_slot(A).piece_is_next(True, 1.0)
    assert in_slot(A).piece_is_next(False, 1.2), "A is late"


def test_outside_of_a_slot_no_piece_begins_while_any_step_is_to_come() -> None:
    turns = in_slot(A)
    turns.step_begins()
    turns.step_ended(slot=False)
    assert not turns.piece_is_next(True, 1.0)
    assert not turns.piece_is_next(False, 1.0)
    turns.over(A)
    assert turns.piece_is_next(False, 1.0), "nobody steps any more"


def test_a_second_piece_follows_in_a_slot_until_a_step_is_there_or_late() -> None:
    """A round takes 100 ms, of which 20 were spent here: with a twentieth of grace A is due 85 ms after it left."""
    turns = in_slot(A)
    turns.piece_begins()
    assert turns.piece_is_next(False, 1.084)
    assert not turns.piece_is_next(True, 1.084)
    assert not turns.piece_is_next(False, 1.086)


def test_a_slot_in_which_nothing_was_to_be_run_is_one_for_further_pieces() -> None:
    turns = in_slot(A)
    turns.idles()
    assert turns.piece_is_next(False, 1.084)
    assert not turns.piece_is_next(False, 1.086), (
        "a piece that came now would hold A up, which another holds up already"
    )


@pytest.mark.parametrize(("round_ms", "given_up_s"), [(100.0, 1.585), (400.0, 2.6)])
@pytest.mark.parametrize("slot", [True, False])
def test_a_step_that_is_later_than_pieces_explain_is_waited_for_no_longer(
    round_ms: float, given_up_s: float, slot: bool
) -> None:
    """It waits for memory, or its link stalls: prompts must not stand still with it."""
    turns = Turns()
    turns.step_ended(slot=slot)
    turns.piece_begins()
    turns.left([A], round_ms, 20.0, now=1.0)
    assert turns.held_until_s(1.5) == pytest.approx(given_up_s)
    assert not turns.piece_is_next(False, given_up_s - 0.001)
    assert not turns.missing(A, given_up_s - 0.001)
    assert turns.piece_is_next(False, given_up_s + 0.001)
    assert turns.missing(A, given_up_s + 0.001)
    assert not turns.missing(B, given_up_s)


def test_where_nobody_steps_pieces_follow_each_other() -> None:
    turns = Turns()
    for _ in range(3):
        assert turns.piece_is_next(False, 1.0)
        turns.piece_begins()


def test_a_round_ends_with_the_last_who_is_expected() -> None:
    rounds = Rounds()
    assert rounds.step_ends_one([A, B], [A, B], 0.0)
    assert [rounds.step_ends_one([s], [A, B, C], 0.1) for s in (A, B, C, A, B, C)] == [False, False, True] * 2
    assert not rounds.step_ends_one([A], [A, B, C], 0.1)
    assert rounds.step_ends_one([B], [A, B], 0.1), "C is gone, or so late that nobody expects it"


def test_a_long_round_has_a_slot_every_few_pieces() -> None:
    rounds = Rounds()
    for ms in (100.0, 100.0, 8.0):
        rounds.piece_done(ms)
    apart_s = SLOT_AFTER_PIECES * 0.1
    assert rounds.step_ends_one([A], [A], 1.0)
    assert not rounds.step_ends_one([B], [A, B, C], 1.0 + apart_s - 0.001)
    assert rounds.step_ends_one([C], [A, B, C], 1.0 + apart_s + 1e-6), "the last piece was short, the others were not"
    for _ in range(PIECES_SEEN):
        rounds.piece_done(8.0)
    later_s = 1.0 + apart_s + SLOT_AFTER_PIECES * 0.008 + 2e-6
    assert rounds.step_ends_one([A], [A, B, C], later_s)
    rounds.all_is_read()
    assert not rounds.step_ends_one([B], [A, B, C], later_s + apart_s), "whatever comes next may come in longer pieces"


WHAT_HAPPENS = ("step", "slot", "piece", "idle", "left", "over")


@given(
    happens=st.lists(st.tuples(st.sampled_from(WHAT_HAPPENS), st.sampled_from([A, B, C])), max_size=12),
    waits=st.booleans(),
    now=st.floats(0.0, 5.0),
)
def test_a_question_changes_nothing(happens: list[tuple[str, SessionId]], waits: bool, now: float) -> None:
    turns = Turns()
    for at, (what, session) in enumerate(happens):
        match what:
            case "step" | "slot":
                turns.step_begins()
                turns.step_ended(slot=what == "slot")
            case "piece":
                turns.piece_begins()
            case "idle":
                turns.idles()
            case "left":
                turns.left([session], 100.0, 20.0, now=at / 3)
            case _:
                turns.over(session)
    before = copy.deepcopy(vars(turns))
    asked = [turns.piece_is_next(waits, now) for _ in range(3)]
    assert len(set(asked)) == 1
    turns.held_until_s(now)
    turns.missing(A, now)
    assert vars(turns) == before
