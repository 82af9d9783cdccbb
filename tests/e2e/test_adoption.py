"""A coordinator that is killed and comes back finds its rings as they were; one that stays away costs no memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
import openai
import pytest
from local_swarms import REPLY, Swarm, alive, start_swarm, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e
MODEL = "scripted"
PATIENT_S, KEPT_S = 60, 4


@pytest.fixture
def swarm(request: pytest.FixtureRequest, tmp_path: Path, models_root: Path) -> Iterator[Swarm]:
    """Two peers that keep their stages for PATIENT_S without a coordinator, or for as long as the test says."""
    kept = {"SWARM_KEEP_STAGES_S": str(getattr(request, "param", PATIENT_S))}
    started = start_swarm(tmp_path, models_root, peers=2, environment=kept)
    yield started
    started.close()


def kill_coordinator(swarm: Swarm) -> None:
    assert swarm.local.coordinator is not None
    swarm.local.coordinator.kill()


def restart(swarm: Swarm) -> None:
    """At the same addresses, from the same data directory."""
    address, api = swarm.local.swarm, swarm.local.api.removeprefix("http://")
    swarm.local.start_coordinator(swarm_listen=address, api_listen=api)


def test_a_restarted_coordinator_takes_its_rings_over_without_a_load(swarm: Swarm) -> None:
    swarm.load(MODEL, num_stages=2)
    workers = swarm.worker_pids(MODEL)
    stream = swarm.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "long"}], stream=True
    )
    assert next(iter(stream))
    for _ in range(2):  # what was taken over is written down as what was loaded
        kill_coordinator(swarm)
        restart(swarm)
        wait_until(lambda: swarm.status(MODEL)["state"] == "ready", "the ring is taken over")
        assert swarm.ask(MODEL) == REPLY
        assert swarm.worker_pids(MODEL) == workers
    with pytest.raises((openai.APIError, httpx.TransportError)):  # the reply that ran was the killed coordinator's
        for _ in stream:
            pass
    wait_until(lambda: swarm.quiet(MODEL), "the lost reply is given up on every stage")
    swarm.client.post(f"/api/v1/models/{MODEL}/unload", {})
    wait_until(lambda: not any(map(alive, workers.values())), "the workers have ended")
    kill_coordinator(swarm)
    restart(swarm)
    assert swarm.client.get("/api/v1/nodes")["rings"] == [], "an unloaded ring is not found again"


@pytest.mark.parametrize("swarm", [KEPT_S], indirect=True)
def test_without_a_coordinator_stages_end_and_their_ring_is_loaded_again_when_it_returns(swarm: Swarm) -> None:
    swarm.load(MODEL, num_stages=2)
    workers = swarm.worker_pids(MODEL)
    kill_coordinator(swarm)
    wait_until(lambda: not any(map(alive, workers.values())), "the workers have ended", KEPT_S + 10)
    restart(swarm)
    wait_until(lambda: len(swarm.client.get("/api/v1/nodes")["peers"]) == 2, "both peers joined again")
    wait_until(lambda: swarm.status(MODEL)["state"] == "ready", "the ring is loaded again", KEPT_S + 30)
    assert swarm.ask(MODEL) == REPLY
