"""Does the simulator say what a real ring does? The same step costs and round trip, users 1 to 8, side by side.

`python -m benchmarks.calibrate --json`. Two stages of the demo model behind delaying proxies; the step costs are
measured first, with both stages busy, and given to the simulator as its tables. Nothing else is fitted: what the
simulator leaves out (text, the gateway, a shared processor) shows as the difference.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.users import WARM_UP_TOKENS, RingUnderTest, running_ring, step_costs
from sims.engines import StageTable
from sims.ring import RingSpec, links_of
from sims.scenarios.decode import bound_of, steady

if TYPE_CHECKING:
    from collections.abc import Sequence

STAGES = 2
USERS = (1, 2, 4, 8)


def measure(rtt_ms: float, tokens: int, dtype: str, threads: int) -> dict[str, Any]:
    about = RingUnderTest(STAGES, rtt_ms, dtype, threads, {"SWARM_SERVE_IN_FLIGHT": str(max(USERS))})
    costs = step_costs(about, tokens)
    tables = tuple(StageTable(cost) for cost in costs)
    rows = []
    with running_ring(about) as ring:
        spec = RingSpec(tables, links_of(STAGES, ring.road_ms))
        for users in USERS:
            ring.run(users, WARM_UP_TOKENS)
            real = ring.run(users, tokens).tokens_per_s
            simulated = steady(spec.build(), users, bound_of(spec, users))["tokens_per_s"]
            rows.append(
                {
                    "users": users,
                    "real_tokens_per_s": round(real, 2),
                    "simulated_tokens_per_s": round(simulated, 2),
                    "off": round(simulated / real - 1, 3),
                }
            )
    worst = max(abs(row["off"]) for row in rows)
    return {
        "rtt_ms": rtt_ms,
        "dtype": dtype,
        "threads_per_stage": threads,
        "costs_ms": costs,
        "worst": worst,
        "rows": rows,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="The simulator's prediction beside a real ring.")
    parser.add_argument("--rtt-ms", type=float, default=20.0, help="round trip between neighbours")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each reply")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="per stage")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    chosen = parser.parse_args(arguments)
    report = measure(chosen.rtt_ms, chosen.tokens, chosen.dtype, chosen.threads)
    table = Table(title=f"{STAGES} stages, {report['rtt_ms']:g} ms; worst difference {report['worst']:.1%}")
    for name in report["rows"][0]:
        table.add_column(name, justify="right")
    for row in report["rows"]:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    if chosen.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
