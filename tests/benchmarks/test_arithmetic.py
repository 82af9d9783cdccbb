"""What benchmarks make of their times, by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.calibrate import overlap_s, predicted, shared
from benchmarks.host_time import host_cpu_s
from benchmarks.mixed import largest_bearable
from benchmarks.prefix import Run, summary
from benchmarks.prompt import sides
from benchmarks.stage_times import typical
from benchmarks.taken_turns import Turns, step_parts
from benchmarks.users import Crowd
from benchmarks.wide_layer import measure_layer, past_share
from swarmnode.cli.chat_stream import ChatResult


def replied(tokens: int, timing: dict[str, float] | None = None) -> ChatResult:
    return ChatResult("", "length", 3, tokens, 0, 0.1, 1.0, dict(timing or {}))


def test_a_prompts_floor_is_one_pass_and_the_rest_at_the_slowest_stage() -> None:
    """Stages of 10 and 30 ms a piece, three pieces, 5 ms of road."""
    assert sides([[10.0] * 3, [30.0] * 3], 5.0) == {"sum_ms": 125.0, "max_ms": 90.0, "floor_ms": 105.0}


@pytest.mark.parametrize(
    ("step_ms", "size"),
    [
        pytest.param(100.0, 64, id="500 ms on the slowest stage"),
        pytest.param(800.0, 128, id="three steps of 400 ms a stage"),
        pytest.param(2000.0, 256, id="any"),
    ],
)
def test_the_piece_of_the_aim_is_the_largest_that_no_stage_takes_too_long_for(step_ms: float, size: int) -> None:
    pieces = {32: [100.0, 260.0], 64: [190.0, 500.0], 128: [370.0, 980.0], 256: [700.0, 1900.0]}
    assert largest_bearable(pieces, step_ms) == size
    assert largest_bearable({32: [900.0, 900.0], 64: [1800.0, 1800.0]}, 100.0) == 32


def test_costs_are_the_medians_of_the_rounds_by_stage_and_rows() -> None:
    rounds = [[{1: 10.0, 2: 20.0}, {1: 5.0}], [{1: 90.0, 2: 22.0}, {1: 7.0}], [{1: 12.0, 2: 21.0}, {1: 6.0}]]
    assert typical(rounds) == [{1: 12.0, 2: 21.0}, {1: 6.0}]


def test_a_crowds_rate_counts_while_all_are_answered() -> None:
    """One user gets a token every 100 ms, the other one every 200 ms in texts of two tokens: 10 and 10 a second."""
    first = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    second = [0.2, 0.4, 0.6]
    crowd = Crowd([first, second], [replied(9), replied(6)])
    assert crowd.tokens_per_s == pytest.approx(10.0 + 10.0)
    with pytest.raises(RuntimeError, match="1 of 2"):
        _ = Crowd([first, second], [replied(9), None]).tokens_per_s


def test_turns_give_the_medians_of_their_crowds() -> None:
    crowds = [
        Crowd([[0.0, every_s, 2 * every_s]], [replied(3, {"link_ms": link_ms})])
        for every_s, link_ms in ((0.1, 20.0), (0.2, 26.0), (0.05, 21.0))
    ]
    turns = Turns(crowds, [[{1: 10.0}], [{1: 14.0}], [{1: 20.0}], [{1: 90.0}]])
    assert turns.rates == [pytest.approx(10.0), pytest.approx(5.0), pytest.approx(20.0)]
    assert turns.tokens_per_s == pytest.approx(10.0)
    assert turns.step_ms("link_ms") == 21.0
    assert turns.costs == [{1: 17.0}]
    assert [turns.costs_about(turn) for turn in range(3)] == [[{1: 12.0}], [{1: 17.0}], [{1: 55.0}]]
    assert step_parts(2) == ("stage0_ms", "stage1_ms", "link_ms", "queue_ms")


def test_what_a_second_turn_costs_is_the_ratio_of_medians() -> None:
    runs = [
        Run(1500, 900.0, 1560, 1500, second, 60, alone) for second, alone in ((60.0, 50.0), (66.0, 60.0), (90.0, 70.0))
    ]
    told = summary(runs)
    assert (told["second_ttft_ms"], told["alone_ttft_ms"], told["ratio"]) == (66.0, 60.0, 1.1)
    assert (told["cached_tokens"], told["new_tokens"]) == (1500, 60)


LONE, BUSY = [{1: 10.0, 8: 10.0}, {1: 20.0, 8: 20.0}], [{1: 20.0, 8: 20.0}, {1: 40.0, 8: 40.0}]


def test_one_users_stages_are_never_at_work_at_once() -> None:
    """30 ms of road, stages of 10 and 20 ms while the other rests."""
    costs, rate = shared(LONE, BUSY, 5.0, 30.0, 1)
    assert costs == LONE
    assert rate == predicted(LONE, 30.0, 1)[0] == pytest.approx(1000 / 60, rel=1e-3)


def test_what_a_full_stage_costs_the_other() -> None:
    """Eight users, whose rows cost one by one, fill the slower one: it never pauses, and the other goes beside it."""
    lone, busy = [{1: 10.0, 8: 80.0}, {1: 20.0, 8: 160.0}], [{1: 20.0, 8: 160.0}, {1: 40.0, 8: 320.0}]
    (first, second), _ = shared(lone, busy, 0.0, 0.0, 8)
    assert first[8] == pytest.approx(160.0, rel=0.03)
    assert second[8] == pytest.approx(160 + 160 * first[8] / second[8], rel=0.03)


def test_every_row_of_full_stages_takes_its_part_of_what_nodes_and_users_compute() -> None:
    alike = [{1: 10.0, 8: 80.0}] * 2
    for table in shared(alike, alike, 1.5, 0.0, 8)[0]:
        assert table == pytest.approx({1: 11.5, 8: 92.0}, rel=0.01)


def test_steps_overlap_where_both_stages_have_one() -> None:
    ours, theirs = [(0.0, 2.0), (3.0, 4.0), (6.0, 9.0)], [(1.0, 3.5), (4.0, 5.0), (6.5, 7.0), (8.0, 10.0)]
    assert overlap_s(ours, theirs) == overlap_s(theirs, ours) == pytest.approx(1.0 + 0.5 + 0.5 + 1.0)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="Linux tells it by /proc")
def test_all_that_children_compute_is_counted_ended_threads_too_but_a_stages_main_thread_is_not() -> None:
    spin = (
        "import sys, threading, time\n"
        "def spin(seconds):\n"
        "    while time.thread_time() < seconds: pass\n"
        "user = threading.Thread(target=spin, args=(0.3,)); user.start(); user.join()\n"
        "spin(0.5); print('spun', flush=True); sys.stdin.read()"
    )
    for extra, least_s, most_s in (([], 0.75, 1.2), (["-m", "benchmarks.stage_times", "{}"], 0.25, 0.45)):
        begun_s = host_cpu_s()
        with subprocess.Popen(
            [sys.executable, "-c", spin, *extra], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            child.stdout.readline()
            assert least_s <= host_cpu_s() - begun_s <= most_s
            child.communicate()


def test_what_a_past_adds_to_a_layers_work_by_arithmetic() -> None:
    """Matrices of 1, 1/4, 1/4, 1 and three times 4 squares of the width: 14.5."""
    assert past_share(2048, 1659) == pytest.approx(2 * 1659 / (14.5 * 2048))


def test_a_layer_of_any_width_is_measured() -> None:
    report = measure_layer(256, 40, 8, runs=1, dtype="float32", threads=1)
    assert report["arithmetic"] == pytest.approx(1 + 2 * 40 / (14.5 * 256), abs=1e-3)
    assert min(report["second_ms"], report["alone_ms"]) > 0
