"""Tokens that were let in: for a day, under one term and until a token is revoked, and not for ever many."""

from __future__ import annotations

import pytest

from swarmnode.cluster.let_in import LET_IN_S, MAX_LET_IN, LetIn, Under

NOW = 1e9
UNDER = (3, 1)


@pytest.mark.parametrize(
    ("token", "under", "later_s", "held"),
    [
        (b"a", UNDER, 0.0, True),
        (b"a", UNDER, LET_IN_S - 1, True),
        (b"a", UNDER, LET_IN_S, False),
        (b"a", UNDER, -1.0, False),
        (b"a", (4, 1), 0.0, False),
        (b"a", (3, 2), 0.0, False),
        (b"b", UNDER, 0.0, False),
        (b"", (-1, 0), 0.0, False),
    ],
)
def test_a_token_counts_for_a_day_under_its_term_and_until_the_next_revocation(
    token: bytes, under: Under, later_s: float, held: bool
) -> None:
    let_in = LetIn()
    let_in.admit(b"a", UNDER, NOW)
    assert let_in.holds(token, under, NOW + later_s) is held


def test_what_is_refused_or_forgotten_is_out() -> None:
    let_in = LetIn()
    for token in (b"a", b"b"):
        let_in.admit(token, UNDER, NOW)
    let_in.refuse(b"a")
    let_in.refuse(b"never let in")
    assert [let_in.holds(token, UNDER, NOW) for token in (b"a", b"b")] == [False, True]
    let_in.forget_all()
    assert not let_in.holds(b"b", UNDER, NOW)


def test_the_oldest_make_room() -> None:
    let_in = LetIn()
    tokens = [bytes([number]) for number in range(MAX_LET_IN + 1)]
    for token in (*tokens[:-1], tokens[0], tokens[-1]):
        let_in.admit(token, UNDER, NOW)
    assert [token for token in tokens if not let_in.holds(token, UNDER, NOW)] == [tokens[1]]
