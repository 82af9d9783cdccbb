"""A measurement in a process of its own, so that no thread pool of another count and no earlier load is left over."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def in_fresh_process(benchmark: str, case: dict[str, Any]) -> dict[str, Any]:
    """What `python -m benchmarks.<benchmark> --one CASE` prints on its last line."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", "--one", json.dumps(case)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result
