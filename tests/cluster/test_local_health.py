"""A loop's lateness as a score: rows of when ticks came."""

from __future__ import annotations

import pytest

from swarmnode.cluster.local_health import LATE_S, MAX_SCORE, TICK_S, LocalHealth


def scores(late_s: list[float]) -> list[int]:
    """After ticks that came this much later than they were due."""
    health, now, found = LocalHealth(), 100.0, []
    due_s = health.tick(now)
    for late in late_s:
        due_s = health.tick(due_s + late)
        found.append(health.score)
    return found


@pytest.mark.parametrize(
    ("late_s", "expected"),
    [
        ([0.0, LATE_S, 0.1], [0, 0, 0]),
        ([LATE_S + 0.01, 0, 0], [1, 0, 0]),
        ([3.2, 0, 0, 0, 0, 0], [4, 3, 2, 1, 0, 0]),
        ([0.6, 0.6, 0.6], [1, 2, 3]),
        ([1000.0, 1000.0], [MAX_SCORE, MAX_SCORE]),
    ],
)
def test_late_ticks_cost_points_and_punctual_ones_give_them_back(late_s: list[float], expected: list[int]) -> None:
    assert scores(late_s) == expected


def test_a_stall_of_any_length_is_forgotten_within_seconds() -> None:
    assert scores([8 * 3600.0, *[0.0] * MAX_SCORE])[-1] == 0
    assert MAX_SCORE * TICK_S < 10
