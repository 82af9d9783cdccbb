"""Wall clocks that jump by a day under real nodes: what is timed goes on, and what ends at a date ends by the clock.

A node's own clock is set, as Python code reads it (`wall_clock/`); OpenSSL, which holds certificates against a clock,
goes by the machine's. A machine that sleeps cannot be made here: `roles/test_voting.py` has that, with CLOCK_BOOTTIME
as an argument.
"""

from __future__ import annotations

import os
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import openai
import pytest
from local_swarms import wait_until
from voting_swarms import FIRST, SECOND, THIRD, VOTERS, Voters, answers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swarmnode.cli.client import ApiClient

pytestmark = pytest.mark.e2e
MODEL = "scripted"
DAY_S = 86_400.0
HOUR_S = 3600.0
LONG = "abcdefghij" * 400
MORE = 100
"""Chunks of a reply that are read after the clock jumped."""
DISTURBED = frozenset({"peer_joined", "peer_left", "joined", "coordinating", "resigned", "following", "ring_over"})
"""None of these happens to a swarm whose clocks are the only thing that is wrong."""


class Clocks:
    """Three voters, two of which hold a ring, and by how much each one's wall clock is off."""

    def __init__(self, folder: Path, models_root: Path) -> None:
        self.folder = folder / "clocks"
        self.folder.mkdir()
        path = os.pathsep.join([str(Path(__file__).parents[1] / "wall_clock"), os.environ.get("PYTHONPATH", "")])
        environment = {"PYTHONPATH": path, "WALL_CLOCKS": str(self.folder)}
        self.voters = Voters(folder, models_root, environment=environment)

    def set(self, node: str, off_s: float) -> None:
        """From the next time on that the node looks; it does with every heartbeat."""
        new = self.folder / "new"
        new.write_text(str(off_s))
        new.replace(self.folder / node)
        wait_until(lambda: (self.folder / f"{node}.read").read_text() == str(off_s), f"{node} goes by it")

    def disturbances(self) -> list[str]:
        told = [event["event"] for name in VOTERS for event in self.voters.node(name).seen]
        return [event for event in told if event in DISTURBED]


@pytest.fixture
def clocks(tmp_path: Path, models_root: Path) -> Iterator[Clocks]:
    started = Clocks(tmp_path, models_root)
    yield started
    started.voters.close()


def new_token(admin: ApiClient, label: str, **more: object) -> str:
    return str(admin.post("/api/v1/api-tokens", {"label": label, "scopes": ["admin"], **more})["token"])


def test_scenario_17_clocks_that_jump_by_a_day_end_nothing_but_what_ends_at_a_date(clocks: Clocks) -> None:
    voters = clocks.voters
    voters.swarm.load(MODEL, num_stages=2)
    with closing(voters.local.client()) as admin:
        for_ever, for_an_hour = new_token(admin, "for ever"), new_token(admin, "for an hour", expires_in_s=HOUR_S)
        before = clocks.disturbances()
        with closing(openai.OpenAI(base_url=f"{voters.apis[THIRD]}/v1", api_key=for_ever, max_retries=0)) as client:
            running = client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "long"}], stream=True
            )
            texts = [next(running).choices[0].delta.content or ""]
            for off_s in (DAY_S, -DAY_S):
                clocks.set(FIRST, off_s)
                assert answers(voters.local.api, for_an_hour) is (off_s < 0), "a token ends by the coordinator's clock"
            texts += [chunk.choices[0].delta.content or "" for chunk in islice(running, MORE)]
            running.close()
        assert (len("".join(texts)) > MORE / 2, LONG.startswith("".join(texts))) == (True, True), "a reply goes on"
        for off_s in (DAY_S, -DAY_S):
            clocks.set(SECOND, off_s)
            assert answers(voters.apis[SECOND], for_ever)
        nodes = admin.get("/api/v1/nodes")
        assert [peer["state"] for peer in nodes["peers"]] == ["alive", "alive"]
        assert [link["up"] for link in nodes["voter_links"]] == [True, True]
        new_token(admin, "agreed on all the same")
    assert clocks.disturbances() == before
