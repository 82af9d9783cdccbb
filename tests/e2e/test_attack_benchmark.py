"""The attack benchmark still attacks, and other clients' chats still succeed. No time is judged."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import attack

pytestmark = pytest.mark.e2e


SHOWN = ("a member's PING flood", "slow readers", f"{attack.IDLE_CONNECTIONS} idle connections")
"""One of each way: the other floods differ by one frame only."""


def test_attacks_run_and_no_chat_fails(capfd: Any) -> None:
    attack.main(["--json", "--seconds", "0.5", *(word for name in SHOWN for word in ("--only", name))])
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert [row["attack"] for row in report["rows"]] == list(SHOWN)
    for row in report["rows"]:
        assert (row["failed"], row["chats"] > 0) == (0, True), row
        assert row["connections"] > 0, row
