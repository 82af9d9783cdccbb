"""A machine that has less memory than its node was told to offer: the load fails, and nothing else does."""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING

import pytest
from local_swarms import REPLY, SCRIPT, Swarm, descendants, start_swarm, wait_until

from swarmnode.compute.scripted_servable import write_scripted_servable
from swarmnode.errors import OutOfMemory

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e
MODEL, HUNGRY = "scripted", "hungry"
LIMIT_BYTES = 2 << 30
"""Of address space: enough for a node and for a worker of a script, but not for what HUNGRY's second stage takes."""


PEERS = ("attic", "cellar")
"""HUNGRY's; MODEL is on a third one."""


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    root = tmp_path / "models"
    write_scripted_servable(root, MODEL, SCRIPT, layers=8, stages=1)
    write_scripted_servable(root, HUNGRY, [SCRIPT, {**SCRIPT, "load_bytes": LIMIT_BYTES}], layers=8, stages=2)
    started = start_swarm(tmp_path, root, peers=0)
    try:
        started.local.start_peers("den", *PEERS)
        yield started
    finally:
        started.close()


def offers(swarm: Swarm) -> dict[str, int]:
    """What a load of HUNGRY would find."""
    plan = swarm.client.post(f"/api/v1/models/{HUNGRY}/load", {"plan": True, "peers": [*PEERS]})
    return {stage["peer"]: stage["offered_bytes"] for stage in plan["stages"]}


def limit_workers(swarm: Swarm, most_bytes: int) -> None:
    """Those that the two nodes start from now on; and the nodes, which have what they need."""
    for name in PEERS:
        node = swarm.local.peers[name].process.pid
        _, hard = resource.prlimit(node, resource.RLIMIT_AS)
        resource.prlimit(node, resource.RLIMIT_AS, (most_bytes, hard))


def test_scenario_10_a_worker_that_finds_too_little_memory_fails_its_load_alone(swarm: Swarm) -> None:
    swarm.load(MODEL, peers=["den"])
    before, other = offers(swarm), swarm.worker_pids(MODEL)
    limit_workers(swarm, LIMIT_BYTES)
    with pytest.raises(OutOfMemory, match=r"stage 1's .* \(.*Cannot allocate memory\).*--memory.*more peers"):
        swarm.load(HUNGRY, peers=[*PEERS])
    assert [descendants(swarm.local.peers[name].process.pid) for name in PEERS] == [[], []], "no worker is left"
    wait_until(lambda: offers(swarm) == before, "each peer offers what it did")
    assert swarm.status(HUNGRY)["state"] == "failed"
    assert swarm.ask(MODEL) == REPLY, "the other ring goes on"
    assert swarm.worker_pids(MODEL) == other
    limit_workers(swarm, resource.RLIM_INFINITY)
    swarm.load(HUNGRY, peers=[*PEERS])
    assert swarm.ask(HUNGRY) == REPLY, "the peers serve on"
