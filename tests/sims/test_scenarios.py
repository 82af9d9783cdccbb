"""The promised figures of the studies. Virtual time: they are exact, and the same on every machine."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sims.__main__ import main
from sims.engines import StageTable
from sims.report import percentile
from sims.ring import RingSpec, links_of
from sims.scenarios import chats, churn, failover, jitter, mixed, prompt, relay_cap, slow_uplink, stages, two_pcs
from sims.scenarios.decode import bound_of, steady
from sims.scenarios.two_pcs import TwoPcs
from sims.world import Request
from swarmnode.ring.head_messages import Sampled

SAME = 1e-3
"""Two runs at the same limit differ by the phase their windows cut them in."""


@pytest.mark.parametrize("case", two_pcs.SOURCE_FIGURES)
def test_two_pcs_the_sources_figures_come_out_within_a_tenth(case: str) -> None:
    measured = float(case.split(":")[0])
    assert two_pcs.run(two_pcs.SOURCE_FIGURES[case])["tokens_per_s"] == pytest.approx(measured, rel=0.1)


def test_two_pcs_waiting_for_a_batch_is_what_coalescing_does() -> None:
    """A batch that is kept together is eight rows on both stages and nothing overlaps: 468 + 8 x 20, 700, the trip."""
    arriving = two_pcs.SOURCE_FIGURES["5.8: one group, split on arrival"]
    waiting = two_pcs.run(replace(arriving, coalesce_ms=50))["tokens_per_s"]
    assert waiting == pytest.approx(5.75, abs=0.1)
    assert waiting > two_pcs.run(arriving)["tokens_per_s"] * 1.03


def test_two_pcs_eight_users_without_host_time() -> None:
    report = two_pcs.run(TwoPcs())
    assert report["bound_tokens_per_s"] == pytest.approx(15.1, abs=0.05)
    assert report["tokens_per_s"] == pytest.approx(15.119, abs=0.01)
    assert report["itl_p99_ms"] == pytest.approx(529.1, abs=0.1)
    # two groups of four: stage 0 is never idle, stage 1 has 2 x 211 ms of work in each of its rounds of 529
    assert report["utilisation"] == [1.0, pytest.approx(2 * 211 / 529.1, abs=0.005)]


def test_the_report_names_percentiles_of_the_first_token() -> None:
    """One user: the prompt is cached (a piece costs nothing), so its first token takes one trip round the ring."""
    report = two_pcs.run(TwoPcs(users=1, rtt_ms=60))
    assert (report["ttft_p50_ms"], report["ttft_p99_ms"]) == (60.0, 60.0)
    eight = two_pcs.run(TwoPcs())
    assert 21 <= eight["ttft_p50_ms"] <= eight["ttft_p99_ms"]


@pytest.mark.parametrize(("users", "rtt_ms"), [(1, 60), (2, 0), (4, 60), (6, 200), (8, 21), (16, 100)])
def test_two_pcs_costs_reach_the_bound_and_never_less_than_the_sources_rules(users: int, rtt_ms: float) -> None:
    """A part of `python -m sims two-pcs --grid`."""
    cost = two_pcs.run(TwoPcs(users=users, rtt_ms=rtt_ms))
    uneven = two_pcs.run(TwoPcs(users=users, rtt_ms=rtt_ms, jitter=0.1))
    source = two_pcs.run(TwoPcs(users=users, rtt_ms=rtt_ms, schedule="source"))
    assert cost["ratio"] >= 0.98
    assert uneven["ratio"] >= 0.95
    assert cost["ratio"] >= source["ratio"] - SAME


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_two_pcs_the_whole_grid_keeps_its_aims(seed: int) -> None:
    report = two_pcs.grid(seed)
    assert len(report["rows"]) == 30
    assert report["worst_cost"] >= 0.98
    assert report["worst_cost_jitter"] >= 0.95
    assert report["worst_against_source"] >= 1 - SAME
    assert report["worst_against_source_jitter"] >= 0.98


@pytest.mark.parametrize("rtt_ms", [0, 200])
def test_a_lone_user_pays_compute_and_one_trip_and_nothing_else(rtt_ms: float) -> None:
    assert two_pcs.run(TwoPcs(users=1, rtt_ms=rtt_ms))["itl_p99_ms"] == pytest.approx(112 + 120 + rtt_ms, abs=0.1)


def test_costs_that_jump_between_the_measured_rows_are_found_out() -> None:
    """Rows not split: 4 cost 671 ms, 3 only 147, and load measures 1, 2, 4, 8. A line through them would say 400."""
    report = two_pcs.run(TwoPcs(split_rows=False))
    assert report["ratio"] >= 0.98
    assert report["tokens_per_s"] > 2 * two_pcs.run(TwoPcs(split_rows=False, schedule="source"))["tokens_per_s"]


STAIRCASE = {1: 100.0, 2: 240.0, 3: 320.0, 4: 160.0, 5: 170.0, 6: 170.0, 7: 190.0, 8: 190.0}
"""A float32 matmul on a CPU, by rows: up to three rows go one by one, from four on they share a kernel."""
DEAR_THREE = {1: 200.0, 2: 240.0, 3: 400.0, 4: 250.0, 8: 260.0}
"""A line from 2 to 4 makes two groups of three the best plan for six users; really they take 800 ms, not 490."""


@pytest.mark.parametrize(
    ("costs", "users", "rtt_ms"),
    [(STAIRCASE, 3, 20), (STAIRCASE, 4, 20), (STAIRCASE, 8, 20), (DEAR_THREE, 3, 0), (DEAR_THREE, 6, 0)],
)
def test_a_staircase_of_costs_invents_no_cheap_three_and_hides_no_four(
    costs: dict[int, float], users: int, rtt_ms: float
) -> None:
    """Load measures 1, 2, 4 and 8 rows; what lies between is found out by running it."""
    spec = RingSpec((StageTable(costs),) * 2, links_of(2, rtt_ms))
    assert steady(spec.build(), users, bound_of(spec, users))["ratio"] >= 0.98


def test_a_cap_on_groups_holds_for_both_schedules() -> None:
    for schedule in ("cost", "source"):
        report = two_pcs.run(TwoPcs(max_batch=2, schedule=schedule))
        assert report["ratio"] == pytest.approx(1.0, abs=0.01)


def test_relay_cap_follows_its_formula() -> None:
    report = relay_cap.run()
    assert report["unpipelined"]["tokens_per_s"] == pytest.approx(1e3 / (180 + 2 * 21), rel=0.01)
    assert report["pipelined"]["tokens_per_s"] == pytest.approx(1e3 / 180, rel=0.01)
    by_flight = {row["in_flight"]: row["unpipelined"] for row in report["rows"]}
    assert by_flight[2] == pytest.approx(by_flight[8], rel=0.01)


@pytest.mark.parametrize("tokens", [1526, 256, 700, 4096])
def test_prompt_reaches_its_floor_on_any_line(tokens: int) -> None:
    report = prompt.run(tokens)
    for line in ("unlimited", "at_10_mbit_s"):
        assert report[line]["ratio"] <= 1.03
        assert report[line]["ours_s"] <= report[line]["source_rules_s"] + SAME
    if tokens == 1526:
        assert report["unlimited"]["waiting_for_each_s"] == pytest.approx(1526 / 256 * 9.7, rel=0.01)
        # by hand: 2.0 + 7.7 s and the round trip for the first piece, then 1,270 positions at 7.7 s for 256
        assert report["unlimited"]["floor_s"] == pytest.approx(2.0 + 0.021 + 1526 / 256 * 7.7, abs=1e-3)
        assert report["unlimited"]["floor_s"] == pytest.approx(47.92, abs=0.01)
        assert report["unlimited"]["ours_s"] == pytest.approx(47.92, abs=0.01)
        # 2.6 MB more for the first piece at 10 Mbit/s
        assert report["at_10_mbit_s"]["floor_s"] == pytest.approx(50.0, abs=0.01)
        assert report["at_10_mbit_s"]["ours_s"] == pytest.approx(50.0, abs=0.02)


@pytest.mark.parametrize(
    ("stages_", "lengths", "sooner_s"),
    [
        pytest.param(2, [256], 1.7, id="2.42 s in one piece"),
        pytest.param(8, [256], 3.0, id="9.68 s in one piece"),
        pytest.param(2, [2000], 10.6, id="10.59 s in pieces of 256"),
        pytest.param(8, [2000], 12.7, id="30.02 s in pieces of 256, of which only three may be under way"),
        pytest.param(8, [600, 600], 8.6, id="20.99 s in pieces of 256"),
        pytest.param(1, [256], 1.2, id="one stage has nothing to gain"),
    ],
)
def test_prompts_are_read_sooner_in_the_pieces_that_costs_name(
    stages_: int, lengths: list[int], sooner_s: float
) -> None:
    """The last one's first token, over alike stages."""
    world = ring_of((1.0,) * stages_).build()
    begin_s = world.now_s
    asked = [world.open(Request(f"prompt {n}", (n,) * length, 1)) for n, length in enumerate(lengths)]
    world.run_until_quiet()
    assert max(each.seconds_of(Sampled) for each in asked) - begin_s <= sooner_s


