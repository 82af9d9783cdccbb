"""B6: the planner of groups against every partition there is, over costs of any shape."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sims.bound import cycle_ms, partitions
from swarmnode.ring.partition import best_partition

SPLIT = ({1: 112, 2: 163, 3: 214, 4: 265}, {1: 120, 2: 130, 3: 147, 4: 211})


@st.composite
def step_costs(draw: st.DrawFn) -> list[list[float]]:
    """Two or three stages, 12 row counts each: never cheaper with a row more, with jumps."""
    stages = []
    for _ in range(draw(st.integers(2, 3))):
        increases = draw(st.lists(st.sampled_from([0, 1, 5, 50, 200]), min_size=12, max_size=12))
        costs, ms = [], draw(st.integers(1, 150))
        for increase in increases:
            ms += increase
            costs.append(float(ms))
        stages.append(costs)
    return stages


@given(
    costs=step_costs(), sessions=st.integers(1, 12), road_ms=st.sampled_from([0, 21, 100, 400]), cap=st.integers(0, 6)
)
@settings(deadline=None, max_examples=150)
def test_the_plan_is_the_best_of_all_partitions(
    costs: list[list[float]], sessions: int, road_ms: float, cap: int
) -> None:
    plan = best_partition(sessions, lambda rows: [stage[rows - 1] for stage in costs], road_ms, cap)
    stages = [lambda rows, stage=stage: stage[rows - 1] for stage in costs]
    best = min(cycle_ms(groups, stages, road_ms) for groups in partitions(sessions, cap or sessions))
    assert sum(plan.sizes) == sessions
    assert max(plan.sizes) <= (cap or sessions)
    assert plan.cycle_ms == cycle_ms(plan.sizes, stages, road_ms)
    assert plan.cycle_ms == best


def test_the_sources_two_pcs_are_planned_as_by_hand() -> None:
    plan = best_partition(8, lambda rows: [stage.get(rows, 999.0) for stage in SPLIT], 21.0)
    assert (plan.sizes, plan.stage_ms, plan.longest_ms) == ((4, 4), 530, 497)


def test_among_equal_cycles_the_one_with_most_slack_wins() -> None:
    """Four sessions, one dominant stage without batching gain: 4 × 1 and 2 × 2 cycle alike, 4 × 1 waits less."""
    assert best_partition(4, lambda rows: [100.0 * rows, 1.0], 20.0).sizes == (1, 1, 1, 1)


def test_a_plan_is_held_against_new_costs() -> None:
    plan = best_partition(2, lambda rows: [10.0 * rows, 10.0], 0.0)
    assert plan.at_costs(lambda rows: [20.0 * rows, 10.0], 0.0).cycle_ms == 2 * plan.cycle_ms


@pytest.mark.parametrize("sessions", [17, 20, 24])
@pytest.mark.parametrize("road_ms", [0.0, 21.0, 200.0])
def test_two_sizes_are_enough_for_many(sessions: int, road_ms: float) -> None:
    def per_stage(rows: int) -> list[float]:
        whole, rest = divmod(rows, 4)
        return [61.0 + 51.0 * rows, 211.0 * whole + (0, 120.0, 130.0, 147.0)[rest]]

    plan = best_partition(sessions, per_stage, road_ms)
    stages = [lambda rows: per_stage(rows)[0], lambda rows: per_stage(rows)[1]]
    best = min(cycle_ms(groups, stages, road_ms) for groups in partitions(sessions, sessions))
    assert plan.cycle_ms <= 1.01 * best
