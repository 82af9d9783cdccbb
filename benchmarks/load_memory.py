"""Measure what loading a stage costs: anonymous memory against the slice's bytes in the serving dtype, and seconds.

`python -m benchmarks.load_memory [--model FOLDER] [--stages 1,2,3] [--dtype auto,float32] [--json]`; without a model a
random Llama of about 300 MB is made. Every stage loads in a fresh process, whose RssAnon is read after the imports and
after the load, so that neither torch itself nor an earlier load counts.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

AIM_RATIO = 1.15


def main() -> None:
    """Measure every stage of every combination; print a table, with --json one JSON object on the last line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load_memory", description=__doc__)
    parser.add_argument("--model", type=Path, help="a servable's folder")
    parser.add_argument("--stages", default="1,2,3", help="stage counts, separated by commas")
    parser.add_argument("--dtype", default="auto,float32", help="serving dtypes, separated by commas")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(json.loads(options.one))))
        return
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or make_model(Path(scratch) / "model")
        counts = [int(count) for count in options.stages.split(",")]
        loads = [
            in_fresh_process({"model": str(model), "first": begin, "end": end, "layers": layers, "dtype": dtype})
            for dtype in options.dtype.split(",")
            for count in counts
            for layers in [count_layers(model)]
            for begin, end in even_slices(layers, count)
        ]
    show(loads)
    if options.json:
        worst = max(load["ratio"] for load in loads)
        print(json.dumps({"benchmark": "load_memory", "aim_ratio": AIM_RATIO, "worst_ratio": worst, "loads": loads}))


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Load one stage in this process and compare."""
    import time

    from swarmnode.compute.loader import load_stage
    from swarmnode.compute.spec import StageSpec

    folder, first, end, layers = Path(case["model"]), case["first"], case["end"], case["layers"]
    files = tuple(sorted(folder.glob("shards/*/*.safetensors")))
    spec = StageSpec(folder, files, first, end, layers, first == 0, end == layers, case["dtype"], "cpu", 1)
    before = rss_anon_bytes()
    started = time.perf_counter()
    engine = load_stage(spec)
    seconds = time.perf_counter() - started
    grown = rss_anon_bytes() - before
    parameters = {id(p): p for p in engine.model.parameters().values()}.values()
    slice_bytes = sum(p.numel() * p.element_size() for p in parameters)
    dtype = str(engine.model.dtype).removeprefix("torch.")
    return {
        "layers": f"{first}-{end - 1}",
        "dtype": dtype,
        "slice_bytes": slice_bytes,
        "rss_anon_bytes": grown,
        "ratio": round(grown / slice_bytes, 4),
        "seconds": round(seconds, 3),
    }


def in_fresh_process(case: dict[str, Any]) -> dict[str, Any]:
    """`measure` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.load_memory", "--one", json.dumps(case)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def rss_anon_bytes() -> int:
    """Anonymous resident memory of this process: file pages in the page cache do not count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("RssAnon is read from /proc/self/status, which this system does not have")


def count_layers(model: Path) -> int:
    config = json.loads((model / "tokenizer" / "config.json").read_text())
    return int(config["num_hidden_layers"])


def even_slices(layers: int, stages: int) -> list[tuple[int, int]]:
    cuts = [layers * i // stages for i in range(stages + 1)]
    return list(pairwise(cuts))


def make_model(folder: Path) -> Path:
    """A random bfloat16 Llama of 12 layers, written as a servable's files."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=16_000,
        architectures=["LlamaForCausalLM"],
    )
    shard = folder / "shards" / "stage-0"
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(shard)
    (folder / "tokenizer").mkdir()
    (shard / "config.json").rename(folder / "tokenizer" / "config.json")
    return folder


def show(loads: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Loading a stage (aim: ratio ≤ {AIM_RATIO})")
    for column in ("layers", "dtype", "slice MiB", "RssAnon MiB", "ratio", "seconds"):
        table.add_column(column, justify="right")
    for load in loads:
        sizes = (f"{load[key] / 2**20:.1f}" for key in ("slice_bytes", "rss_anon_bytes"))
        table.add_row(load["layers"], load["dtype"], *sizes, f"{load['ratio']:.3f}", f"{load['seconds']:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