@pytest.mark.parametrize(("prompts", "largest"), [(1, 64), (2, 64), (3, 256)])
def test_few_prompts_go_in_small_pieces(prompts: int, largest: int) -> None:
    world = ring_of(ALIKE).build()
    sizes = mixed.watch_pieces(world)
    for n in range(prompts):
        world.open(Request(f"prompt {n}", (n,) * 512, 1))
    world.run_until_quiet()
    assert max(sizes) == largest


@pytest.mark.parametrize("n", [2, 3, 5])
def test_stages_of_any_number_reach_the_bound(n: int) -> None:
    report = stages.run([n])
    assert report["worst_ratio"] >= 0.98
    assert all(row["ratio"] >= row["source_ratio"] - SAME for row in report["rows"])


@pytest.mark.parametrize("varied", [0.0, 0.1])
def test_mixed_a_chats_step_waits_for_one_piece_at_most(varied: float) -> None:
    ours, source = mixed.run(jitter=varied).values()
    assert ours["promised_itl_p99_ms"] == pytest.approx(ours["step_ms"] + 330 + 100, abs=0.1)
    assert ours["chat_itl_p99_ms"] <= ours["promised_itl_p99_ms"]
    assert ours["piece_ms"] == 330
    assert ours["chat_itl_p99_ms"] < source["chat_itl_p99_ms"] / 2
    assert max(ours["prompt_ttft_s"]) <= 1.35 * max(source["prompt_ttft_s"])


