"""Does the simulator say what a real ring does? The same step costs and round trip, users 1 to 8, side by side.

`python -m benchmarks.calibrate --json`. A real ring of two stages of the demo model behind delaying proxies, under its
default schedule, against the same head and stages in virtual time. For every number of users real runs take turns with
measurements of the step costs: the same slices run groups of exact sizes, all stages at once, in processes of their own
(`benchmarks/stage_times.py`; held to a size inside the ring, groups drift apart while they wait behind each other, and
what then is measured is no group of that size). Rates and costs are the medians of these turns, of the same minute.
The simulator's links lead from worker to worker, so its road is `link_ms` of a lone reply of the same ring that is not
compared: what the proxies delay, and the way through pipes, nodes and TLS. So the row of one user only says that a
reply's parts add up; the prediction begins with two.

Two predictions. `off_alone` takes the step costs as they are where nothing but the stages runs. In a ring nodes,
coordinator, proxies and users want the same cores for every token, and that makes the same steps dearer (`host_share`:
a step's time in the stages, as replies tell it, over that of the first prediction, less one; by stage; groups of other
sizes would count in it as well). `off` takes the costs times that: what they are while the ring carries that traffic.
The first is the prediction, and says what a simulation without a host leaves out. The second only says whether rounds,
links and queues are as in the ring: its shares come from the very runs that it is compared with, so it cannot show
that a rate was foreseen, and for a lone user they fix the rate almost wholly.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.stage_times import StageTimers
from benchmarks.taken_turns import step_parts, take_turns
from benchmarks.users import WARM_UP_TOKENS, Ring, RingUnderTest, running_ring
from sims.engines import StageTable
from sims.ring import RingSpec, links_of
from sims.scenarios.decode import bound_of, steady
from swarmnode.cli.output import console
from swarmnode.ring.head_messages import Finished

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from benchmarks.stage_times import GroupCosts

STAGES = 2
USERS = (1, 2, 4, 8)
PARTS = step_parts(STAGES)


def measure(rtt_ms: float, tokens: int, dtype: str, threads: int) -> dict[str, Any]:
    about = RingUnderTest(STAGES, rtt_ms, dtype, threads, {"SWARM_SERVE_IN_FLIGHT": str(max(USERS))})
    with running_ring(about) as ring, StageTimers(ring.model, ring.status, dtype, threads) as timers:
        road_ms = ring.run(1, WARM_UP_TOKENS).timing_ms("link_ms")
        rows = [_row(ring, timers, road_ms, users, tokens) for users in USERS]
    return {
        "rtt_ms": rtt_ms,
        "proxies_ms": round(ring.road_ms, 2),
        "road_ms": round(road_ms, 2),
        "dtype": dtype,
        "threads_per_stage": threads,
        "worst": max(abs(row["off"]) for row in rows),
        "worst_alone": max(abs(row["off_alone"]) for row in rows),
        "rows": rows,
    }


def _row(ring: Ring, timers: StageTimers, road_ms: float, users: int, tokens: int) -> dict[str, Any]:
    turns = take_turns(ring, timers, users, tokens)
    real = turns.tokens_per_s
    alone, alone_ms = predicted(turns.costs, road_ms, users)
    shares = host_shares(turns.step_ms, alone_ms)
    simulated, parts = predicted(dearer(turns.costs, shares), road_ms, users)
    return {
        "users": users,
        "real_tokens_per_s": round(real, 2),
        "real_runs": [round(rate, 2) for rate in turns.rates],
        "simulated_tokens_per_s": round(simulated, 2),
        "off": round(simulated / real - 1, 3),
        "alone_tokens_per_s": round(alone, 2),
        "off_alone": round(alone / real - 1, 3),
        "host_share": [round(share, 3) for share in shares],
        "real_step_ms": _parts(turns.step_ms),
        "simulated_step_ms": parts,
        "costs_ms": turns.costs,
    }


def host_shares(real_ms: Callable[[str], float], alone_ms: Mapping[str, float]) -> list[float]:
    """By stage: how much dearer a step is in the ring than where only the stages run."""
    return [real_ms(part) / alone_ms[part] - 1 for part in PARTS[:STAGES]]


def dearer(costs: GroupCosts, shares: Sequence[float]) -> GroupCosts:
    """The same tables with each stage's share on top."""
    return [{n: ms * (1 + share) for n, ms in table.items()} for table, share in zip(costs, shares, strict=True)]


def predicted(costs: GroupCosts, road_ms: float, users: int) -> tuple[float, dict[str, float]]:
    """Tokens per second, and what the simulated replies say of a step when they are ended."""
    spec = RingSpec(tuple(StageTable(cost) for cost in costs), links_of(STAGES, road_ms))
    world = spec.build()
    rate = steady(world, users, bound_of(spec, users))["tokens_per_s"]
    for name in world.outcomes:
        world.cancel(name)
    world.run_until_quiet()
    timings = [end.timing for outcome in world.outcomes.values() for end in outcome.ends if isinstance(end, Finished)]
    return rate, _parts(lambda name: statistics.mean(timing[name] for timing in timings))


def _parts(ms: Callable[[str], float]) -> dict[str, float]:
    return {name: round(ms(name), 1) for name in PARTS}


def title(report: Mapping[str, Any]) -> str:
    """The prediction's worst difference first: that of the ring's own shares is no prediction."""
    worst = f"{report['worst_alone']:.1%}, with the ring's own shares {report['worst']:.1%}"
    return f"{STAGES} stages, {report['rtt_ms']:g} ms; worst difference with costs alone {worst}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The simulator's prediction beside a real ring.")
    parser.add_argument("--rtt-ms", type=float, default=20.0, help="round trip between neighbours")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each reply")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="per stage")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    chosen = parser.parse_args(arguments)
    report = measure(chosen.rtt_ms, chosen.tokens, chosen.dtype, chosen.threads)
    table = Table(title=title(report))
    names = ("users", "real_tokens_per_s", "simulated_tokens_per_s", "off", "off_alone", "host_share")
    for name in (*names, *PARTS):
        table.add_column(name, justify="right")
    for row in report["rows"]:
        steps = (f"{row['real_step_ms'][part]} / {row['simulated_step_ms'][part]}" for part in PARTS)
        table.add_row(*(str(row[name]) for name in names), *steps)
    console().print(table)
    if chosen.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
