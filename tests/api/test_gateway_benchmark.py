"""The gateway benchmark still runs, counts what was generated, and prints its JSON last. No time is judged."""

from __future__ import annotations

import json
from typing import Any

from benchmarks import gateway


def test_it_counts_every_token(capfd: Any) -> None:
    gateway.main(["--json", "--backend", "replay", "--streams", "1,3", "--tokens", "40", "--rounds", "1"])
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert [(row["streams"], row["tokens_per_stream"], row["chunks_per_stream"]) for row in report["rows"]] == [
        (1, 40, 40.0),
        (3, 40, 40.0),
    ]
    assert all(row["tokens_per_s"] > 0 and row["ttft_ms"] > 0 for row in report["rows"])
