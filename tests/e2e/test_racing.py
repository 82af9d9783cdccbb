"""Many administrators at once: of calls that contradict each other one wins, and nothing is left behind."""

from __future__ import annotations

import threading
from contextlib import closing
from typing import TYPE_CHECKING

import pytest
from local_swarms import REPLY, alive, descendants, start_swarm, wait_until

from swarmnode.cli.client import ApiClient
from swarmnode.errors import SwarmError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.e2e
MODEL = "scripted"
CALLS = 50
TOLD = {"conflict", "model_unloading", "load_failed"}
"""What whoever loses hears: another loads or unloads it; or its own load was unloaded before it was up."""


def test_fifty_racing_loads_and_unloads(tmp_path: Path, models_root: Path) -> None:
    swarm = start_swarm(tmp_path, models_root, peers=2)
    outcomes: list[str] = []
    together = threading.Barrier(CALLS)

    def call(number: int) -> None:
        body = {"wait": True, "num_stages": 2} if number % 2 else {"force": True}
        action = "load" if number % 2 else "unload"
        with closing(ApiClient(swarm.local.api, silence_s=60)) as client:
            together.wait()
            try:
                client.post(f"/api/v1/models/{MODEL}/{action}", body)
            except SwarmError as error:
                outcomes.append(error.code)
            else:
                outcomes.append(action)

    try:
        threads = [threading.Thread(target=call, args=(number,)) for number in range(CALLS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(outcomes) == CALLS
        assert set(outcomes) <= {"load", "unload"} | TOLD, outcomes
        assert {"load", "unload"} & set(outcomes), "somebody won"
        nodes = swarm.client.get("/api/v1/nodes")
        rings = [ring["ring"] for ring in nodes["rings"]]
        assert len(rings) <= 1
        swarm.unload(MODEL)
        peers = [node.process.pid for node in swarm.local.peers.values()]
        wait_until(lambda: not any(map(alive, [w for pid in peers for w in descendants(pid)])), "no worker is left")
        swarm.load(MODEL, num_stages=2)
        assert swarm.ask(MODEL) == REPLY
        assert len(swarm.worker_pids(MODEL)) == 2
        assert sum(len(descendants(pid)) for pid in peers) == 2
    finally:
        swarm.close()