ALIKE, FAST_FIRST = (1.0, 1.0), (0.1, 1.0)
RINGS = st.lists(st.sampled_from([0.1, 0.25, 0.5, 1.0]), min_size=1, max_size=7).map(lambda rest: (*rest, 1.0))


def ring_of(takes: tuple[float, ...], hop_ms: float = 10.0, varied: float = 0.0) -> RingSpec:
    """A ring of stages of which each takes that share of what the stage of `mixed` takes."""
    return RingSpec(tuple(map(_share, takes)), links_of(len(takes), hop_ms * len(takes)), jitter=varied)


def _share(taken: float) -> StageTable:
    group_points, piece_points = (
        {n: ms * taken for n, ms in points.items()} for points in (mixed.STAGE.group_points, mixed.STAGE.piece_points)
    )
    return replace(mixed.STAGE, group_points=group_points, piece_points=piece_points)


@settings(max_examples=12, deadline=None)
@given(
    takes=RINGS,
    chats=st.integers(1, 12),
    hop_ms=st.sampled_from([5.0, 10.0, 20.0, 40.0]),
    varied=st.sampled_from([0.0, 0.1]),
)
@example(takes=ALIKE, chats=5, hop_ms=10.0, varied=0.0)
@example(takes=(1.0, 1.0, 1.0), chats=4, hop_ms=20.0, varied=0.1)
@example(takes=(1.0,) * 8, chats=1, hop_ms=20.0, varied=0.0)
@example(takes=(1.0,) * 8, chats=8, hop_ms=10.0, varied=0.1)
@example(takes=(1.0,) * 8, chats=12, hop_ms=10.0, varied=0.0)
@example(takes=FAST_FIRST, chats=8, hop_ms=10.0, varied=0.0)
@example(takes=(0.1, 1.0, 1.0), chats=8, hop_ms=10.0, varied=0.0)
def test_a_chats_step_waits_for_one_piece_and_a_prompt_is_not_starved(
    takes: tuple[float, ...], chats: int, hop_ms: float, varied: float
) -> None:
    """Eight stages hold a step up by one piece's 330 ms together, not by 330 ms each, also where all are full, and also
    where a fast machine comes before slow ones."""
    report = mixed.beside_prompts(ring_of(takes, hop_ms, varied), chats)
    assert report["piece_positions"] == 64
    assert report["promised_itl_p99_ms"] == pytest.approx(report["step_ms"] + 330 + 100, abs=0.1)
    assert report["chat_itl_p99_ms"] <= report["promised_itl_p99_ms"]
    assert max(report["prompt_ttft_s"]) <= 2.5 * unhindered_s(takes, hop_ms)


@pytest.mark.parametrize("takes", [ALIKE, FAST_FIRST])
@pytest.mark.parametrize("chats", [24, 48])
def test_a_prompt_among_very_many_chats_keeps_its_share(chats: int, takes: tuple[float, ...]) -> None:
    """However long their steps take: a slot comes after four pieces' time at the latest."""
    report = mixed.beside_prompts(ring_of(takes), chats)
    assert max(report["prompt_ttft_s"]) <= 4 * unhindered_s(takes)


@cache
def unhindered_s(takes: tuple[float, ...], hop_ms: float = 10.0) -> float:
    """The first token of a prompt of `mixed` with nobody else there, in pieces of 256."""
    world = replace(ring_of(takes, hop_ms), schedule="source").build()
    begin_s, asked = world.now_s, world.open(Request("prompt", (1,) * mixed.PROMPT_TOKENS, 1))
    world.run_until_quiet()
    return asked.seconds_of(Sampled) - begin_s


