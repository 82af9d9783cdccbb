"""Balanced cuts: against brute force, and the cases placement relies on."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.cluster.partition import balanced_boundaries


def stage_costs(costs: list[int], first: int, last: int, boundaries: tuple[int, ...]) -> list[int]:
    sums = [sum(costs[a:b]) for a, b in pairwise((0, *boundaries, len(costs)))]
    sums[0] += first
    sums[-1] += last
    return sums


def rank(costs: list[int], first: int, last: int, boundaries: tuple[int, ...]) -> tuple[int, int]:
    sums = stage_costs(costs, first, last, boundaries)
    return max(sums), sum(s * s for s in sums)


@settings(deadline=None)
@given(
    costs=st.lists(st.integers(0, 50), min_size=1, max_size=9),
    first=st.integers(0, 120),
    last=st.integers(0, 120),
    data=st.data(),
)
def test_no_cut_has_a_smaller_peak_or_is_more_even(
    costs: list[int], first: int, last: int, data: st.DataObject
) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    every_cut = combinations(range(1, len(costs)), stages - 1)
    best = min(rank(costs, first, last, cut) for cut in every_cut)
    assert rank(costs, first, last, balanced_boundaries(costs, first, last, stages)) == best


def test_a_slow_stage_may_do_better_with_more_layers_before_it() -> None:
    assert balanced_boundaries([0, 0, 4, 3, 0], 0, 9, 3, [1, 5, 1]) == (3, 4)


@settings(deadline=None)
@given(
    costs=st.lists(st.integers(0, 50), min_size=1, max_size=8),
    last=st.integers(0, 120),
    data=st.data(),
)
def test_no_cut_over_uneven_stages_has_a_smaller_peak(costs: list[int], last: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    paces = data.draw(st.lists(st.integers(1, 20), min_size=stages, max_size=stages))

    def peak(cut: tuple[int, ...]) -> int:
        return max(cost * pace for cost, pace in zip(stage_costs(costs, 0, last, cut), paces, strict=True))

    best = min(map(peak, combinations(range(1, len(costs)), stages - 1)))
    assert peak(balanced_boundaries(costs, 0, last, stages, paces)) == best


def test_a_stage_that_is_three_times_as_fast_gets_three_times_as_much() -> None:
    assert balanced_boundaries([1] * 12, 0, 0, 2, [1.0, 3.0]) == (9,)
    assert balanced_boundaries([1] * 12, 0, 0, 2, [3.0, 1.0]) == (3,)


@pytest.mark.parametrize(
    ("costs", "first", "last", "stages", "expected"),
    [
        ([1] * 30, 8, 8, 2, (15,)),
        ([1] * 30, 0, 0, 3, (10, 20)),
        ([1] * 30, 0, 0, 1, ()),
        ([1] * 4, 0, 0, 4, (1, 2, 3)),
        ([1] * 10, 100, 0, 3, (1, 5)),  # the heavy embedding leaves the first stage one layer, the rest stays even
        ([1.5, 0.5, 1.0, 1.0], 0.0, 0.0, 2, (2,)),
        ([9, 1, 1, 1, 1], 0, 0, 2, (1,)),
    ],
)
def test_cuts(costs: list[float], first: float, last: float, stages: int, expected: tuple[int, ...]) -> None:
    assert balanced_boundaries(costs, first, last, stages) == expected


@pytest.mark.parametrize("stages", [0, -1, 4])
def test_a_stage_count_that_leaves_an_empty_stage_is_refused(stages: int) -> None:
    with pytest.raises(ValueError, match="3 layers cannot make"):
        balanced_boundaries([1, 1, 1], 0, 0, stages)


def test_a_negative_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="below zero"):
        balanced_boundaries([1, -1, 1], 0, 0, 2)
