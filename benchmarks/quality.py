"""Measure what each quantization costs in quality: perplexity on a small public-domain text, and how often its most
likely token is the one that the weights as stored (float32) hold most likely.

`python -m benchmarks.quality [--model FOLDER] [--methods none,…] [--tokens N] [--json]`; without a model the demo model
is imported. The text (openings of Carroll, Doyle and Melville, `quality_text.txt`) is read position by position, as a
reply is written, so that the kernels of decoding are what is measured. The demo model's weights come from a 4-bit GGUF
file whose blocks int4-fast takes as they are, which `int4-fast anew` does not; what four bits cost a model of full
precision is not read on it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.decode import import_demo

if TYPE_CHECKING:
    from numpy.typing import NDArray

TEXT = Path(__file__).with_name("quality_text.txt")
REFERENCE = "float32"
ANEW = "int4-fast anew"
"""Quantized from the dequantized weights, though the blocks are there."""
SIDES: dict[str, dict[str, str]] = {
    REFERENCE: {"dtype": "float32"},
    "none": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4-fast": {"quantization": "int4-fast"},
    ANEW: {"quantization": "int4-fast"},
    "nf4": {"quantization": "nf4"},
    "bnb-int8": {"quantization": "bnb-int8"},
}


def main() -> None:
    """Measure every method; print a table, with --json one JSON object on the last line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("--model", type=Path, help="a servable's folder")
    parser.add_argument("--methods", default=",".join(list(SIDES)[1:]), help="separated by commas")
    parser.add_argument("--tokens", type=int, default=256, help="positions read")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or import_demo(Path(scratch))
        ids = token_ids(model, options.tokens)
        results = measure(model, ids, options.methods.split(","))
    show(results, len(ids))
    if options.json:
        print(json.dumps({"benchmark": "quality", "tokens": len(ids), "methods": results}))


def measure(model: Path, ids: list[int], methods: list[str]) -> dict[str, dict[str, float]]:
    """Perplexity by method, its ratio to the reference's, and the share of positions with the same best token."""
    reference = Reading(model, ids, REFERENCE)
    results = {REFERENCE: {"perplexity": round(reference.perplexity, 3), "ratio": 1.0, "same_best": 1.0}}
    for method in methods:
        reading = Reading(model, ids, method)
        results[method] = {
            "perplexity": round(reading.perplexity, 3),
            "ratio": round(reading.perplexity / reference.perplexity, 4),
            "same_best": round(float((reading.best == reference.best).mean()), 4),
        }
    return results


class Reading:
    """The text as one loaded method reads it: `best` is the likeliest next token at every position."""

    best: NDArray[Any]

    def __init__(self, model: Path, ids: list[int], method: str) -> None:
        import numpy as np
        import torch

        from swarmnode.compute.kv_cache import SessionCache

        stage = load(model, method).model
        cache = SessionCache(stage.num_layers)
        loss, best = 0.0, []
        with torch.inference_mode():
            for position, (token, following) in enumerate(pairwise(ids)):
                rows = stage.embed(torch.tensor([[token]]))
                logits = stage.logits(rows, torch.tensor([[position]]), [cache])[0].float()
                loss -= float(logits.log_softmax(-1)[following])
                best.append(int(logits.argmax()))
        self.perplexity = math.exp(loss / (len(ids) - 1))
        self.best = np.array(best)


def load(folder: Path, method: str) -> Any:
    from swarmnode.catalog.kept_blocks import BLOCKS_FILE
    from swarmnode.compute.loader import load_stage
    from swarmnode.compute.spec import StageSpec

    layers = int(json.loads((folder / "tokenizer" / "config.json").read_text())["num_hidden_layers"])
    files = sorted(folder.glob("shards/*/*.safetensors"))
    if method == ANEW:
        files = [path for path in files if path.name != BLOCKS_FILE]
    threads = int(os.environ.get("OMP_NUM_THREADS") or 0)
    where = (folder, tuple(files), 0, layers, layers, True, True)
    return load_stage(StageSpec(*where, device="cpu", threads=threads, **SIDES[method]))


def token_ids(model: Path, count: int) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer" / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids
    return ids[:count]


def show(results: dict[str, dict[str, float]], tokens: int) -> None:
    from rich.table import Table

    from swarmnode.cli.output import console

    table = Table("method", "perplexity", "× float32", "same best token", title=f"{tokens} tokens of {TEXT.name}")
    for method, row in results.items():
        table.add_row(method, f"{row['perplexity']:.2f}", f"{row['ratio']:.3f}", f"{row['same_best']:.1%}")
    console().print(table)


if __name__ == "__main__":
    main()
