"""Measure what loading a stage costs, for every quantization: anonymous memory at the end and at its peak against the
bytes the stage holds, the whole process against what placement planned for weights and worker, the peak against what it
reserves for weights and workspace, and seconds.

`python -m benchmarks.load_memory [--model FOLDER] [--stages 1,2,3] [--methods none,nf4,…] [--dtype auto] [--json]`;
without a model a random Llama of about 300 MB is made. Every stage loads in a fresh process, whose RssAnon is read
after the imports, while it loads and after it, so that neither torch itself nor an earlier load counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import threading
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.fresh_process import in_fresh_process

if TYPE_CHECKING:
    from swarmnode.cluster.pricing import StageBytes

AIM_RATIO = 1.2
"""Memory at the end per byte held, and at the peak per byte held and one block in full precision."""
AIM_PLAN = 0.1
"""How far weights and worker, as planned, may be from the whole process after the load."""
METHODS = ("none", "int8", "int4-fast", "nf4", "bnb-int8")


def main() -> None:
    """Measure every stage of every combination; print a table, with --json one JSON object on the last line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load_memory", description=__doc__)
    parser.add_argument("--model", type=Path, help="a servable's folder")
    parser.add_argument("--stages", default="1,2,3", help="stage counts, separated by commas")
    parser.add_argument("--dtype", default="auto", help="serving dtypes, separated by commas")
    parser.add_argument("--methods", default=",".join(METHODS), help="quantizations, separated by commas")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(json.loads(options.one))))
        return
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or make_model(Path(scratch) / "model")
        layers = count_layers(model)
        cases = [
            {"model": str(model), "first": begin, "end": end, "layers": layers, "dtype": dtype, "method": method}
            for method in options.methods.split(",")
            for dtype in options.dtype.split(",")
            for count in options.stages.split(",")
            for begin, end in even_slices(layers, int(count))
        ]
        loads = [in_fresh_process("load_memory", case) for case in cases]
    show(loads)
    if options.json:
        aims = {"ratio": AIM_RATIO, "peak_ratio": AIM_RATIO, "plan_error": AIM_PLAN, "peak_of_plan": 1.0}
        worst = {key: max(abs(load[key]) for load in loads) for key in aims}
        print(json.dumps({"benchmark": "load_memory", "aims": aims, "worst": worst, "loads": loads}))


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Load one stage in this process and compare."""
    import time

    from swarmnode.cluster.pricing import HEADROOM
    from swarmnode.compute.freed_memory import return_freed_memory
    from swarmnode.compute.loader import load_stage
    from swarmnode.compute.spec import StageSpec

    folder, first, end, layers, method = Path(case["model"]), case["first"], case["end"], case["layers"], case["method"]
    files = tuple(sorted(folder.glob("shards/*/*.safetensors")))
    threads = int(os.environ.get("OMP_NUM_THREADS") or 1)
    ends = (first == 0, end == layers)
    spec = StageSpec(folder, files, first, end, layers, *ends, case["dtype"], "cpu", threads, quantization=method)
    if method in ("nf4", "bnb-int8"):
        import transformers.integrations.bitsandbytes  # noqa: F401 - it counts with the imports
    gc.collect()
    return_freed_memory()  # of the imports, or what the load frees of it would count against what it takes
    before = rss_anon_bytes()
    with Peak() as peak:
        started = time.perf_counter()
        engine = load_stage(spec)
        seconds = time.perf_counter() - started
    grown, whole = rss_anon_bytes() - before, resident_bytes("VmRSS")
    dtype = str(engine.model.dtype).removeprefix("torch.")
    held, planned = held_bytes(engine.model), plan_of(case, files, dtype)
    block = 0 if method == "none" else largest_block(files, case, dtype)
    return {
        "layers": f"{first}-{end - 1}",
        "dtype": dtype,
        "method": method,
        "held_bytes": held,
        "rss_anon_bytes": grown,
        "peak_bytes": peak.bytes - before,
        "process_bytes": whole,
        "planned_bytes": planned.weights + planned.worker,
        "planned_workspace_bytes": planned.workspace,
        "ratio": round(grown / held, 4),
        "peak_ratio": round((peak.bytes - before) / (held + block), 4),
        "plan_error": round((planned.weights + planned.worker) / whole - 1, 4),
        "peak_of_plan": round((peak.bytes - before) / HEADROOM / (planned.weights + planned.workspace), 4),
        "seconds": round(seconds, 3),
    }


class Peak:
    """The largest RssAnon that a thread saw while the block ran."""

    def __init__(self) -> None:
        self.bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.bytes = max(self.bytes, rss_anon_bytes())


def held_bytes(model: Any) -> int:
    """Bytes of the stage's weights as they are held: dense parameters, packed ones, and scales."""
    from swarmnode.compute.bnb import weight_bytes

    parameters = {id(p): p for p in model.outer.parameters() if not p.is_meta}
    held = sum(weight_bytes(p) for p in parameters.values())
    states = {id(m): m.state for m in model.outer.modules() if getattr(m, "state", None) is not None}
    held += sum(state.SCB.nbytes for state in states.values() if getattr(state, "SCB", None) is not None)
    packed = model.lean is not None and all(p.is_meta for p in model.base.layers.parameters())
    return int(held + (model.lean.size_bytes() + model.tail_bytes() if packed else 0))


