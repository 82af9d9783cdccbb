"""The attack benchmark still attacks, and other clients' chats still succeed. No time is judged."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import attack

pytestmark = pytest.mark.e2e


def test_every_attack_runs_and_no_chat_fails(capfd: Any) -> None:
    attack.main(["--json", "--seconds", "1"])
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert [row["attack"] for row in report["rows"]] == list(attack.ATTACKS)
    for row in report["rows"]:
        assert (row["failed"], row["chats"] > 0) == (0, True), row
        assert row["connections"] > 0, row
