"""`make gpu-check` on a machine without a card: its table, its skips, and its end in time."""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import gpu_check as checks

if TYPE_CHECKING:
    import pytest

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


def test_what_the_checks_import_is_there() -> None:
    """They import as they run, so that a box without a package skips: without a card nobody would see a wrong name."""
    folders = (ROOT, checks.FOLDER, checks.FOLDER.parent, checks.FOLDER.parent / "compute")
    asked = [
        (folder / f"{node.module.replace('.', '/')}.py", alias.name)
        for path in checks.FOLDER.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
        for folder in folders
    ]
    ours = [(path, name) for path, name in asked if path.is_file()]
    assert len(ours) > 20
    assert [(path.name, name) for path, name in ours if name not in names_in(path)] == []


def names_in(module: Path) -> set[str]:
    """What may be imported from it."""
    found: set[str] = set()
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


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


def test_a_report_of_a_hung_card_does_not_ask_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang() -> str:
        raise AssertionError("would wait for the driver")

    monkeypatch.setattr(checks, "card", hang)
    out = io.StringIO()
    checks.report(checks._Rows("a card"), argparse.Namespace(limit_s=1, json=True), out)
    assert json.loads(out.getvalue().splitlines()[-1])["card"] == "a card"


def test_a_driver_that_holds_pythons_lock_is_ended_too(tmp_path: Path) -> None:
    """The timer's thread never runs; the traceback says where it hangs."""
    (tmp_path / "hold_lock.py").write_text(
        "import ctypes\n"
        "from benchmarks import gpu_check\n"
        "gpu_check.SPARE_S = 0.5\n"
        "gpu_check.card = lambda: ctypes.PyDLL(None).sleep(100)\n"
        "gpu_check.main()\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "hold_lock.py"), "--limit-s", "0.5"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "in main" in done.stdout
