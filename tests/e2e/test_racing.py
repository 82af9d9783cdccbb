"""Many administrators at once: of calls that contradict each other one wins, and nothing is left behind."""

from __future__ import annotations

import threading
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from local_swarms import REPLY, Swarm, alive, descendants, start_swarm, wait_until

from swarmnode.cli.client import ApiClient
from swarmnode.errors import SwarmError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e
MODEL = "scripted"
CALLS = 50
TOLD = {409, 503}
"""What whoever loses hears: another loads it, or it is being unloaded."""


@dataclass
class Race:
    """What all callers heard, whose calls began together."""

    won: list[dict[str, Any]] = field(default_factory=list)
    lost: list[SwarmError] = field(default_factory=list)

    def run(self, swarm: Swarm, call: Callable[[int], tuple[str, dict[str, Any]]]) -> None:
        """`call` gives the action and the body of each."""
        together = threading.Barrier(CALLS)

        def ask(number: int) -> None:
            action, body = call(number)
            with closing(ApiClient(swarm.local.api, silence_s=60)) as client:
                together.wait()
                try:
                    self.won.append(client.post(f"/api/v1/models/{MODEL}/{action}", body))
                except SwarmError as error:
                    self.lost.append(error)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(CALLS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(self.won) + len(self.lost) == CALLS
        assert {error.status for error in self.lost} <= TOLD, self.lost
        assert self.won

    @property
    def rings(self) -> dict[int, set[str]]:
        """Those that winners were told of, by epoch."""
        found: dict[int, set[str]] = {}
        for status in self.won:
            if "ring" in status:
                found.setdefault(status["epoch"], set()).add(status["ring"])
        return found


@pytest.fixture
def swarm(tmp_path: Path, models_root: Path) -> Iterator[Swarm]:
    started = start_swarm(tmp_path, models_root, peers=2)
    yield started
    started.close()


def running(swarm: Swarm) -> dict[int, set[str]]:
    return {ring["epoch"]: {ring["ring"]} for ring in swarm.client.get("/api/v1/nodes")["rings"]}


def workers(swarm: Swarm) -> list[int]:
    return [worker for node in swarm.local.peers.values() for worker in descendants(node.process.pid)]


def test_of_fifty_loads_that_contradict_each_other_one_wins(swarm: Swarm) -> None:
    race = Race()
    race.run(swarm, lambda number: ("load", {"wait": True, "num_stages": 1 + number % 2}))
    assert list(race.rings) == [1], "all winners have one ring"
    assert running(swarm) == race.rings
    assert all("ring epoch 1" in error.message for error in race.lost), race.lost
    assert len(workers(swarm)) == len(swarm.status(MODEL)["stages"])
    assert swarm.ask(MODEL) == REPLY


def test_fifty_racing_loads_and_unloads(swarm: Swarm) -> None:
    race = Race()
    both = ("unload", {"force": True}), ("load", {"wait": True, "num_stages": 2})
    race.run(swarm, lambda number: both[number % 2])
    assert all(len(rings) == 1 for rings in race.rings.values()), "an epoch is of one ring"
    left = running(swarm)
    assert left in ({}, {epoch: race.rings.get(epoch) for epoch in sorted(race.rings)[-1:]}), "the last success counts"
    swarm.unload(MODEL)
    wait_until(lambda: not any(map(alive, workers(swarm))), "no worker is left")
    status = swarm.load(MODEL, num_stages=2)
    assert status["epoch"] > max(race.rings, default=0)
    assert swarm.ask(MODEL) == REPLY
    assert len(swarm.worker_pids(MODEL)) == len(workers(swarm)) == 2
