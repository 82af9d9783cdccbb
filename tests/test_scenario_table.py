"""The table of fault scenarios in README.md names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
WANTED = {*range(1, 7), 9, 10, *range(12, 16), *range(17, 21)}


def test_every_scenario_has_a_test_that_exists() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \|.*$", text := (TESTS / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {int(number) for row in rows for number in row.split(",")} == WANTED
    named = re.findall(r"`(\w+/\w+\.py)::(\w+)`", text)
    assert len(named) >= len(rows)
    for file, test in named:
        assert f"def {test}(" in (TESTS / file).read_text(encoding="utf-8"), (file, test)
