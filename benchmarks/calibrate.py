"""Does the simulator say what a real ring does? The same step costs and round trip, users 1 to 8, side by side.

`python -m benchmarks.calibrate --json`. A real ring of two stages of the demo model behind delaying proxies, under its
default schedule, against the same head and stages in virtual time, whose steps vary as much as measured ones do. For
every number of users real runs take turns with measurements of the step costs: the same slices run groups of exact
sizes, all stages at once, in processes of their own (`benchmarks/stage_times.py`; held to a size inside the ring,
groups drift apart while they wait behind each other, and what then is measured is no group of that size). Rates and
costs are the medians of these turns, of the same minute. The simulator's links lead from worker to worker, so its road
is `link_ms` of a lone reply of the same ring that is not compared: what the proxies delay, and the way through pipes,
nodes and TLS. So the row of one user only says that a reply's parts add up; the prediction begins with two.

Two predictions, neither of which has seen the runs that it is compared with. `off_alone` takes the step costs as they
are while both stages compute without a pause and nothing else runs. But here the stages share one machine, as PCs of
their own do not, and `off` counts that in:

- A step that the simulated ring computes while the other stage rests costs what it does then; one beside the other
  stage costs what it does beside it, because weights come from one memory; one partly beside it lies between.
- Nodes, coordinator, proxies and users want the same cores for every token: `host_ms` of CPU, by what a longer run
  takes more than a short one. While both stages compute, each row of a step gives its core's part of that.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.host_time import host_cpu_s
from benchmarks.stage_times import StageTimers, typical
from benchmarks.taken_turns import step_parts, take_turns
from benchmarks.users import WARM_UP_TOKENS, Ring, RingUnderTest, running_ring
from sims.engines import StageTable
from sims.ring import RingSpec, links_of
from sims.scenarios.decode import bound_of, steady
from swarmnode.cli.output import console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.stage_times import GroupCosts
    from sims.world import Node, World
    from swarmnode.ring.work import Work, WorkResult

STAGES = 2
USERS = (1, 2, 4, 8)
PARTS = step_parts(STAGES)
HOST_TOKENS = 96
"""Of each user, by which the longer run is longer."""
ROUNDS = 5
"""Costs, and how busy stages are that have these, are found in turn, until they hardly change."""


def measure(rtt_ms: float, tokens: int, dtype: str) -> dict[str, Any]:
    """Stages of one thread: what that computes is told apart from the rest."""
    about = RingUnderTest(STAGES, rtt_ms, dtype, 1, {"SWARM_SERVE_IN_FLIGHT": str(max(USERS))})
    with running_ring(about) as ring, StageTimers(ring.model, ring.status, dtype, 1) as timers:
        road_ms = ring.run(1, WARM_UP_TOKENS).timing_ms("link_ms")
        rows = [_row(ring, timers, road_ms, users, tokens) for users in USERS]
    return {
        "rtt_ms": rtt_ms,
        "proxies_ms": round(ring.road_ms, 2),
        "road_ms": round(road_ms, 2),
        "dtype": dtype,
        "threads_per_stage": 1,
        "worst": max(abs(row["off"]) for row in rows),
        "worst_alone": max(abs(row["off_alone"]) for row in rows),
        "rows": rows,
    }


def _row(ring: Ring, timers: StageTimers, road_ms: float, users: int, tokens: int) -> dict[str, Any]:
    host_ms, lone = _host_ms(ring, users), timers.lone_groups_ms()
    turns = take_turns(ring, timers, users, tokens)
    lone = typical([lone, timers.lone_groups_ms()])
    real = turns.tokens_per_s
    varies = timers.variation
    alone, _ = predicted(turns.costs, road_ms, users, varies)
    costs, simulated = shared(lone, turns.costs, host_ms / (os.cpu_count() or 1), road_ms, users, varies)
    return {
        "users": users,
        "real_tokens_per_s": round(real, 2),
        "real_runs": [round(rate, 2) for rate in turns.rates],
        "simulated_tokens_per_s": round(simulated, 2),
        "off": round(simulated / real - 1, 3),
        "alone_tokens_per_s": round(alone, 2),
        "off_alone": round(alone / real - 1, 3),
        "host_ms": round(host_ms, 2),
        "steps_vary_by": round(varies, 3),
        "real_step_ms": {part: round(turns.step_ms(part), 1) for part in PARTS},
        "costs_ms": turns.costs,
        "lone_costs_ms": lone,
        "shared_costs_ms": [{rows: round(ms, 2) for rows, ms in table.items()} for table in costs],
    }


def _host_ms(ring: Ring, users: int) -> float:
    """CPU milliseconds of a token, but for what stages compute; prompts and connections are in both runs."""
    taken_s = []
    for tokens in (WARM_UP_TOKENS, WARM_UP_TOKENS + HOST_TOKENS):
        begun_s = host_cpu_s()
        ring.run(users, tokens)
        taken_s.append(host_cpu_s() - begun_s)
    return max(0.0, taken_s[1] - taken_s[0]) * 1e3 / (users * HOST_TOKENS)


def shared(
    lone: GroupCosts, busy: GroupCosts, host_ms: float, road_ms: float, users: int, varies: float = 0.0
) -> tuple[GroupCosts, float]:
    """Costs between `lone`, while the other stage rests, and `busy`, while it computes without a pause, with `host_ms`
    on top for each row; by which share of its own steps each stage computes beside the other in the simulated ring. And
    that ring's tokens per second."""
    shares, costs, rate = [1.0] * STAGES, busy, 0.0
    for _ in range(ROUNDS):
        costs = [
            {n: ms + share * (table_busy[n] + n * host_ms - ms) for n, ms in table.items()}
            for table, table_busy, share in zip(lone, busy, shares, strict=True)
        ]
        rate, shares = predicted(costs, road_ms, users, varies)
    return costs, rate


