"""B6: what is known of a step's cost from a start table and from real steps, and what is made of the gaps."""

from __future__ import annotations

import pytest

from swarmnode.ring.cost_model import SEEN_WINDOW, CostModel, CostTable, StageCosts


def table(**start: float) -> CostTable:
    made = CostTable()
    made.start({int(name[1:]): ms for name, ms in start.items()})
    return made


@pytest.mark.parametrize(
    ("size", "between", "at_best"),
    [
        pytest.param(1, 10, 10, id="known"),
        pytest.param(3, 25, 20, id="between: a line, or the lower neighbour until it ran"),
        pytest.param(8, 50, 50, id="above: the last slope"),
    ],
)
def test_sizes_that_are_not_in_the_table(size: int, between: float, at_best: float) -> None:
    costs = table(n1=10, n2=20, n4=30)
    assert costs.between(size) == between
    assert costs.at_best(size) == at_best


def test_a_single_known_size_scales_in_proportion() -> None:
    assert [table(n4=40).between(n) for n in (1, 2, 8)] == [10, 20, 80]
    assert CostTable().between(3) is None
    assert CostTable().at_best(3) is None


def test_one_step_is_no_knowledge_and_a_hiccup_is_outlived() -> None:
    costs = table(n1=10)
    costs.observe(2, 500.0)
    assert 2 not in costs.known()
    costs.observe(2, 14.0)
    assert costs.known()[2] == 14.0
    for _ in range(3):
        costs.observe(2, 15.0)
    costs.observe(2, 900.0)
    assert costs.known()[2] == 15.0


def test_the_estimate_follows_a_growing_context() -> None:
    costs = table(n1=10)
    for ms in range(10, 10 + 2 * SEEN_WINDOW):
        costs.observe(1, float(ms))
    assert costs.known()[1] == 10 + 1.5 * SEEN_WINDOW - 0.5


def test_what_has_not_run_is_scaled_by_what_has() -> None:
    """A start table is measured on an idle machine; with both stages busy all of it is dearer."""
    costs = table(n1=10, n2=20, n8=80)
    for _ in range(2):
        costs.observe(1, 15.0)
    assert costs.known() == {1: 15.0, 2: 30.0, 8: 120.0}


def test_the_model_splits_a_steps_time_into_compute_and_road() -> None:
    model = CostModel(2)
    assert not model.plans
    for stage in range(2):
        model.start(stage, StageCosts({1: 10.0, 4: 40.0}, {64: 100.0}))
    assert model.plans
    assert model.group_ms(1) == [10.0, 10.0]
    assert model.piece_ms(64) == [100.0, 100.0]
    for wall_ms in (45.0, 41.0, 300.0):
        model.observe_group(1, (11.0, 10.0), wall_ms)
    assert model.road_ms == 24.0
    model.observe_piece(64, (100.0, 100.0), 200.0 + 24.0 + 128.0)
    assert model.transfer_ms == 2.0


def test_new_links_are_measured_anew_and_what_steps_cost_stays_known() -> None:
    """A ring that is linked anew hears the costs measured at load once more: they take nothing back."""
    model = CostModel(1)
    model.start(0, StageCosts({1: 10.0, 4: 40.0}, {64: 100.0}))
    for _ in range(2):
        model.observe_group(4, (20.0,), 70.0)
        model.observe_piece(64, (90.0,), 90.0 + 50.0 + 64.0)
    assert (model.road_ms, model.transfer_ms) == (50.0, 1.0)
    model.forget_links()
    model.start(0, StageCosts({1: 10.0, 4: 40.0}, {64: 100.0}))
    assert (model.road_ms, model.transfer_ms) == (0.0, 0.0)
    assert (model.group_ms(4), model.group_ms(1), model.piece_ms(64)) == ([20.0], [5.0], [90.0])
    model.observe_road(8.0)
    assert model.road_ms == 8.0


def test_pieces_of_a_stage_that_was_never_seen_are_unknown() -> None:
    model = CostModel(2)
    model.start(0, StageCosts({1: 10.0}, {64: 100.0}))
    assert model.piece_ms(64) is None
    assert not model.plans
