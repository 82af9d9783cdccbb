"""Measure a decode step of one stage that holds the whole model: transformers' own `generate`, the generic path, the
lean decoder and its packed kernels, at 1 to 8 sessions.

`python -m benchmarks.decode [--model FOLDER] [--threads 1,2] [--rows 1,2,4,8] [--context N] [--rounds N] [--json]`;
without a model the demo model is imported. The sides take turns step by step, so that a busy machine slows all of them
alike: read the ratios, which are of medians within one run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.fresh_process import in_fresh_process

if TYPE_CHECKING:
    from collections.abc import Callable

SIDES: dict[str, dict[str, Any]] = {
    "generic-bf16": {"lean": False},
    "lean-bf16": {},
    "int8": {"quantization": "int8"},
    "int4-fast": {"quantization": "int4-fast"},
}
YARDSTICK = "transformers-bf16"
_GENERATED = 8
"""Tokens per turn of transformers' generate, so that reading its one-token prompt counts little."""


def main() -> None:
    """Measure every thread count in a fresh process; print tables, with --json one JSON object on the last line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    parser.add_argument("--model", type=Path, help="a servable's folder")
    parser.add_argument("--threads", default="1,2", help="thread counts, separated by commas")
    parser.add_argument("--rows", default="1,2,4,8", help="sessions in a step, separated by commas")
    parser.add_argument("--context", type=int, default=64, help="positions that each session holds at the start")
    parser.add_argument("--rounds", type=int, default=25)
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
            "context": options.context,
            "rounds": options.rounds,
        }
        runs = [in_fresh_process("decode", case | {"threads": int(threads)}) for threads in options.threads.split(",")]
    for run in runs:
        show(run)
    if options.json:
        last = runs[-1]
        print(json.dumps({"benchmark": "decode", **{k: last[k] for k in ("tokens_per_s", "ratios")}, "runs": runs}))


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Step times in milliseconds by side and rows, on one thread count."""
    import torch

    torch.set_num_threads(case["threads"])
    load_before = os.getloadavg()[0]
    loaded = {name: load_side(Path(case["model"]), case["threads"], settings) for name, settings in SIDES.items()}
    steps: dict[str, dict[int, Callable[[], None]]] = {}
    for name, engine in loaded.items():
        steps[name] = {rows: stepper(engine, rows, case["context"], first=100 * rows) for rows in case["rows"]}
    generate = transformers_step(Path(case["model"]), case["context"])
    times: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in case["rows"]} for name in steps}
    yardstick: list[float] = []
    for turn in range(case["rounds"] + 1):
        for rows in case["rows"]:
            for name, by_rows in steps.items():
                seconds = timed(by_rows[rows])
                if turn:  # the first turn warms caches and buffers
                    times[name][rows].append(seconds)
        if turn and turn % 3 == 0:
            yardstick.append(timed(generate) / _GENERATED)
    step_ms = {name: {r: 1e3 * statistics.median(t) for r, t in by.items()} for name, by in times.items()}
    step_ms[YARDSTICK] = {1: 1e3 * statistics.median(yardstick or [timed(generate) / _GENERATED])}
    return summary(case, step_ms, loaded, load_before)


def summary(
    case: dict[str, Any], step_ms: dict[str, dict[int, float]], loaded: dict[str, Any], load_before: float
) -> dict[str, Any]:
    first = case["rows"][0]
    base = step_ms[YARDSTICK][1]
    bandwidth = read_bandwidth()
    weights = {name: weight_bytes(engine) for name, engine in loaded.items()}
    return {
        "threads": case["threads"],
        "context": case["context"],
        "load_average": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        "read_gb_per_s": round(bandwidth / 1e9, 2),
        "tokens_per_s": {name: round(1e3 / by[min(by)], 2) for name, by in step_ms.items()},
        "ratios": {name: round(base / by[first], 3) for name, by in step_ms.items() if first in by},
        "effective_gb_per_s": {n: round(weights[n] / step_ms[n][first] / 1e6, 2) for n in loaded},
        "step_ms": {name: {str(r): round(ms, 2) for r, ms in by.items()} for name, by in step_ms.items()},
    }


