"""P2: whose turn it is, a decode step's or a prompt piece's."""

from __future__ import annotations

from swarmnode.ids import SessionId
from swarmnode.ring.turns import Turns

A, B, C = (SessionId(n) for n in (1, 2, 3))


def after_a_piece(ms: float = 100.0) -> Turns:
    turns = Turns()
    turns.piece_begins()
    turns.piece_ended(ms, now=1.0)
    return turns


def step(turns: Turns, session: SessionId, ms: float) -> None:
    turns.step_begins([session])
    turns.step_ended(ms)


def test_every_session_steps_once_between_two_pieces() -> None:
    turns = after_a_piece()
    step(turns, A, 20.0)
    assert not turns.step_goes_first([A], delayed=False)
    assert turns.step_goes_first([A, B], delayed=False)
    turns.piece_begins()
    assert turns.step_goes_first([A], delayed=False)


def test_steps_that_took_as_long_as_the_piece_let_the_next_one_in() -> None:
    turns = after_a_piece(100.0)
    step(turns, A, 60.0)
    assert turns.step_goes_first([C], delayed=False)
    step(turns, B, 40.0)
    assert not turns.step_goes_first([C], delayed=False)


def test_what_has_waited_for_a_piece_goes_before_the_next_whatever_else() -> None:
    turns = after_a_piece(1.0)
    step(turns, A, 500.0)
    assert turns.step_goes_first([A], delayed=True)


def test_what_arrived_before_a_piece_ended_has_waited_for_it() -> None:
    turns = after_a_piece()
    assert turns.arrived_during_piece(0.9)
    assert not turns.arrived_during_piece(1.0)
    assert not Turns().arrived_during_piece(0.0)
