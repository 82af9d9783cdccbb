"""B6, P2: which group and which piece the cost schedule sends, by what is ready and what is under way."""

from __future__ import annotations

import pytest
from ring_world import head_config

from swarmnode.ring.cost_model import CostModel, StageCosts
from swarmnode.ring.cost_schedule import PIECE_BYTES_IN_FLIGHT, PLAN_STEPS, CostSchedule, make_schedule
from swarmnode.ring.head import Head
from swarmnode.ring.head_messages import RingMeasured
from swarmnode.ring.schedule import Pass, Schedule, SourceSchedule

BATCHES_WELL = {1: 100.0, 2: 101.0, 4: 103.0, 8: 107.0}


def schedule(
    group_ms: dict[int, float] | None = None, piece_ms: dict[int, float] | None = None, **changes: object
) -> Schedule:
    costs = CostModel(2)
    for stage in range(2):
        costs.start(stage, StageCosts(group_ms or BATCHES_WELL, piece_ms or {}))
    costs.observe_road(20.0)
    return CostSchedule(head_config(2, prefill_chunk=256, **changes), costs)


def test_without_costs_the_sources_rules_hold() -> None:
    config = head_config(2)
    costs = CostModel(2)
    ours, theirs = CostSchedule(config, costs), SourceSchedule(config, costs)
    for now in (Pass(5), Pass(1, (3, 2)), Pass(7, (1,))):
        assert ours.group_rows(now) == theirs.group_rows(now)


@pytest.mark.parametrize(
    ("ready", "in_flight", "rows"),
    [
        pytest.param(8, (), 4, id="the first of two fours"),
        pytest.param(4, (4,), 4, id="the second"),
        pytest.param(3, (4,), 3, id="who leaves is not waited for"),
        pytest.param(1, (3, 4), 0, id="both groups under way: the newcomer joins the next that returns"),
        pytest.param(7, (1,), 4, id="a lone one in flight stands for a group"),
        pytest.param(1, (), 1, id="a lone user never waits"),
    ],
)
def test_a_group_is_what_the_plan_lacks(ready: int, in_flight: tuple[int, ...], rows: int) -> None:
    assert schedule().group_rows(Pass(ready, in_flight)) == rows


@pytest.mark.parametrize(("eight_ms", "rows"), [(103.0, 4), (95.0, 8)])
def test_a_plan_stays_until_another_is_clearly_better(eight_ms: float, rows: int) -> None:
    """Two groups of four take 2 x 104 ms and the road of 20, one group of eight 226 or 210: a change costs about a
    round, so that 1 % is not worth it."""
    costs, known = CostModel(2), {n: 100.0 + n for n in range(1, 9)}
    for stage in range(2):
        costs.start(stage, StageCosts(known))
    costs.observe_road(20.0)
    ours = CostSchedule(head_config(2), costs)
    assert ours.group_rows(Pass(8)) == 4
    for _ in range(PLAN_STEPS):
        for n, ms in ((2, known[2]), (4, known[4]), (8, eight_ms)):
            costs.observe_group(n, (ms, ms), 2 * ms + 20.0)
    assert ours.group_rows(Pass(8)) == rows


def test_a_cap_is_kept() -> None:
    assert schedule(max_group=2).group_rows(Pass(8)) == 2


@pytest.mark.parametrize(
    ("scheme", "measured", "configured", "rows"),
    [
        pytest.param("cost", False, 0, 2, id="nothing is known: the card's rule"),
        pytest.param("cost", True, 0, 4, id="measured costs say more than a rule (B6)"),
        pytest.param("source", True, 0, 2, id="the source's rules do not ask for costs"),
        pytest.param("source", True, 3, 3, id="what was configured goes before the card's rule"),
    ],
)
def test_b4_an_old_cards_cap_holds_where_costs_do_not_tell(
    scheme: str, measured: bool, configured: int, rows: int
) -> None:
    head = Head(head_config(2, schedule=scheme, max_group=configured))
    costs = StageCosts(BATCHES_WELL) if measured else None
    head.receive(RingMeasured(4096, (costs, costs), max_group=2), 0.0)
    assert make_schedule(head.config, head.costs).group_rows(Pass(8)) == rows


PIECES = {32: 100.0, 64: 180.0, 128: 350.0, 256: 700.0}


@pytest.mark.parametrize(
    ("decoding", "factor", "positions"),
    [
        pytest.param(1, 1.0, 128, id="the largest that costs no more than 500 ms"),
        pytest.param(1, 0.5, 256, id="a fast card"),
        pytest.param(1, 9.0, 32, id="nothing fits: the smallest"),
    ],
)
def test_p2_pieces_are_as_large_as_those_who_decode_can_bear(decoding: int, factor: float, positions: int) -> None:
    costs = {n: ms * factor for n, ms in PIECES.items()}
    assert schedule(piece_ms=costs).piece_positions(Pass(0, (1,) * decoding), 2000) == positions