def load_side(folder: Path, threads: int, settings: dict[str, Any]) -> Any:
    from swarmnode.compute.loader import load_stage
    from swarmnode.compute.spec import StageSpec

    layers = int(json.loads((folder / "tokenizer" / "config.json").read_text())["num_hidden_layers"])
    files = tuple(sorted(folder.glob("shards/*/*.safetensors")))
    return load_stage(StageSpec(folder, files, 0, layers, layers, True, True, "bfloat16", "cpu", threads, **settings))


def stepper(engine: Any, rows: int, context: int, first: int) -> Callable[[], None]:
    """A function that advances `rows` sessions by one greedy token; prompts are read here."""
    from swarmnode.ids import SessionId
    from swarmnode.ring.work import DecodeRow, GroupWork, PieceWork, Sampling

    sessions = [SessionId(first + i) for i in range(rows)]
    ids = tuple(range(100, 100 + context))
    greedy = Sampling(temperature=0.0)
    tokens = [engine.run(PieceWork(s, 0, ids, True, sampling=greedy)).tokens[0] for s in sessions]
    position = context

    def step() -> None:
        nonlocal tokens, position
        work = GroupWork(tuple(DecodeRow(s, position, t) for s, t in zip(sessions, tokens, strict=True)))
        tokens, position = list(engine.run(work).tokens), position + 1

    return step


def transformers_step(folder: Path, context: int) -> Callable[[], None]:
    """`generate` of the same weights, as transformers loads and runs them; its prompt is read once."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

    auto: Any = AutoModelForCausalLM
    model = auto.from_config(AutoConfig.from_pretrained(folder / "tokenizer"), dtype=torch.bfloat16)
    tensors = {name: t for path in folder.glob("shards/*/model.safetensors") for name, t in load_file(path).items()}
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    model.eval()
    ids = torch.arange(100, 100 + context)[None]
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(ids, cache=cache)

    def step() -> None:
        nonlocal ids
        ids = torch.cat((ids, ids[:, -1:]), 1)[:, : cache.get_seq_length() + 1]
        ids = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            cache=cache,
            max_new_tokens=_GENERATED,
            min_new_tokens=_GENERATED,
            do_sample=False,
            pad_token_id=0,
        )

    return step


def weight_bytes(engine: Any) -> int:
    """Bytes of weights that a one-row step reads: blocks and head, not the embeddings' table."""
    model = engine.model
    if model.lean is not None:
        return int(model.lean.size_bytes() + model.tail_bytes())
    blocks = sum(p.nbytes for p in model.base.layers.parameters())
    return int(blocks + model.outer.lm_head.weight.nbytes)


def read_bandwidth() -> float:
    """Bytes per second of summing 256 MB, with the threads in use."""
    import torch

    data = torch.ones(1 << 26)
    best = min(timed(data.sum) for _ in range(5))
    return data.nbytes / best


def timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def import_demo(root: Path) -> Path:
    from swarmnode.catalog.importing import import_model
    from swarmnode.catalog.source_wheel import DEMO_SOURCE

    return root / import_model(DEMO_SOURCE, root, stages=1).id


def show(run: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"A decode step, ms; {run['threads']} thread(s), context {run['context']}, load {run['load_average']}"
    rows = sorted({int(r) for by in run["step_ms"].values() for r in by})
    table = Table("side", *(f"{r} rows" for r in rows), "tokens/s", "× transformers", "GB/s", title=title)
    for name, by in run["step_ms"].items():
        cells = [f"{by[str(r)]:.1f}" if str(r) in by else "" for r in rows]
        speed = f"{run['effective_gb_per_s'][name]:.1f}" if name in run["effective_gb_per_s"] else ""
        table.add_row(name, *cells, str(run["tokens_per_s"][name]), str(run["ratios"].get(name, "")), speed)
    Console().print(table)
    Console().print(f"this machine reads {run['read_gb_per_s']} GB/s with as many threads")


if __name__ == "__main__":
    main()
