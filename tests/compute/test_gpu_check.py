"""`make gpu-check` on a machine without a card: its table, its skips, and its end in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def gpu_check(*options: str, first: Path | None = None) -> tuple[int, str]:
    """Its exit status and what it printed; what lies in `first` is imported before what is installed."""
    paths = [str(path) for path in (first, ROOT) if path is not None]
    environ = {**os.environ, "GPU_CHECK_DEVICE": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "benchmarks.gpu_check", *options]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, done.stdout


def rows_of(printed: str) -> dict[str, dict[str, Any]]:
    return {row["check"]: row for row in json.loads(printed.splitlines()[-1])["checks"]}


def test_every_check_has_its_row() -> None:
    code, printed = gpu_check("--only", "lean_decoder or packed_kernels_are_refused", "--json")
    rows = rows_of(printed)
    assert {name: (row["result"], row["why"]) for name, row in rows.items()} == {
        "test_the_lean_decoder_serves_on_a_card_too": ("passed", ""),
        "test_the_cpus_packed_kernels_are_refused_on_a_card": ("skipped", "there is no card"),
    }
    assert "1 passed, 0 failed, 1 skipped" in printed
    assert code == 0


def test_a_package_that_is_missing_makes_skips(tmp_path: Path) -> None:
    missing = "raise ModuleNotFoundError(f'No module named {__name__!r}', name=__name__)"
    (tmp_path / "pydantic.py").write_text(missing)
    code, printed = gpu_check("--only", "lean_decoder or bfloat16", "--json", first=tmp_path)
    rows = rows_of(printed)
    assert len(rows) > 3
    assert {row["result"] for row in rows.values()} == {"skipped"}
    assert all("pydantic" in row["why"] for row in rows.values())
    assert code == 0


def test_checks_that_are_not_over_in_time_end_with_the_table() -> None:
    code, printed = gpu_check("--only", "lean_decoder", "--limit-s", "0.01", "--json")
    (row,) = rows_of(printed).values()
    assert (row["result"], row["why"]) == ("failed", "it still ran when the 0.01 s for all checks were over")
    assert "0 passed, 1 failed, 0 skipped" in printed
    assert code == 1
