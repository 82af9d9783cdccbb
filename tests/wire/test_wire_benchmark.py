"""The wire benchmark runs end to end in its four processes and says what it promises (no figure is asserted)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.e2e
def test_the_benchmark_prints_one_json_object_on_its_last_line() -> None:
    command = [sys.executable, "-m", "benchmarks.wire", "--rounds", "20", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout.splitlines()[-1])
    assert [row["bytes"] for row in report["sizes"]] == [1024, 16384, 2621440]
    assert all(row["hop_ms"] > 0 and row["raw_ms"] > 0 for row in report["sizes"])
