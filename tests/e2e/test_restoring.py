"""A lost ring is loaded again: on the peers that are there, or when its own come back; until a person ends it."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

import openai
import pytest
from local_swarms import REPLY, Swarm, alive, descendants, process_state, start_swarm, swarmnode, wait_until

from swarmnode.cluster.membership import DEAD_S
from swarmnode.errors import SwarmError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e
MODEL = "scripted"
AGAIN_S = 40.0
"""To notice a loss, to give memory back and to load a script."""


@pytest.fixture
def swarms(tmp_path: Path, models_root: Path) -> Iterator[Callable[[int], Swarm]]:
    """Makes the test's swarm, with as many peers as are asked for."""
    started: list[Swarm] = []

    def start(peers: int) -> Swarm:
        started.append(start_swarm(tmp_path, models_root, peers=peers))
        return started[0]

    yield start
    for swarm in started:
        swarm.close()


def serves(swarm: Swarm, without: dict[str, int]) -> bool:
    """The model is ready, on workers that are all new."""
    status = swarm.status(MODEL)
    return status["state"] == "ready" and not {stage["pid"] for stage in status["stages"]} & {*without.values()}


def placed(status: dict[str, Any]) -> list[str]:
    return [stage["peer"] for stage in status["stages"]]


def lost(swarm: Swarm, kill: int) -> None:
    os.kill(kill, signal.SIGKILL)
    wait_until(lambda: not alive(kill), "it is dead")


def waits(swarm: Swarm) -> dict[str, Any] | None:
    """What a lost model waits for, once it does."""
    status = swarm.status(MODEL)
    again = status["restoring"] or {}
    return status if status["state"] == "restoring" and "free peers" in again.get("waits_for", "") else None


@pytest.mark.soak
def test_a_killed_workers_ring_comes_back_on_the_same_peers(swarms: Callable[[int], Swarm]) -> None:
    swarm = swarms(3)
    before = swarm.load(MODEL)
    workers = swarm.worker_pids(MODEL)
    lost(swarm, workers[placed(before)[1]])
    wait_until(lambda: serves(swarm, workers), "the ring is loaded again", AGAIN_S)
    assert placed(swarm.status(MODEL)) == placed(before)
    assert swarm.ask(MODEL) == REPLY
    assert not any(map(alive, workers.values()))


def test_a_lost_stage_goes_to_a_third_peer_and_the_other_one_stays(swarms: Callable[[int], Swarm]) -> None:
    swarm = swarms(3)
    before = swarm.load(MODEL)
    workers = swarm.worker_pids(MODEL)
    stayed, gone = placed(before)
    swarm.local.peers[gone].kill()
    wait_until(lambda: serves(swarm, workers), "the ring is loaded again", AGAIN_S)
    (spare,) = {*swarm.local.peers} - {stayed, gone}
    assert placed(swarm.status(MODEL)) == [stayed, spare]
    assert swarm.ask(MODEL) == REPLY
    assert not any(map(alive, workers.values()))
    events = [event["event"] for event in swarm.client.get("/api/v1/nodes")["events"] if event.get("model") == MODEL]
    assert events[-4:] == ["ring_over", "ring_restoring", "ring_loading", "ring_ready"]


def test_without_a_place_it_waits_says_so_and_the_peer_that_returns_gets_its_stage(
    swarms: Callable[[int], Swarm],
) -> None:
    swarm = swarms(2)
    before = swarm.load(MODEL)
    workers = swarm.worker_pids(MODEL)
    gone = placed(before)[0]
    swarm.local.peers[gone].kill()
    wait_until(lambda: waits(swarm) is not None, "it waits", AGAIN_S)
    status = waits(swarm)
    assert status is not None
    assert (status["restoring"]["stage"], status["stages"]) == (0, [])
    assert gone in status["error"]["message"]
    assert 0 <= status["restoring"]["next_try_s"] <= 30
    shown = swarmnode("ps", "--api", swarm.local.api).stdout
    assert all(text in shown for text in (f"{MODEL} restoring", "free peers", "next try in"))
    with pytest.raises(openai.APIStatusError, match="is being loaded again") as refused:
        swarm.ask(MODEL)
    assert (refused.value.status_code, refused.value.code) == (503, "model_restoring")
    assert int(refused.value.response.headers["retry-after"]) > 0
    with pytest.raises(SwarmError, match="free peers"):
        swarm.load(MODEL)
    assert swarm.status(MODEL)["state"] == "restoring", "a load that is refused changes nothing"
    wait_until(lambda: not any(map(alive, workers.values())), "nothing is held meanwhile")
    swarm.local.start_peers(gone)
    wait_until(lambda: serves(swarm, workers), "the ring is loaded again", AGAIN_S)
    assert placed(swarm.status(MODEL)) == placed(before)
    assert swarm.ask(MODEL) == REPLY