def plan_of(case: dict[str, Any], files: tuple[Path, ...], dtype: str) -> StageBytes:
    """Conversations come on top."""
    from swarmnode.cluster.pricing import ModelShape, price_stage

    sizes, config = layer_params(files, case["layers"]), read_config(Path(case["model"]))
    shape = ModelShape(
        layer_params=tuple(sizes[:-2]),
        embed_params=sizes[-2],
        head_params=sizes[-1],
        kv_values_per_token_layer=0,
        context_tokens=1,
        recorded_stages=1,
        recorded_boundaries=(),
        tied=bool(config.get("tie_word_embeddings")),
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
    )
    return price_stage(shape, case["first"], case["end"], dtype, case["method"], 1)


def largest_block(files: tuple[Path, ...], case: dict[str, Any], dtype: str) -> int:
    """One block in full precision."""
    sizes = layer_params(files, case["layers"])
    return max(sizes[case["first"] : case["end"]]) * {"float32": 4, "bfloat16": 2}[dtype]


def layer_params(files: tuple[Path, ...], layers: int) -> list[int]:
    """Parameters of every layer, then of the embeddings, then of the head with its norm."""
    from swarmnode.catalog.kept_blocks import weight_and_kind
    from swarmnode.catalog.safetensors_header import read_header

    headers = [read_header(path) for path in files]
    tensors = {n: entry for header in headers for n, entry in header.items() if weight_and_kind(n) is None}
    sizes = [0] * (layers + 2)
    for name, entry in tensors.items():
        parts = name.split(".")
        where = int(parts[2]) if parts[1] == "layers" else layers if parts[1] == "embed_tokens" else layers + 1
        sizes[where] += entry.params
    if "lm_head.weight" not in tensors:
        sizes[-1] += sizes[-2]
    return sizes


def rss_anon_bytes() -> int:
    """Anonymous resident memory of this process: file pages in the page cache do not count."""
    return resident_bytes("RssAnon")


def resident_bytes(kind: str) -> int:
    """This process's RssAnon, or its VmRSS, which is what a machine has to offer a worker."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"{kind} is read from /proc/self/status, which this system does not have")


def read_config(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model / "tokenizer" / "config.json").read_text())
    return config


def count_layers(model: Path) -> int:
    return int(read_config(model)["num_hidden_layers"])


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
    from rich.table import Table

    from swarmnode.cli.output import console

    table = Table(title=f"Loading a stage (aims: × held and × peak ≤ {AIM_RATIO}, plan within {AIM_PLAN:.0%})")
    columns = ("method", "layers", "dtype", "held MiB", "RssAnon", "× held", "peak", "× peak", "process", "plan", "off")
    for column in (*columns, "peak of plan", "seconds"):
        table.add_column(column, justify="right")
    for load in loads:
        held, grown, peak, whole, plan = (
            f"{load[f'{key}_bytes'] / 2**20:.1f}" for key in ("held", "rss_anon", "peak", "process", "planned")
        )
        cells = (held, grown, f"{load['ratio']:.3f}", peak, f"{load['peak_ratio']:.3f}", whole, plan)
        table.add_row(
            load["method"],
            load["layers"],
            load["dtype"],
            *cells,
            f"{load['plan_error']:+.1%}",
            f"{load['peak_of_plan']:.3f}",
            f"{load['seconds']:.2f}",
        )
    console().print(table)


if __name__ == "__main__":
    main()
