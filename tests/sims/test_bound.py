"""The bound against enumerations small enough to write down, and against every way to put sessions into groups."""

from __future__ import annotations

from itertools import product

import pytest

from sims.bound import bound_tokens_per_s, cycle_ms, partitions


def test_partitions_of_small_numbers_are_all_there() -> None:
    assert partitions(4, 4) == ((4,), (3, 1), (2, 2), (2, 1, 1), (1, 1, 1, 1))
    assert partitions(4, 2) == ((2, 2), (2, 1, 1), (1, 1, 1, 1))
    assert [len(partitions(n, n)) for n in (1, 5, 8, 12, 16)] == [1, 7, 22, 77, 231]


def test_a_cycle_by_hand() -> None:
    stages = [lambda rows: 10.0 * rows, lambda rows: 15.0]
    assert cycle_ms((2, 1), stages, 100.0) == 135.0  # the group of two: 20 + 15 + 100
    assert cycle_ms((2, 1), stages, 0.0) == 35.0
    assert cycle_ms((1,) * 4, stages, 0.0) == 60.0  # the second stage, four times


@pytest.mark.parametrize("users", range(1, 7))
@pytest.mark.parametrize("road_ms", [0.0, 50.0, 300.0])
def test_the_bound_is_the_best_of_all_assignments(users: int, road_ms: float) -> None:
    """Each user is put into each of as many groups as there are users: slow, obvious, with nothing left out."""
    stages = [lambda rows: 30.0 + 7.0 * rows, lambda rows: [0, 20, 22, 60, 61, 62, 90][rows]]
    best = 0.0
    for assignment in product(range(users), repeat=users):
        sizes = [assignment.count(group) for group in range(users) if group in assignment]
        busiest = max(sum(cost(size) for size in sizes) for cost in stages)
        slowest = max(sum(cost(size) for cost in stages) + road_ms for size in sizes)
        best = max(best, users / max(busiest, slowest) * 1e3)
    assert bound_tokens_per_s(users, stages, road_ms) == pytest.approx(best)


def test_a_cap_on_groups_is_kept() -> None:
    assert bound_tokens_per_s(4, [lambda rows: 10.0], 0.0) == pytest.approx(400.0)
    assert bound_tokens_per_s(4, [lambda rows: 10.0], 0.0, max_group=1) == pytest.approx(100.0)
