"""L4, by real processes: whatever ends a stage, its worker is gone in time, and its peer offers all that it did.

Elsewhere, with the pids of workers as well: unloads (`test_serving.py`, `test_cli.py`), eviction (`test_cli.py`),
SIGTERM of all nodes and SIGKILL of a worker or a node (`test_faults.py`), a coordinator that stays away
(`test_adoption.py`), a node that is removed (`test_joining.py`).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from local_swarms import SCRIPT, Swarm, alive, process_state, start_again, start_swarm, swarmnode, wait_until

from swarmnode.cli.local_swarm import NodeProcess
from swarmnode.compute.scripted_servable import write_scripted_servable
from swarmnode.errors import Conflict, ModelNotFound
from swarmnode.wire.deadlines import WORKER_EXIT_S, WORKER_TERM_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.e2e
MODEL, DOOMED, SLOW = "scripted", "doomed", "slow"
PEERS = ("den", "attic")
IDLE_S = 2
AT_ONCE_S = 5.0
"""A worker whose input closes ends by itself; this is for a busy machine."""
SLOW_REPLY = b"It takes its time, and all of it." * 4


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Two peers, and models that may be removed."""
    folder = tmp_path_factory.mktemp("house")
    for model in (MODEL, DOOMED):
        write_scripted_servable(folder / "models", model, SCRIPT, layers=8, stages=2)
    swarm = start_swarm(folder, folder / "models", peers=0)
    try:
        swarm.local.start_peers(*PEERS)
        yield swarm
    finally:
        swarm.close()


def offers(swarm: Swarm) -> dict[str, Any]:
    """What `ps --json` says that each peer has and holds, and what a load would find there."""
    shown = swarm.client.get("/api/v1/nodes")["peers"]
    peers = {peer["name"]: (peer["memory_bytes"], peer["stages"]) for peer in shown if "stages" in peer}
    plan = swarm.client.post(f"/api/v1/models/{MODEL}/load", {"plan": True, "num_stages": 2, "peers": [*PEERS]})
    found = {stage["peer"]: stage["offered_bytes"] for stage in plan["stages"]}
    return {"peers": peers, "offered": found, "evicts": plan["evicts"]}


def holds_nothing(swarm: Swarm) -> bool:
    shown = swarm.client.get("/api/v1/nodes")["peers"]
    return [peer.get("stages") for peer in shown] == [[]] * len(PEERS)


def unload(swarm: Swarm, model: str) -> None:
    swarm.unload(model, force=False)


def remove(swarm: Swarm, model: str) -> None:
    with closing(swarm.local.client()) as admin, pytest.raises(Conflict, match="unload it first"):
        admin.delete(f"/api/v1/models/{model}")
    secret = {"SWARM_DATA_DIR": str(swarm.local.folder / "coordinator")}
    gone = swarmnode("model-remove", model, "--force", "--api", swarm.local.api, **secret)
    assert (gone.returncode, gone.stdout) == (0, f"{model} is removed\n"), gone.stderr


def start_anew(swarm: Swarm, _: str) -> None:
    """A program that is replaced: SIGTERM, and the new one takes up where the old one was."""
    swarm.local.peers["den"].process.send_signal(signal.SIGTERM)
    swarm.local.peers["den"].process.wait(AT_ONCE_S)
    start_again(swarm.local, "den")


def replace_itself(swarm: Swarm, _: str) -> None:
    """A program that is replaced within its process."""
    swarm.local.peers["den"].process.send_signal(signal.SIGUSR1)
    swarm.local.peers["den"].wait_for("joined")


def run_reexecuting(local: Any) -> None:
    """`den` from now on in a process that can begin anew."""
    local.peers["den"].stop()
    arguments = ["--role", "peer", "--name", "den", "--data-dir", str(local.folder / "den"), "--device", "cpu"]
    arguments += ["--threads", "1", "--memory", "4G"]
    script = Path(__file__).parents[1] / "reexecuting.py"
    local.peers["den"] = NodeProcess(arguments, local.environment, (sys.executable, str(script)))
    local.peers["den"].wait_for("joined")


