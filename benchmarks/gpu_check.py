"""Run the checks of tests/gpu with the interpreter at hand and print one row for each; installs nothing.

`python -m benchmarks.gpu_check [--json]`. Needs pytest; what else a check needs and does not find makes it a skip with
the reason. Ends with 1 if a check failed. `GPU_CHECK_DEVICE=cpu` runs the same checks without a card.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "gpu"
CHECK_S = 300
"""The whole run's aim."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args()
    if importlib.util.find_spec("pytest") is None:
        print("skipped: pytest is not installed here")
        return 0
    import pytest

    rows = _Rows()
    arguments = ["-c", str(FOLDER / "gpu_check.ini"), "-p", "no:cacheprovider", "-q", "--no-header", "--tb=short"]
    code = int(pytest.main([*arguments, str(FOLDER)], plugins=[rows]))
    show(rows.rows)
    if options.json:
        print(json.dumps({"benchmark": "gpu_check", "card": card(), "checks": rows.rows}))
    return 1 if code not in (0, 5) else 0


class _Rows:
    """A pytest plugin that notes what became of every check."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        why = ""
        if report.outcome == "skipped":
            why = str(report.longrepr[2]).removeprefix("Skipped: ")
        elif report.outcome == "failed":
            why = str(getattr(report.longrepr, "reprcrash", None) and report.longrepr.reprcrash.message)[:200]
        name = report.nodeid.rpartition("::")[2]
        self.rows.append({"check": name, "result": report.outcome, "seconds": round(report.duration, 2), "why": why})

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome == "failed":
            self.rows.append({"check": report.nodeid, "result": "failed", "seconds": 0.0, "why": "cannot be imported"})


def card() -> str:
    if importlib.util.find_spec("torch") is None:
        return "no torch"
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "no CUDA card"


def show(rows: list[dict[str, Any]]) -> None:
    """Plain text: rich may not be installed here."""
    width = max([len(row["check"]) for row in rows] or [0])
    print(f"\n{card()}; {sum(row['seconds'] for row in rows):.0f} s of {CHECK_S}")
    for row in rows:
        why = row["why"].splitlines()[0] if row["why"] else ""
        print(f"{row['check']:<{width}}  {row['result']:<7}  {row['seconds']:7.2f} s  {why}")
    counts = {result: sum(row["result"] == result for row in rows) for result in ("passed", "failed", "skipped")}
    print(", ".join(f"{count} {result}" for result, count in counts.items()))


if __name__ == "__main__":
    sys.exit(main())
