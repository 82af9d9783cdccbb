"""P2: whose turn it is, a decode step's or a prompt piece's."""

from __future__ import annotations

import pytest

from swarmnode.ids import SessionId
from swarmnode.ring.turns import Turns

A, B, C = (SessionId(n) for n in (1, 2, 3))


def after_a_piece(ms: float = 100.0) -> Turns:
    turns = Turns()
    turns.piece_begins()
    turns.piece_ended(ms, now=1.0)
    return turns


def step(turns: Turns, *sessions: SessionId, ms: float = 20.0) -> None:
    turns.step_begins(sessions)
    turns.step_ended(ms)
    turns.idles()


def waiting(*sessions: SessionId, delayed: bool = False) -> list[tuple[list[SessionId], bool]]:
    return [([session], delayed) for session in sessions]


def test_every_session_steps_once_between_two_pieces() -> None:
    turns = after_a_piece()
    step(turns, A)
    assert turns.piece_is_next(waiting(A), 2.0)
    assert not turns.piece_is_next(waiting(A, B), 2.0)
    turns.piece_begins()
    assert not turns.piece_is_next(waiting(A), 2.0)


def test_steps_that_took_as_long_as_the_piece_let_the_next_one_in() -> None:
    turns = after_a_piece(100.0)
    step(turns, A, ms=60.0)
    assert not turns.piece_is_next(waiting(C), 2.0)
    step(turns, B, ms=40.0)
    assert turns.piece_is_next(waiting(C), 2.0)


def test_what_has_waited_for_a_piece_goes_before_the_next_whatever_else() -> None:
    turns = after_a_piece(1.0)
    step(turns, A, ms=500.0)
    assert not turns.piece_is_next(waiting(A, delayed=True), 2.0)


def test_what_arrived_before_a_piece_ended_has_waited_for_it() -> None:
    turns = after_a_piece()
    assert turns.arrived([A], 0.9)
    assert not turns.arrived([A], 1.0)
    assert not Turns().arrived([A], 0.0)


def test_no_piece_begins_while_a_step_is_late_and_it_goes_first_when_it_comes() -> None:
    """A round takes 100 ms, of which 20 were spent here: with a twentieth of grace it is due 85 ms after it left."""
    turns = Turns()
    step(turns, A)
    turns.left([A], 100.0, 20.0, now=1.0)
    assert turns.piece_is_next([], 1.084)
    assert not turns.piece_is_next([], 1.086)
    assert turns.arrived([A], 1.3)
    assert turns.piece_is_next([], 1.3)
    turns.left([A], 100.0, 20.0, now=2.0)
    assert not turns.arrived([A], 2.08)


@pytest.mark.parametrize(("round_ms", "given_up_s"), [(100.0, 1.585), (400.0, 2.6)])
def test_a_step_that_is_later_than_a_piece_takes_is_waited_for_no_longer(round_ms: float, given_up_s: float) -> None:
    """It waits for memory, or its link stalls: prompts must not stand still with it."""
    turns = Turns()
    turns.left([A], round_ms, 20.0, now=1.0)
    assert turns.held_until_s(1.5) == pytest.approx(given_up_s)
    assert not turns.piece_is_next([], given_up_s - 0.001)
    assert turns.piece_is_next([], given_up_s + 0.001)


def test_a_session_that_ended_is_not_waited_for() -> None:
    turns = Turns()
    turns.left([A, B], 100.0, 20.0, now=1.0)
    turns.over(A)
    assert not turns.piece_is_next([], 1.2)
    turns.over(B)
    assert turns.piece_is_next([], 1.2)


def test_where_somebody_is_always_late_a_piece_that_was_held_for_a_round_follows_the_next() -> None:
    turns = after_a_piece(1.0)
    turns.left([C], 100.0, 20.0, now=1.0)
    taken: list[bool] = []
    for at_s in (1.2, 1.3, 1.4, 1.5, 1.6, 1.7):
        session = (A, B, C)[len(taken) % 3]
        turns.arrived([session], at_s)
        turns.step_begins([session])
        turns.step_ended(10.0)
        turns.left([session], 1.0, 1.0, at_s)
        taken.append(turns.piece_is_next([], at_s + 0.05))
    assert taken == [False] * 5 + [True]