def predicted(costs: GroupCosts, road_ms: float, users: int, varies: float = 0.0) -> tuple[float, list[float]]:
    """Tokens per second of the simulated ring, and the share of its steps that each stage computes beside the other.
    `varies`: the standard deviation of a step, as a share of it."""
    tables = tuple(StageTable(cost) for cost in costs)
    spec = RingSpec(tables, links_of(STAGES, road_ms), jitter=math.sqrt(3) * varies)
    world = spec.build()
    steps = [_watched(world, node) for node in world.nodes]
    rate = steady(world, users, bound_of(spec, users))["tokens_per_s"]
    both_s = overlap_s(*steps)
    return rate, [both_s / max(both_s, sum(end - begin for begin, end in own)) if both_s else 0.0 for own in steps]


def _watched(world: World, node: Node) -> list[tuple[float, float]]:
    """When its stage begins and ends each step, as the world runs."""
    steps: list[tuple[float, float]] = []
    run_it = node.engine.run

    def run(work: Work) -> WorkResult:
        result = run_it(work)
        steps.append((world.now_s, world.now_s + node.engine.took_s))
        return result

    node.engine.run = run  # type: ignore[method-assign]
    return steps


def overlap_s(ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]]) -> float:
    """Seconds in which both have a step; those of either come one after the other."""
    at, total_s = 0, 0.0
    for begin, end in ours:
        while at < len(theirs) and theirs[at][1] <= begin:
            at += 1
        last = at
        while last < len(theirs) and theirs[last][0] < end:
            total_s += min(end, theirs[last][1]) - max(begin, theirs[last][0])
            last += 1
    return total_s


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The simulator's prediction beside a real ring.")
    parser.add_argument("--rtt-ms", type=float, default=20.0, help="round trip between neighbours")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each reply")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    chosen = parser.parse_args(arguments)
    report = measure(chosen.rtt_ms, chosen.tokens, chosen.dtype)
    worst = f"{report['worst']:.1%}, with costs alone {report['worst_alone']:.1%}"
    table = Table(title=f"{STAGES} stages, {report['rtt_ms']:g} ms; worst difference {worst}")
    names = ("users", "real_tokens_per_s", "simulated_tokens_per_s", "off", "off_alone", "host_ms")
    for name in (*names, *PARTS):
        table.add_column(name, justify="right")
    for row in report["rows"]:
        table.add_row(*(str(row[name]) for name in names), *(str(row["real_step_ms"][part]) for part in PARTS))
    console().print(table)
    if chosen.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