@pytest.mark.soak
def test_an_unload_ends_the_waiting(swarms: Callable[[int], Swarm]) -> None:
    swarm = swarms(2)
    gone = placed(swarm.load(MODEL))[1]
    swarm.local.peers[gone].kill()
    wait_until(lambda: waits(swarm) is not None, "it waits", AGAIN_S)
    assert swarm.unload(MODEL)["state"] == "available"
    swarm.local.start_peers(gone)
    wait_until(lambda: len(swarm.client.get("/api/v1/nodes")["peers"]) == 2, "the peer is back")
    swarm.load("scripted-two")  # takes both peers, and would not find them free
    assert swarm.status(MODEL)["state"] == "available"


def test_loads_and_unloads_while_it_is_loaded_again(swarms: Callable[[int], Swarm]) -> None:
    swarm = swarms(2)
    swarm.load(MODEL)
    nodes = [node.process.pid for node in swarm.local.peers.values()]

    def lose_and_catch_it_loading() -> None:
        workers = swarm.worker_pids(MODEL)
        lost(swarm, next(iter(workers.values())))
        wait_until(lambda: loads_again(swarm, workers), "it is being loaded again")

    lose_and_catch_it_loading()
    assert swarm.unload(MODEL)["state"] == "available"
    assert not [child for pid in nodes for child in descendants(pid)], "the load is given up, and nothing of it is left"
    swarm.load(MODEL)
    lose_and_catch_it_loading()
    assert swarm.load(MODEL)["state"] == "ready", "whoever asks for it now waits for that load"
    assert swarm.ask(MODEL) == REPLY
    assert sum(len(descendants(pid)) for pid in nodes) == 2


def loads_again(swarm: Swarm, without: dict[str, int]) -> bool:
    """A new ring is there, and not ready yet."""
    status = swarm.status(MODEL)
    new = [stage for stage in status["stages"] if stage["pid"] not in without.values()]
    return status["state"] == "restoring" and not status["restoring"]["waits_for"] and len(new) == 2


@pytest.mark.soak
def test_a_coordinator_that_returns_without_one_of_its_peers_loads_the_ring_again(
    swarms: Callable[[int], Swarm],
) -> None:
    swarm = swarms(3)
    before = swarm.load(MODEL)
    workers = swarm.worker_pids(MODEL)
    assert swarm.local.coordinator is not None
    swarm.local.coordinator.kill()
    swarm.local.peers[placed(before)[0]].kill()
    swarm.local.start_coordinator(swarm_listen=swarm.local.swarm, api_listen=swarm.local.api.removeprefix("http://"))
    wait_until(lambda: serves(swarm, workers), "the ring is loaded again", AGAIN_S + 20)
    assert placed(swarm.status(MODEL))[1] == placed(before)[1]
    assert swarm.ask(MODEL) == REPLY
    assert not any(map(alive, workers.values()))


@pytest.mark.soak
def test_a_coordinator_that_returns_while_a_ring_waits_goes_on_waiting(swarms: Callable[[int], Swarm]) -> None:
    swarm = swarms(2)
    before = swarm.load(MODEL)
    workers = swarm.worker_pids(MODEL)
    gone = placed(before)[1]
    swarm.local.peers[gone].kill()
    wait_until(lambda: waits(swarm) is not None, "it waits", AGAIN_S)
    assert swarm.local.coordinator is not None
    swarm.local.coordinator.kill()
    swarm.local.start_coordinator(swarm_listen=swarm.local.swarm, api_listen=swarm.local.api.removeprefix("http://"))
    wait_until(
        lambda: swarm.status(MODEL)["state"] == "restoring", "it waits again, or once the ring is not back", AGAIN_S
    )
    swarm.local.start_peers(gone)
    wait_until(lambda: serves(swarm, workers), "the ring is loaded again", AGAIN_S)
    assert placed(swarm.status(MODEL)) == placed(before)
    assert swarm.ask(MODEL) == REPLY


@pytest.mark.soak
def test_a_peer_that_stood_still_for_long_gives_its_old_stage_back(swarms: Callable[[int], Swarm]) -> None:
    """SIGSTOP of a node, as a laptop's lid: it is dead for the others, and knows nothing of it when it goes on."""
    swarm = swarms(3)
    before = swarm.load(MODEL)
    workers = swarm.worker_pids(MODEL)
    stayed, away = placed(before)
    node = swarm.local.peers[away].process
    node.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: process_state(node.pid) == "T", "it is stopped")
        wait_until(lambda: serves(swarm, workers), "the ring is loaded again", AGAIN_S + DEAD_S)
        assert placed(swarm.status(MODEL))[0] == stayed
        assert alive(workers[away]), "nobody can ask it meanwhile"
    finally:
        node.send_signal(signal.SIGCONT)
    wait_until(lambda: not alive(workers[away]), "its stage is nobody's any more")
    wait_until(lambda: len(swarm.client.get("/api/v1/nodes")["peers"]) == 3, "it is back")
    assert away not in placed(swarm.status(MODEL))
    assert swarm.ask(MODEL) == REPLY
