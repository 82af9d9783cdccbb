"""Peers that are slow, in real processes: nothing of it ends a reply, a later load avoids them, and it is said why."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from local_swarms import REPLY, SCRIPT, Swarm, process_state, start_swarm, swarmnode, wait_until
from toxics import ToxicProxy

from swarmnode.compute.scripted_servable import write_scripted_servable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e
MODEL = "scripted"
LONG = "abcdefghij" * 400
TOKENS = 60
STEP_MS = 10
"""A step that is longer than what a starved worker gets at a time: it shows in the step, not in the way to it."""
STOPPED_S, RUNS_S = 0.06, 0.005
"""What a worker gets of its processor while something else has most of it."""


@contextmanager
def starved(pid: int) -> Iterator[list[int]]:
    """The process runs only now and then; how often it was seen standing is counted."""
    over, stopped = threading.Event(), [0]

    def starve() -> None:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(STOPPED_S)
            stopped[0] += process_state(pid) == "T"
            os.kill(pid, signal.SIGCONT)
            time.sleep(RUNS_S)

    thread = threading.Thread(target=starve)
    thread.start()
    try:
        yield stopped
    finally:
        over.set()
        thread.join()


def peers_of(answer: dict[str, Any]) -> list[str]:
    return [stage["peer"] for stage in answer["stages"]]


def events(swarm: Swarm, name: str) -> list[dict[str, Any]]:
    return [event for event in swarm.client.get("/api/v1/nodes")["events"] if event["event"] == name]


def plan(swarm: Swarm) -> dict[str, Any]:
    answer: dict[str, Any] = swarm.client.post(f"/api/v1/models/{MODEL}/load", {"plan": True})
    return answer


def reason(answer: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {left["peer"]: (left["reason"], left["why"]) for left in answer["left_out"]}


def test_scenario_3_a_peer_that_becomes_slow_is_marked_and_the_next_load_avoids_it(
    tmp_path: Path,
) -> None:
    models = tmp_path / "models"
    write_scripted_servable(models, MODEL, {**SCRIPT, "decode_ms": STEP_MS}, layers=8, stages=2)
    swarm = start_swarm(tmp_path, models, peers=3)
    try:
        slow = peers_of(swarm.load(MODEL))[1]
        with starved(swarm.worker_pids(MODEL)[slow]) as stopped:
            reply = swarm.openai.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "long"}], max_tokens=TOKENS
            )
        assert stopped[0] > 10, "it was starved"
        assert reply.choices[0].message.content == LONG[:TOKENS]
        assert swarm.status(MODEL)["state"] == "ready", "slow is not dead"
        wait_until(lambda: bool(events(swarm, "straggler")), "people are told of the straggler")
        (told,) = events(swarm, "straggler")
        assert (told["name"], told["times"] >= 2) == (slow, True)
        peers = swarm.client.get("/api/v1/nodes")["peers"]
        assert [peer["name"] for peer in peers if peer["straggles"]] == [slow]

        swarm.unload(MODEL)
        planned = plan(swarm)
        shown = swarmnode("model-load", MODEL, "--plan", "--api", swarm.local.api)
        status = swarm.load(MODEL)
        assert slow not in peers_of(status)
        assert peers_of(planned) == peers_of(status)
        assert planned["left_out"] == status["left_out"]
        assert reason(status)[slow][0] == "slower"
        assert f"without {slow}: measured slower: a step takes " in shown.stdout
        (*_, loading) = events(swarm, "ring_loading")
        assert loading["left_out"] == {slow: reason(status)[slow][1]}
        assert swarm.ask(MODEL) == REPLY
    finally:
        swarm.close()


def test_a_peer_that_was_measured_far_is_avoided(tmp_path: Path, models_root: Path) -> None:
    """By memory and name it would come second: what comes to it takes 40 ms more."""
    swarm = start_swarm(tmp_path, models_root, peers=0, environment={"SWARM_LINK_ROUTES": "direct"})
    proxy = ToxicProxy(("127.0.0.1", 1))
    try:
        proxy.start()
        proxy.there.latency_s = 0.04
        swarm.local.start_peers("b-far", extra=("--advertise", "{}:{}".format(*proxy.address)))
        ready = next(event for event in swarm.local.peers["b-far"].seen if event["event"] == "ready")
        host, port = ready["swarm"].rsplit(":", 1)
        proxy.target = (host, int(port))
        swarm.local.start_peers("a-near", "c-near")
        assert peers_of(swarm.load(MODEL)) == ["a-near", "b-far"]
        assert swarm.ask(MODEL) == REPLY
        assert proxy.there.effects.delayed_chunks > 10, "it was far"
        wait_until(lambda: far_link(swarm) and beats_are_measured(swarm), "the coordinator knows how far it is")
        swarm.unload(MODEL)
        status = swarm.load(MODEL)
        assert peers_of(status) == ["a-near", "c-near"]
        assert reason(status)["b-far"][0] == "far", reason(status)
        assert swarm.ask(MODEL) == REPLY
    finally:
        swarm.close()
        proxy.close()


def far_link(swarm: Swarm) -> bool:
    links = [link for stage in swarm.status(MODEL)["stages"] for link in stage["links"]]
    return any((link["round_trip_ms"] or 0) >= 40 for link in links)


def beats_are_measured(swarm: Swarm) -> bool:
    return all(peer["round_trip_ms"] is not None for peer in swarm.client.get("/api/v1/nodes")["peers"])
