"""T6: the line a stage logs per 30 s of traffic."""

from __future__ import annotations

from swarmnode.compute.step_stats import StepStats


def test_one_line_per_thirty_seconds_of_traffic() -> None:
    stats, lines = StepStats(1), []
    for _ in range(250):
        stats.waited(0.030)
        lines.append(stats.ran(3, 160.0))
        lines.append(stats.ran(5, 200.0))
    told = [line for line in lines if line]
    assert told == ["[stage1 stats 30s] batch_size=4.00 batch_ms=180.0 wait_ms=15.0"] * 3


def test_a_pause_is_no_traffic_and_pieces_are_no_batches() -> None:
    stats = StepStats(0)
    stats.waited(3600.0)
    assert stats.ran(0, 31_000.0) is None
    assert stats.ran(2, 50.0) == "[stage0 stats 30s] batch_size=2.00 batch_ms=50.0 wait_ms=0.0"
    assert stats.ran(2, 29_000.0) is None
