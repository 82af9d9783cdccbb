"""Measure what a decode step of 1, 2, 4 and 8 sessions costs when each holds 64, 512 or 2,048 positions.

`python -m benchmarks.batch [--model FOLDER] [--threads 1,2] [--rows 1,2,4,8] [--contexts 64,512,2048] [--rounds N]
[--sides …] [--json]`; without a model the demo model is imported. One prompt is read per context, every other session
continues a copy of it. The sides take turns step by step, so that a busy machine slows all of them alike: read the
ratios, a step of eight sessions against a step of one within the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.decode import SIDES, import_demo, load_side, timed
from benchmarks.fresh_process import in_fresh_process

if TYPE_CHECKING:
    from collections.abc import Callable

AIM_RATIO = 3.0
"""Eight sessions against one at AIM_CONTEXT positions, for the packed methods on a CPU."""
AIM_CONTEXT = 512
PACKED = ("int8", "int4-fast")
ALL_SIDES = {**SIDES, "nf4": {"quantization": "nf4"}, "bnb-int8": {"quantization": "bnb-int8"}}
_PIECE = 256


def main() -> None:
    """Measure every thread count in a fresh process; print tables, with --json one JSON object on the last line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch", description=__doc__)
    parser.add_argument("--model", type=Path, help="a servable's folder")
    parser.add_argument("--threads", default="1,2", help="thread counts, separated by commas")
    parser.add_argument("--rows", default="1,2,4,8", help="sessions in a step, separated by commas")
    parser.add_argument("--contexts", default="64,512,2048", help="positions of each session, separated by commas")
    parser.add_argument("--sides", default="lean-bf16,int8,int4-fast", help=f"of {', '.join(ALL_SIDES)}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(json.loads(options.one))))
        return
    with tempfile.TemporaryDirectory() as scratch:
        case = {
            "model": str(options.model or import_demo(Path(scratch))),
            "rows": [int(rows) for rows in options.rows.split(",")],
            "contexts": [int(context) for context in options.contexts.split(",")],
            "sides": options.sides.split(","),
            "rounds": options.rounds,
        }
        runs = [in_fresh_process("batch", case | {"threads": int(threads)}) for threads in options.threads.split(",")]
    for run in runs:
        show(run)
    if options.json:
        print(json.dumps({"benchmark": "batch", "aim_ratio": AIM_RATIO, "aim_context": AIM_CONTEXT, "runs": runs}))


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Step times in milliseconds by side, context and rows, on one thread count."""
    import torch

    torch.set_num_threads(case["threads"])
    load_before = os.getloadavg()[0]
    loaded = {name: load_side(Path(case["model"]), case["threads"], ALL_SIDES[name]) for name in case["sides"]}
    step_ms: dict[str, dict[str, dict[str, float]]] = {name: {} for name in loaded}
    for context in case["contexts"]:
        steps = {name: steppers(engine, case["rows"], context) for name, engine in loaded.items()}
        for name, by_rows in rounds(steps, case["rounds"]).items():
            step_ms[name][str(context)] = {str(r): round(1e3 * statistics.median(t), 2) for r, t in by_rows.items()}
    few, many = str(min(case["rows"])), str(max(case["rows"]))
    return {
        "threads": case["threads"],
        "load_average": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        "step_ms": step_ms,
        "ratios": {
            name: {context: round(by[many] / by[few], 2) for context, by in contexts.items()}
            for name, contexts in step_ms.items()
        },
    }


def rounds(steps: dict[str, dict[int, Callable[[], None]]], count: int) -> dict[str, dict[int, list[float]]]:
    times: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in by} for name, by in steps.items()}
    for turn in range(count + 1):
        for name, by_rows in steps.items():
            for rows, step in by_rows.items():
                seconds = timed(step)
                if turn:  # the first turn warms caches and buffers
                    times[name][rows].append(seconds)
    return times


def steppers(engine: Any, rows: list[int], context: int) -> dict[int, Callable[[], None]]:
    """For each row count a function that advances so many sessions, of `context` positions each, by one position."""
    from swarmnode.ids import SessionId
    from swarmnode.ring.work import Continuation, DecodeRow, GroupWork, PieceWork, Sampling

    sessions = [SessionId(i) for i in range(max(rows))]
    for session in sessions:
        engine.free(session)
    greedy = Sampling(temperature=0.0)
    ids = tuple(range(100, 100 + context))
    for begin in range(0, context, _PIECE):
        engine.run(
            PieceWork(sessions[0], begin, ids[begin : begin + _PIECE], begin + _PIECE >= context, sampling=greedy)
        )
    for session in sessions[1:]:
        start = Continuation(sessions[0], context - 1, move=False)
        engine.run(PieceWork(session, context - 1, ids[-1:], True, sampling=greedy, start=start))

    def stepper(count: int) -> Callable[[], None]:
        work = GroupWork(tuple(DecodeRow(session, context, 100) for session in sessions[:count]))
        return lambda: engine.run(work)

    return {count: stepper(count) for count in rows}


def show(run: dict[str, Any]) -> None:
    from rich.table import Table

    from swarmnode.cli.output import console

    title = f"A decode step, ms; {run['threads']} thread(s), load {run['load_average']}"
    rows = list(next(iter(next(iter(run["step_ms"].values())).values())))
    table = Table("side", "positions", *(f"{r} rows" for r in rows), f"× {rows[0]} row", "aim", title=title)
    for name, contexts in run["step_ms"].items():
        for context, by in contexts.items():
            aimed = name in PACKED and int(context) == AIM_CONTEXT
            cells = [f"{by[r]:.1f}" for r in rows]
            table.add_row(
                name, context, *cells, f"{run['ratios'][name][context]:.2f}", f"≤ {AIM_RATIO}" if aimed else ""
            )
    console().print(table)


if __name__ == "__main__":
    main()
