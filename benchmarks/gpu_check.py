"""Run the checks of tests/gpu with the interpreter at hand and print one row for each; installs nothing.

`python -m benchmarks.gpu_check [--only EXPRESSION] [--limit-s S] [--json]`. Needs pytest; what else a check needs and
does not find makes it a skip with the reason. Ends with 1 if a check failed, or with the table so far if they are not
over in time: a kernel that hangs is then the check that still runs. `GPU_CHECK_DEVICE=cpu` runs them without a card.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "gpu"
CHECK_S = 300.0
"""For the whole run."""
SPARE_S = 10.0
"""After which the process ends without a table."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--only", default="", help="the checks whose names this expression of pytest's -k says")
    parser.add_argument("--limit-s", type=float, default=CHECK_S, help="for all checks together")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args()
    if importlib.util.find_spec("pytest") is None:
        print("skipped: pytest is not installed here")
        return 0
    import pytest

    own_output = os.fdopen(os.dup(1), "w")  # pytest captures descriptor 1 while a check runs
    # The timer below needs Python's lock, which a call that hangs in a driver may hold: this one does not.
    faulthandler.dump_traceback_later(options.limit_s + SPARE_S, exit=True, file=own_output)
    rows = _Rows(card())
    watchdog = threading.Timer(options.limit_s, _give_up, [rows, options, own_output])
    watchdog.daemon = True
    watchdog.start()
    arguments = ["-c", str(FOLDER / "gpu_check.ini"), "-p", "no:cacheprovider", "-q", "--no-header", "--tb=short"]
    code = int(pytest.main([*arguments, "-k", options.only, str(FOLDER)], plugins=[rows]))
    watchdog.cancel()
    faulthandler.cancel_dump_traceback_later()
    report(rows, options, own_output)
    return 1 if code not in (0, 5) else 0


def _give_up(rows: _Rows, options: argparse.Namespace, out: TextIO) -> None:
    """End the process, whatever its main thread waits for in a driver: so nothing here asks the card."""
    why = f"it still ran when the {options.limit_s:g} s for all checks were over"
    rows.rows.append({"check": rows.running, "result": "failed", "seconds": 0.0, "why": why})
    report(rows, options, out)
    os._exit(1)


def report(rows: _Rows, options: argparse.Namespace, out: TextIO) -> None:
    show(rows, options.limit_s, out)
    if options.json:
        print(json.dumps({"benchmark": "gpu_check", "card": rows.card, "checks": rows.rows}), file=out)
    out.flush()


class _Rows:
    """A pytest plugin that notes what became of every check."""

    def __init__(self, card: str) -> None:
        self.card = card
        self.rows: list[dict[str, Any]] = []
        self.running = "the collection of the checks"

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running = nodeid.rpartition("::")[2]

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


def show(noted: _Rows, limit_s: float, out: TextIO) -> None:
    """Plain text: rich may not be installed here."""
    rows = noted.rows
    width = max([len(row["check"]) for row in rows] or [0])
    print(f"\n{noted.card}; {sum(row['seconds'] for row in rows):.0f} s of {limit_s:g}", file=out)
    for row in rows:
        why = row["why"].splitlines()[0] if row["why"] else ""
        print(f"{row['check']:<{width}}  {row['result']:<7}  {row['seconds']:7.2f} s  {why}", file=out)
    counts = {result: sum(row["result"] == result for row in rows) for result in ("passed", "failed", "skipped")}
    print(", ".join(f"{count} {result}" for result, count in counts.items()), file=out)


if __name__ == "__main__":
    sys.exit(main())