STEEP = {32: 90.0, 64: 170.0, 128: 330.0, 256: 650.0}
FLAT = {32: 600.0, 64: 610.0, 128: 630.0, 256: 650.0}
CURVED = {32: 150.0, 64: 200.0, 128: 330.0, 256: 650.0}


@pytest.mark.parametrize(
    ("costs", "now", "left", "positions"),
    [
        pytest.param(STEEP, Pass(0), 600, 67, id="small ones cost little more: later stages begin early"),
        pytest.param(STEEP, Pass(0), 2000, 250, id="a long prompt has little of it"),
        pytest.param(STEEP, Pass(0), 256, 32, id="all the more of a short prompt"),
        pytest.param(STEEP, Pass(0), 62, 31, id="equal ones"),
        pytest.param(STEEP, Pass(0), 33, 33, id="no piece for one position"),
        pytest.param(STEEP, Pass(0), 20, 20, id="less than the smallest"),
        pytest.param(FLAT, Pass(0), 2000, 250, id="a card: large ones cost little more"),
        pytest.param(FLAT, Pass(0), 62, 62, id="a short prompt on a card"),
        pytest.param(CURVED, Pass(0), 512, 128, id="in between"),
        pytest.param(STEEP, Pass(0, prompts=2), 600, 67, id="as many prompts as stages"),
        pytest.param(STEEP, Pass(0, prompts=3), 600, 256, id="more of them keep the stages at work"),
        pytest.param({256: 650.0}, Pass(0), 2000, 256, id="nothing to compare"),
    ],
)
def test_p2_a_prompt_alone_is_read_in_the_pieces_that_are_done_soonest(
    costs: dict[int, float], now: Pass, left: int, positions: int
) -> None:
    assert schedule(piece_ms=costs).piece_positions(now, left) == positions


def test_p2_slow_steps_bear_pieces_of_three_of_them() -> None:
    slow = {1: 240.0, 2: 260.0, 4: 300.0, 8: 400.0}
    assert schedule(slow, PIECES).piece_positions(Pass(0, (1,)), 2000) == 256


def test_p2_a_piece_of_unknown_cost_is_small_while_somebody_decodes() -> None:
    assert schedule().piece_positions(Pass(0, (1,)), 2000) == 32
    assert schedule().piece_positions(Pass(0), 2000) == 256


def test_p2_the_rest_of_a_prompt_is_one_piece() -> None:
    assert schedule(piece_ms=PIECES).piece_positions(Pass(0), 7) == 7


def test_p2_pieces_in_flight_fill_the_way_and_no_more() -> None:
    """Two stages of 700 ms, 20 ms of road: three under way keep both busy with one to spare."""
    ours = schedule(piece_ms=PIECES)
    sent = [n for n in range(9) if ours.piece_positions(Pass(0, (), 3, n, 256 * n), 2000)]
    assert sent == [0, 1, 2, 3]


def test_p2_pieces_in_flight_are_bounded_by_bytes() -> None:
    ours = schedule(piece_ms=PIECES)
    heavy = PIECE_BYTES_IN_FLIGHT // 256
    assert ours.piece_positions(Pass(0, (), 3, 1, 256, heavy), 2000) == 256  # two at least, or nothing overlaps
    assert ours.piece_positions(Pass(0, (), 3, 2, 512, heavy), 2000) == 0


def test_p2_pieces_are_as_small_as_lets_all_stages_have_one_where_few_bytes_may_be_under_way() -> None:
    costs = CostModel(8)
    for stage in range(8):
        costs.start(stage, StageCosts(BATCHES_WELL, CURVED))
    ours = CostSchedule(head_config(8, prefill_chunk=256), costs)
    assert ours.piece_positions(Pass(0), 2000) == 125
    assert ours.piece_positions(Pass(0, bytes_per_position=PIECE_BYTES_IN_FLIGHT // 256), 2000) == 33


def test_p1_pieces_that_were_asked_for_larger_than_usual_are_not_cut() -> None:
    """0, whole prompts, reaches the head as 1,024: more than any frame carries."""
    costs = CostModel(2)
    for stage in range(2):
        costs.start(stage, StageCosts(BATCHES_WELL, STEEP))
    sizes = {
        chunk: CostSchedule(head_config(2, prefill_chunk=chunk), costs).piece_positions(Pass(0), 900)
        for chunk in (256, 512, 1024)
    }
    assert sizes == {256: 225, 512: 512, 1024: 900}


def test_p2_all_pieces_of_a_prompt_are_alike() -> None:
    ours = schedule(piece_ms=STEEP)
    assert [ours.piece_positions(Pass(0), left, 600) for left in (600, 400, 100, 60, 20)] == [67, 67, 67, 60, 20]


def test_a_whole_prompt_is_sent_where_the_chunk_says_so() -> None:
    assert CostSchedule(head_config(2, prefill_chunk=0), CostModel(2)).piece_positions(Pass(0, (1,)), 999) == 999
