"""The relay's benchmark runs with tiny settings; how fast it was is nobody's business here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from benchmarks import relay_rate

if TYPE_CHECKING:
    import pytest


def test_frames_through_the_relay_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    relay_rate.main(["--frames", "5", "--frame-bytes", "1000", "--json"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(rate["together"], rate["frames"]) for rate in report["rates"]] == [(True, 5), (False, 5)]