def test_jitter_costs_little_where_steps_vary_by_a_tenth() -> None:
    rows = jitter.run()["rows"]
    assert min(row["worst_ratio"] for row in rows if row["step_jitter"] <= 0.1) >= 0.95


def test_slow_uplinks_keep_the_line_busy_and_the_chat_alive() -> None:
    rows = slow_uplink.run()["rows"]
    # by hand, six pieces of 600 ms and 2.62 MB: at 100 Mbit/s a stage is the slowest server, at 10 the line
    assert [rows[0]["floor_s"], rows[2]["floor_s"]] == [
        pytest.approx(0.6 + 0.21 + 0.6 + 0.03 + 5 * 0.6, abs=0.01),
        pytest.approx(0.6 + 2.097 + 0.6 + 0.03 + 5 * 2.097, abs=0.01),
    ]
    # and 48 pieces of 75 ms where the line is fast
    assert rows[0]["prompt_ttft_s"] == pytest.approx((0.6 + 0.21 + 0.6) / 8 + 0.03 + 47 * 0.6 / 8, abs=0.01)
    for row in rows:
        assert row["ratio"] <= 1.03
        assert row["chat_itl_p99_ms_beside_a_prompt"] <= row["promised_itl_p99_ms"]
        assert row["promised_itl_p99_ms"] <= row["chat_itl_p50_ms"] + 300 + 100


def test_chats_read_what_is_new_and_end_in_any_budget() -> None:
    reused, read_again = chats.run(), chats.run(prefix_reuse=False)
    assert reused["long_conversation"]["ratio"] <= 1.3
    assert read_again["long_conversation"]["ratio"] > 10
    (roomy, tight), (all_read, tight_read) = reused["rows"], read_again["rows"]
    assert roomy["pauses"] == 0
    assert tight["pauses"] > 0
    assert roomy["read_positions"] + roomy["continued_positions"] == roomy["asked_positions"]
    assert roomy["read_positions"] < 0.2 * all_read["read_positions"]
    assert tight["read_positions"] < 0.6 * tight_read["read_positions"]
    assert roomy["later_ttft_p50_s"] < 1
    assert tight["all_done_s"] < tight_read["all_done_s"]


def test_the_same_seed_gives_the_same_report_and_another_one_another() -> None:
    def reports(seed: int) -> dict[str, Any]:
        return two_pcs.run(TwoPcs(users=4, jitter=0.1, seed=seed))

    assert reports(1) == reports(1)
    assert reports(1) != reports(2)


def test_the_command_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    main(["two-pcs", "--users", "2", "--rtt-ms", "60", "--no-split-rows", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert {"tokens_per_s", "bound_tokens_per_s", "ratio"} <= set(report)
    assert report["flags"]["split_rows"] is False


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("two-pcs --users 0", "'0' is no whole number from 1 on"),
        ("two-pcs --max-batch -2", "'-2' is no whole number from 0 on"),
        ("prompt --tokens many", "'many' is no whole number from 1 on"),
        ("stages --n 1..3", "'1' is no whole number from 2 on"),
        ("stages --n 5..2", "'5..2' ends before it begins"),
    ],
)
def test_the_command_says_what_is_allowed(asked: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(asked.split())
    assert why in capsys.readouterr().err


def test_the_command_prints_lines_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    main(["stages", "--n", "2", "--rtt-ms", "5"])
    printed = capsys.readouterr().out
    assert "rtt_ms: 5.0" in printed
    assert printed.count("users") == len(stages.USERS)


def test_churn_wrongs_nobody_and_tells_everybody_within_seconds() -> None:
    report = churn.run(nodes=12, seconds=1800.0)
    assert min(report["killed"], report["without_power"], report["returned"]) > 0
    assert report["wrongly_dead"] == 0
    assert report["known_to_all"]["p99_s"] < 10
    assert report["noticed_killed"]["p99_s"] < 5
    assert 12 < report["noticed_without_power"]["p50_s"] < report["noticed_without_power"]["p99_s"] < 18
    assert 100 < report["bytes_per_s"]["node_up"] < 1000


def test_failover_ends_with_every_node_at_the_new_coordinator() -> None:
    report = failover.run(voters=3, failovers=20, nodes=5)
    assert 5 < report["p50_s"] <= report["p99_s"] <= report["worst_s"] < 25
    assert report["p50_s"] < report["all_back"]["p50_s"] < 30


def test_of_a_hundred_coordinators_that_are_killed_one_has_no_successor_within_the_promise() -> None:
    took_s = [failover.succession_s(3, seed) for seed in range(1000)]
    assert percentile(took_s, 0.99) <= 20.0