@pytest.mark.parametrize("way", [unload, remove, start_anew, replace_itself], ids=lambda way: way.__name__)
def test_l4_every_way_out_gives_all_of_it_back(house: Swarm, way: Callable[[Swarm, str], None]) -> None:
    model = DOOMED if way is remove else MODEL
    if way is replace_itself:
        run_reexecuting(house.local)
    wait_until(lambda: holds_nothing(house), "both are there, and hold nothing")
    before = offers(house)
    house.load(model, num_stages=2, peers=[*PEERS])
    workers = house.worker_pids(model)
    assert offers(house)["evicts"] == [model], "nothing more finds room"
    way(house, model)
    wait_until(lambda: not alive(workers["den"]), "its worker has ended", AT_ONCE_S)
    if way in (start_anew, replace_itself):  # the ring was lost, and comes back
        wait_until(lambda: house.status(model)["state"] == "ready", "it is loaded again", 40.0)
        house.unload(model)
    assert not any(map(alive, workers.values()))
    wait_until(lambda: offers(house) == before, "each offers what it did")


def test_a_removed_model_is_gone_from_the_catalogue_and_from_the_disk(house: Swarm) -> None:
    root = house.local.models_root
    write_scripted_servable(root, "short-lived", SCRIPT, layers=8, stages=2)
    assert "short-lived" in {model["id"] for model in house.client.get("/api/v1/models")["models"]}
    with closing(house.local.client()) as admin:
        assert admin.delete("/api/v1/models/short-lived") == {"id": "short-lived", "removed": True}
    assert "short-lived" not in {model["id"] for model in house.client.get("/api/v1/models")["models"]}
    assert [path.name for path in root.iterdir() if "short-lived" in path.name] == []
    with pytest.raises(ModelNotFound):
        house.load("short-lived")


def test_l3_an_idle_ring_gives_it_back_and_one_that_replies_does_not(tmp_path: Path) -> None:
    script = {"replies": [], "default": list(SLOW_REPLY), "decode_ms": 1.5 * IDLE_S * 1e3 / len(SLOW_REPLY)}
    write_scripted_servable(tmp_path / "models", SLOW, script, layers=4, stages=1)
    swarm = start_swarm(tmp_path, tmp_path / "models", 1, {"SWARM_MODEL_IDLE_UNLOAD_S": str(IDLE_S)})
    try:
        swarm.load(SLOW)
        began_s, workers = time.monotonic(), swarm.worker_pids(SLOW)
        assert swarm.ask(SLOW) == SLOW_REPLY.decode()
        ended_s = time.monotonic()
        assert ended_s - began_s > IDLE_S
        assert all(map(alive, workers.values())), "a reply that runs for longer than that is never reaped"
        wait_until(lambda: not any(map(alive, workers.values())), "the worker has ended", IDLE_S + AT_ONCE_S)
        assert time.monotonic() - ended_s > IDLE_S - 0.5
        wait_until(lambda: swarm.status(SLOW)["state"] == "available", "the ring is over")
        assert "ring_idle" in [event["event"] for event in swarm.client.get("/api/v1/nodes")["events"]]
    finally:
        swarm.close()


@pytest.mark.soak
def test_l4_a_worker_that_does_not_end_when_asked_is_killed(house: Swarm) -> None:
    house.load(MODEL, num_stages=2, peers=[*PEERS])
    workers = house.worker_pids(MODEL)
    os.kill(workers["attic"], signal.SIGSTOP)
    wait_until(lambda: process_state(workers["attic"]) == "T", "it is stopped")
    asked_s = time.monotonic()
    assert house.unload(MODEL)["state"] == "available"
    assert WORKER_EXIT_S < time.monotonic() - asked_s < WORKER_EXIT_S + WORKER_TERM_S + AT_ONCE_S
    assert not any(map(alive, workers.values()))
