"""Kill -9 of all that can be killed: an error in seconds, nothing held or orphaned, and the ring comes back."""

from __future__ import annotations

import os
import signal
import threading
import time
from itertools import islice
from typing import TYPE_CHECKING

import openai
import pytest
from local_swarms import REPLY, Swarm, alive, wait_until

if TYPE_CHECKING:
    from collections.abc import Generator

pytestmark = pytest.mark.e2e
MODEL = "scripted"
ERROR_WITHIN_S = 5.0
"""The promise: a client hears of a lost stage within this."""


def reading(swarm: Swarm, model: str = MODEL) -> Generator[str, None, None]:
    """A long reply, as a stream of texts."""
    stream = swarm.openai.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "long"}], stream=True
    )
    for chunk in stream:
        if text := chunk.choices[0].delta.content:
            yield text


def lose(swarm: Swarm, texts: Generator[str, None, None], kill: int) -> str:
    """Kill a process in the middle of a reply; the client must hear of it in time, with the stable code.

    Returns the words it hears.
    """
    assert len(next(texts)) > 0
    os.kill(kill, signal.SIGKILL)
    killed_s = time.monotonic()
    with pytest.raises(openai.APIError) as raised:
        for _ in texts:
            pass
    assert raised.value.code == "stage_lost"
    assert time.monotonic() - killed_s < ERROR_WITHIN_S
    return raised.value.message


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_killed_worker(fresh_swarm: Swarm, stage: int) -> None:
    swarm = fresh_swarm
    status = swarm.load(MODEL)
    swarm.load("scripted-two")
    workers = swarm.worker_pids(MODEL)
    peer = status["stages"][stage]["peer"]
    other = reading(swarm, "scripted-two")
    assert next(other)
    heard = lose(swarm, reading(swarm), workers[peer])
    assert f"stage {stage}'s worker was ended by SIGKILL" in heard, "the cause, not what a neighbour saw of it"
    assert len("".join(islice(other, 100))) >= 100, "the other ring goes on"
    other.close()
    wait_until(lambda: not any(alive(pid) for pid in workers.values()), "both workers have ended")
    told = [event for event in swarm.client.get("/api/v1/nodes")["events"] if event["event"] == "ring_restoring"]
    assert [f"stage {stage}'s worker" in event["why"] for event in told] == [True]
    wait_until(lambda: swarm.status(MODEL)["state"] == "ready", "it is loaded again by itself")
    assert [stage["peer"] for stage in swarm.status(MODEL)["stages"]] == [stage["peer"] for stage in status["stages"]]
    assert swarm.ask(MODEL) == REPLY


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_a_killed_node_leaves_no_orphan(fresh_swarm: Swarm, stage: int) -> None:
    swarm = fresh_swarm
    status = swarm.load(MODEL)
    workers = swarm.worker_pids(MODEL)
    peer = status["stages"][stage]["peer"]
    lose(swarm, reading(swarm), swarm.local.peers[peer].process.pid)
    wait_until(lambda: not any(alive(pid) for pid in workers.values()), "no worker outlives its node or its ring")
    wait_until(lambda: len(swarm.client.get("/api/v1/nodes")["peers"]) == 3, "ps does not show the dead peer")
    wait_until(lambda: swarm.status(MODEL)["state"] == "ready", "it is loaded again by itself")
    assert swarm.ask(MODEL) == REPLY


def test_a_worker_killed_during_a_prompt(fresh_swarm: Swarm) -> None:
    swarm = fresh_swarm
    status = swarm.load(MODEL)
    workers = swarm.worker_pids(MODEL)
    kill = workers[status["stages"][1]["peer"]]
    threading.Timer(0.3, os.kill, (kill, signal.SIGKILL)).start()
    with pytest.raises(openai.APIError) as raised:
        swarm.ask(MODEL, text="x" * 3500)
    assert raised.value.code == "stage_lost"


def test_a_stopped_node_ends_in_time_with_its_workers(fresh_swarm: Swarm) -> None:
    swarm = fresh_swarm
    swarm.load(MODEL)
    workers = swarm.worker_pids(MODEL)
    texts = reading(swarm)
    assert next(texts)
    for node in (*swarm.local.peers.values(), swarm.local.coordinator):
        assert node is not None
        asked_s = time.monotonic()
        assert node.stop() == 0
        assert time.monotonic() - asked_s < ERROR_WITHIN_S
    assert not any(alive(pid) for pid in workers.values())
