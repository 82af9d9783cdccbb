"""Time to the first token of prompts of 256 to 2,048 tokens, against what their pieces cost on the stages.

`python -m benchmarks.prompt --json`. A real ring of the demo model; every prompt begins like no other. Before and
after each prompt pieces of 256 run on the same slices in processes of their own, all stages at once as in the ring,
so that both sides see the same machine; figures are medians over the runs, after one that is thrown away.

    sum_ms    Σ over the stages of their pieces: what a prompt takes that waits for each piece's answer
    max_ms    the slowest stage's pieces: less is not possible
    floor_ms  the first piece through all stages, the others at the slowest one, and the road
    ratio     TTFT / floor_ms; less than 1 where smaller pieces, which the ring may choose, let later stages begin early

On one machine the stages share its memory: alone they are a little faster than in the ring.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.prefix import story
from benchmarks.stage_times import StageTimers
from benchmarks.users import RingUnderTest, running_ring
from swarmnode.cli.output import console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.users import Ring

PIECE = 256
"""SWARM_SERVE_PREFILL_CHUNK's default: the largest piece."""


def measure(lengths: Sequence[int], runs: int, about: RingUnderTest) -> dict[str, Any]:
    """Ring and stages in turn, length by length."""
    with running_ring(about) as ring, StageTimers(ring.model, ring.status, about.dtype, about.threads) as timers:
        rows = [_row(ring, timers, tokens, runs) for tokens in lengths]
    return {"stages": about.stages, "rtt_ms": about.rtt_ms, "dtype": about.dtype, "rows": rows}


def _row(ring: Ring, timers: StageTimers, tokens: int, runs: int) -> dict[str, Any]:
    seen: list[dict[str, float]] = []
    for _ in range(runs + 1):
        content = f"{ring.mark()} {story(len(seen), tokens)}"
        found = ring.chat([{"role": "user", "content": content}], 1)
        n = found.prompt_tokens - found.cached_tokens
        times = timers.pieces_ms([min(PIECE, n - at) for at in range(0, n, PIECE)])
        seen.append({"prompt_tokens": n, "ttft_ms": found.ttft_s * 1e3, **sides(times, ring.road_ms)})
    figures = {name: round(statistics.median(run[name] for run in seen[1:]), 1) for name in seen[0]}
    return {**figures, "ratio": round(figures["ttft_ms"] / figures["floor_ms"], 3)}


def sides(times_ms: Sequence[Sequence[float]], road_ms: float) -> dict[str, float]:
    """What the ring's TTFT stands beside, from each stage's pieces."""
    totals = [sum(pieces) for pieces in times_ms]
    slowest = max(range(len(totals)), key=totals.__getitem__)
    first = sum(pieces[0] for pieces in times_ms)
    floor = first + sum(times_ms[slowest][1:]) + road_ms
    return {"sum_ms": sum(totals) + road_ms, "max_ms": max(totals), "floor_ms": floor}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="TTFT of long prompts against their stages' times.")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--tokens", default="256,512,1024,2048", help="lengths of the prompts, about")
    parser.add_argument("--runs", type=int, default=3, help="prompts of each length, after one for warm-up")
    parser.add_argument("--rtt-ms", type=float, default=0.0, help="round trip between neighbours")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="per stage")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    chosen = parser.parse_args(arguments)
    about = RingUnderTest(chosen.stages, chosen.rtt_ms, chosen.dtype, chosen.threads)
    report = measure([int(part) for part in chosen.tokens.split(",")], chosen.runs, about)
    table = Table(title=f"{report['stages']} stages, {report['rtt_ms']:g} ms: TTFT of a prompt")
    for name in report["rows"][0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in report["rows"]:
        table.add_row(*map(str, row.values()))
    console().print(table)
    if chosen.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
