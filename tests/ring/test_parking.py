"""K5: which parked conversation a prompt can continue, and who goes first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.ids import SessionId
from swarmnode.ring.parking import PARK_MIN, Parked, Parking, Prefix, packed


def parked(session: int, *tokens: int, pins: int = 0) -> Parked:
    return Parked(SessionId(session), 0, packed(tokens), len(tokens), pins)


def parking(*all_parked: Parked, exact: bool = False) -> Parking:
    made = Parking(exact=exact)
    for one in all_parked:
        made.add(one)
    return made


def best(made: Parking, *prompt: int) -> tuple[int, int] | None:
    prefix = made.longest(prompt)
    return None if prefix is None else (prefix.source.id, prefix.length)


SYSTEM = tuple(range(1000, 1000 + PARK_MIN))


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        pytest.param((*SYSTEM, 1, 2, 9), (1, PARK_MIN + 2), id="the longest of two"),
        pytest.param((*SYSTEM, 3, 9), (2, PARK_MIN + 1), id="the other"),
        pytest.param((*SYSTEM, 1, 2, 3, 4), (1, PARK_MIN + 3), id="as a whole"),
        pytest.param((*SYSTEM, 1, 2, 3), (1, PARK_MIN + 2), id="the prompt's last token is left to be read"),
        pytest.param((*SYSTEM, 7), (2, PARK_MIN), id="the system prompt alone: the one last used"),
        pytest.param(SYSTEM, None, id="too short without its last token"),
        pytest.param((*SYSTEM[:-1], 7, 8, 9), None, id="shares less than is worth it"),
    ],
)
def test_the_longest_shared_beginning_is_found(prompt: tuple[int, ...], found: tuple[int, int] | None) -> None:
    made = parking(parked(1, *SYSTEM, 1, 2, 3), parked(2, *SYSTEM, 3, 4))
    assert best(made, *prompt) == found


def test_of_equals_one_that_can_be_taken_over_as_a_whole_is_chosen() -> None:
    made = parking(parked(1, *SYSTEM, 5), parked(2, *SYSTEM, 5, 6), parked(3, *SYSTEM, 5, 7))
    assert best(made, *SYSTEM, 5, 8) == (1, PARK_MIN + 1)


def test_using_one_makes_it_the_last_to_go() -> None:
    one, two = parked(1, *SYSTEM), parked(2, *SYSTEM)
    made = parking(one, two)
    made.add(one)
    assert [p.id for p in made.idle()] == [2, 1]
    assert [p.id for p in made.idle(but=two)] == [1]
    two.pins = 1
    assert [p.id for p in made.idle()] == [1]
    assert made.tokens == 2 * PARK_MIN


def test_a_recurrent_state_is_continued_at_its_end_only() -> None:
    made = parking(parked(1, *SYSTEM, 1, 2, 3), parked(2, *SYSTEM, 1), exact=True)
    assert best(made, *SYSTEM, 1, 2, 9) == (2, PARK_MIN + 1)
    assert best(made, *SYSTEM, 1, 2, 3) == (2, PARK_MIN + 1)
    assert best(made, *SYSTEM, 1, 2, 3, 4) == (1, PARK_MIN + 3)
    assert best(made, *SYSTEM, 1) is None


def test_what_a_stage_lacks_is_not_continued() -> None:
    one = parked(1, *SYSTEM, 1)
    made = parking(one, parked(2, *SYSTEM))
    prompt = (*SYSTEM, 1, 2)
    assert made.longest(prompt) == Prefix(one, PARK_MIN + 1)
    made.spoil(one)
    assert best(made, *prompt) == (2, PARK_MIN)


def test_the_answer_to_a_prompt_that_waits_follows_what_comes_and_goes() -> None:
    made, prompt = parking(), (*SYSTEM, 1, 2)
    assert made.longest(prompt) is None
    one, two = parked(1, *SYSTEM), parked(2, *SYSTEM, 1)
    for change, found in [(made.add, one), (made.add, two), (made.remove, two), (made.remove, one)]:
        change(found)
        prefix = made.longest(prompt)
        assert (prefix.source.id if prefix is not None else None) == next(iter(reversed(made.ids)), None)


tokens = st.lists(st.integers(0, 1), min_size=1, max_size=PARK_MIN + 12).map(tuple)
mostly_shared = st.tuples(st.integers(PARK_MIN - 2, PARK_MIN + 9), tokens).map(lambda t: (5,) * t[0] + t[1])


@given(prompt=mostly_shared, kept=st.lists(mostly_shared | tokens, max_size=8), exact=st.booleans())
def test_the_same_as_counting_token_by_token(prompt: tuple[int, ...], kept: list[tuple[int, ...]], exact: bool) -> None:
    made = parking(*(parked(i, *one) for i, one in enumerate(kept)), exact=exact)

    def shared(one: tuple[int, ...]) -> int:
        most = min(len(one), len(prompt) - 1)
        n = next((i for i in range(most) if one[i] != prompt[i]), most)
        return 0 if n < PARK_MIN or (exact and n < len(one)) else n

    prefix = made.longest(prompt)
    assert (prefix.length if prefix is not None else 0) == max(map(shared, kept), default=0)
    if prefix is not None:
        assert shared(kept[prefix.source.id]) == prefix.length
