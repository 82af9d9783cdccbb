"""The benchmarks of a model's stages, on a tiny one: each runs, and its JSON has what its readers look for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_tiny

from swarmnode.catalog.importing import import_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def servable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("measured")
    manifest = import_model(str(make_tiny(root / "base", num_layers=2)), root / "models", stages=1)
    return root / "models" / manifest.id


def run(benchmark: str, servable: Path, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--model", str(servable), "--json", *options]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["benchmark"] == benchmark
    return result


def test_decode(servable: Path) -> None:
    result = run(
        "decode", servable, "--threads", "1", "--rows", "1,2", "--context", "8", "--tokens", "8", "--rounds", "2"
    )
    assert {"lean-bf16", "int8", "int4-fast"} <= result["ratios"].keys()
    (measured,) = result["runs"]
    assert measured["tokens"] == 8
    assert measured["step_ms"]["int8"].keys() == {"1", "2"}
    assert measured["where_ms"]["int8"].keys() == {"qkv", "o", "gate_up", "down", "head", "rest"}
    assert all(rate > 0 for rate in result["tokens_per_s"].values())


def test_batch(servable: Path) -> None:
    options = ("--threads", "1", "--rows", "1,2", "--contexts", "8", "--rounds", "1", "--sides", "int8")
    (measured,) = run("batch", servable, *options)["runs"]
    assert measured["step_ms"]["int8"]["8"].keys() == {"1", "2"}
    assert measured["ratios"]["int8"]["8"] > 0


def test_quality(servable: Path) -> None:
    result = run("quality", servable, "--tokens", "12", "--methods", "none,int4-fast anew")
    assert list(result["methods"]) == ["float32", "none", "int4-fast anew"]
    assert all(row["perplexity"] > 1 for row in result["methods"].values())


def test_load_memory(servable: Path) -> None:
    result = run("load_memory", servable, "--stages", "2", "--methods", "int8")
    assert result["worst"].keys() == result["aims"].keys()
    assert [(load["layers"], load["method"]) for load in result["loads"]] == [("0-0", "int8"), ("1-1", "int8")]
    assert all(load["process_bytes"] > load["held_bytes"] > 0 for load in result["loads"])
    assert all(load["planned_bytes"] > load["planned_workspace_bytes"] > 0 for load in result["loads"])
