"""Tokens per second of a real ring under many users, against what its step costs allow.

`python -m benchmarks.throughput --stages 2 --users 1,2,4,8 --rtt-ms 0,20 --json`. Real processes, the demo model, links
through a delaying proxy. Real runs take turns with measurements of the step costs: the same slices run groups of exact
sizes, all stages at once, in processes of their own (`benchmarks/stage_times.py`). A run's bound is `sims.bound` over
the costs from just before and behind it, because a machine's speed may change by a third from one run to the next; the
report has the medians over the runs. On one machine the stages share its processor: what one stage leaves idle makes
the other faster, so a ratio above 1 is possible where a ring is not full; and nodes, coordinator and clients take their
part of it, which shows as milliseconds of the stages in `step_ms` above those in `costs_ms`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.stage_times import StageTimers, typical
from benchmarks.taken_turns import step_parts, take_turns
from benchmarks.users import Ring, RingUnderTest, running_ring
from sims.bound import bound_tokens_per_s
from sims.engines import interpolate
from swarmnode.cli.output import console

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.stage_times import GroupCosts


def measure(
    stages: int, users: Sequence[int], rtts_ms: Sequence[float], tokens: int, schedule: str, dtype: str, threads: int
) -> dict[str, Any]:
    """Every round trip with every number of users."""
    environment = {"SWARM_SERVE_SCHEDULE": schedule, "SWARM_SERVE_IN_FLIGHT": str(max(users))}
    rows = []
    for rtt_ms in rtts_ms:
        about = RingUnderTest(stages, rtt_ms, dtype, threads, environment)
        with running_ring(about) as ring, StageTimers(ring.model, ring.status, dtype, threads) as timers:
            rows += [_row(ring, timers, n, tokens, rtt_ms) for n in users]
    return {
        "stages": stages,
        "dtype": dtype,
        "threads_per_stage": threads,
        "schedule": schedule,
        "rows": rows,
    }


def _row(ring: Ring, timers: StageTimers, users: int, tokens: int, asked_ms: float) -> dict[str, Any]:
    turns = take_turns(ring, timers, users, tokens)
    bounds = [_bound(turns.costs_about(turn), users, ring.road_ms) for turn in range(len(turns.crowds))]
    ratios = [rate / bound for rate, bound in zip(turns.rates, bounds, strict=True)]
    return {
        "users": users,
        "rtt_ms": asked_ms,
        "tokens_per_s": round(turns.tokens_per_s, 2),
        "bound_tokens_per_s": round(statistics.median(bounds), 2),
        "ratio": round(statistics.median(ratios), 3),
        "runs": [round(rate, 2) for rate in turns.rates],
        "bounds": [round(bound, 2) for bound in bounds],
        "costs_ms": turns.costs,
        "step_ms": {part: round(turns.step_ms(part), 1) for part in step_parts(ring.stages)},
    }


def _bound(costs: GroupCosts, users: int, road_ms: float) -> float:
    return bound_tokens_per_s(users, [partial(interpolate, cost) for cost in costs], road_ms)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Tokens per second of a real ring against its bound.")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--users", type=_numbers, default=[1, 2, 4, 8])
    parser.add_argument("--rtt-ms", type=_numbers, default=[0, 20], help="round trips between neighbours")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each reply")
    parser.add_argument("--schedule", choices=["cost", "source"], default="cost")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="per stage")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    chosen = parser.parse_args(arguments)
    report = measure(
        chosen.stages, chosen.users, chosen.rtt_ms, chosen.tokens, chosen.schedule, chosen.dtype, chosen.threads
    )
    _show(report)
    if chosen.json:
        print(json.dumps(report))


def _show(report: Mapping[str, Any]) -> None:
    screen = console()
    for stage, costs in enumerate(typical([row["costs_ms"] for row in report["rows"]])):
        screen.print(f"stage {stage}: " + ", ".join(f"{rows} rows {ms:.1f} ms" for rows, ms in costs.items()))
    table = Table(title=f"{report['stages']} stages, schedule {report['schedule']}")
    names = ("users", "rtt_ms", "tokens_per_s", "bound_tokens_per_s", "ratio")
    parts = step_parts(report["stages"])
    for name in (*names, *parts):
        table.add_column(name, justify="right")
    for row in report["rows"]:
        table.add_row(*(str(row[name]) for name in names), *(str(row["step_ms"][part]) for part in parts))
    screen.print(table)


if __name__ == "__main__":
    main()
