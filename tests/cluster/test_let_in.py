"""Tokens that were let in: for a day, under one term, and not for ever many."""

from __future__ import annotations

import pytest

from swarmnode.cluster.let_in import LET_IN_S, MAX_LET_IN, LetIn

NOW = 1e9


@pytest.mark.parametrize(
    ("token", "term", "later_s", "held"),
    [
        (b"a", 3, 0.0, True),
        (b"a", 3, LET_IN_S - 1, True),
        (b"a", 3, LET_IN_S, False),
        (b"a", 3, -1.0, False),
        (b"a", 4, 0.0, False),
        (b"b", 3, 0.0, False),
        (b"", -1, 0.0, False),
    ],
)
def test_a_token_counts_for_a_day_under_its_term(token: bytes, term: int, later_s: float, held: bool) -> None:
    let_in = LetIn()
    let_in.admit(b"a", 3, NOW)
    assert let_in.holds(token, term, NOW + later_s) is held


def test_what_is_refused_or_forgotten_is_out() -> None:
    let_in = LetIn()
    for token in (b"a", b"b"):
        let_in.admit(token, 1, NOW)
    let_in.refuse(b"a")
    let_in.refuse(b"never let in")
    assert [let_in.holds(token, 1, NOW) for token in (b"a", b"b")] == [False, True]
    let_in.forget_all()
    assert not let_in.holds(b"b", 1, NOW)


def test_the_oldest_make_room() -> None:
    let_in = LetIn()
    tokens = [bytes([number]) for number in range(MAX_LET_IN + 1)]
    for token in (*tokens[:-1], tokens[0], tokens[-1]):
        let_in.admit(token, 1, NOW)
    assert [token for token in tokens if not let_in.holds(token, 1, NOW)] == [tokens[1]]
