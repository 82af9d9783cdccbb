"""Chaos for SOAK_SECONDS (600): random clients, kill -9 of everything but the coordinator, reloads; then all is zero.

`SOAK_SEED` repeats a run's choices (its timing is the machine's). Every request must end: with the right text, with an
error of a documented code, or because its client left.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import httpx
import pytest
from local_swarms import REPLY, Swarm, alive, descendants, open_files, start_swarm, wait_until
from random_clients import REQUEST_S, Ask, Tally, answer

from swarmnode.cli.client import ApiClient
from swarmnode.errors import SwarmError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.soak]
SOAK_S = float(os.environ.get("SOAK_SECONDS", "600"))
SEED = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(10**6))
MODELS = ("scripted", "scripted-three")
PEERS = 5
CLIENTS = 8
SETTLE_S = 60.0
LOADING_CODES = frozenset({"conflict", "load_refused", "load_failed", "peer_not_found"})
"""What an operator may be told who loads and unloads in the middle of it."""
GROWTH_BYTES = 6 << 20
"""Of the coordinator's anonymous memory over the whole run: allocator noise; a leak of 1 KB a request is more."""
SPARE_FDS = 2


# clients


def be_a_client(api: str, rng: random.Random, tally: Tally) -> None:
    with httpx.Client(base_url=api, timeout=REQUEST_S, trust_env=False) as http:
        while tally.pause(rng.uniform(0, 0.2)):
            answer(http, Ask.random(rng, MODELS), tally)
            if tally.outcomes.total() % 50 == 0:
                http.get("/v1/models")


# chaos


def be_chaos(swarm: Swarm, rng: random.Random, tally: Tally) -> None:
    actions: tuple[Callable[[Swarm, random.Random], None], ...]
    actions = (kill_a_worker, kill_a_worker, kill_a_node, unload_at_once, unload_politely, freeze_a_worker)
    while tally.pause(rng.uniform(1, 6)):
        if rng.random() < 0.7:  # else the next blow falls while the last one's rings load again
            await_ready(swarm, tally)
        action = rng.choice(actions)
        with operating(tally, action.__name__):
            action(swarm, rng)
            tally.actions[action.__name__] += 1


@contextmanager
def operating(tally: Tally, what: str) -> Iterator[None]:
    """Operator's calls may be refused while others load and kill, but only in the documented ways."""
    try:
        yield
    except SwarmError as error:
        if error.code not in LOADING_CODES:
            tally.wrong.append(f"{what}: {error.code}: {error.message}")


def await_ready(swarm: Swarm, tally: Tally) -> None:
    deadline_s = time.monotonic() + SETTLE_S
    while tally.pause(0.2) and time.monotonic() < deadline_s:
        if all(swarm.status(model)["state"] == "ready" for model in MODELS):
            return


def kill_a_worker(swarm: Swarm, rng: random.Random) -> None:
    if pids := [*swarm.worker_pids(rng.choice(MODELS)).values()]:
        _signal(rng.choice(pids), signal.SIGKILL)


def freeze_a_worker(swarm: Swarm, rng: random.Random) -> None:
    """A machine that swaps: nothing moves for a moment, and nothing is lost."""
    if pids := [*swarm.worker_pids(rng.choice(MODELS)).values()]:
        pid = rng.choice(pids)
        _signal(pid, signal.SIGSTOP)
        time.sleep(rng.uniform(0.1, 1.5))
        _signal(pid, signal.SIGCONT)


def kill_a_node(swarm: Swarm, rng: random.Random) -> None:
    name = rng.choice(sorted(swarm.local.peers))
    node = swarm.local.peers[name]
    node.kill()
    node.stop()
    time.sleep(rng.uniform(0, 2))
    swarm.local.start_peers(name)


def unload_at_once(swarm: Swarm, rng: random.Random) -> None:
    swarm.unload(rng.choice(MODELS), force=True)


def unload_politely(swarm: Swarm, rng: random.Random) -> None:
    swarm.unload(rng.choice(MODELS), force=False)


def keep_loaded(swarm: Swarm, tally: Tally) -> None:
    """An operator who loads whatever is not loaded."""
    client = ApiClient(swarm.local.api)
    while tally.pause(0.5):
        for model in MODELS:
            with operating(tally, f"load {model}"):
                if client.get(f"/api/v1/models/{model}/status")["state"] not in ("ready", "loading", "unloading"):
                    client.post(f"/api/v1/models/{model}/load")
                    tally.actions["load"] += 1
    client.close()


def _signal(pid: int, sign: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it ended since the coordinator told its pid
        os.kill(pid, sign)


# what is left


def watch(pid: int, tally: Tally) -> None:
    while tally.pause(1.0):
        tally.anonymous_bytes.append(anonymous_bytes(pid))


def anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon in /proc/PID/status")


def load_all(swarm: Swarm) -> None:
    """Load until every model is ready: what the last kill has left may have to end first."""
    for model in MODELS:
        deadline_s = time.monotonic() + SETTLE_S
        while True:
            try:
                swarm.load(model)
                break
            except SwarmError as error:
                if error.code not in LOADING_CODES or time.monotonic() > deadline_s:
                    raise
                time.sleep(0.2)


def unload_all(swarm: Swarm) -> None:
    for model in MODELS:
        swarm.unload(model)


@pytest.fixture
def soaked(tmp_path: Path, models_root: Path) -> Iterator[Swarm]:
    swarm = start_swarm(tmp_path, models_root, PEERS)
    yield swarm
    swarm.close()


def test_chaos_ends_with_nothing_held(soaked: Swarm, capsys: pytest.CaptureFixture[str]) -> None:
    swarm, tally = soaked, Tally()
    coordinator = swarm.local.coordinator
    assert coordinator is not None
    load_all(swarm)
    unload_all(swarm)
    before = open_files(swarm)
    load_all(swarm)
    chaos(swarm, tally, coordinator.process.pid)

    growth = memory_growth(tally.anonymous_bytes)
    with capsys.disabled():
        print(f"\nsoak of {SOAK_S:.0f} s, seed {SEED}: {dict(tally.outcomes)}; {dict(tally.actions)}")
        print(f"coordinator: {tally.anonymous_bytes[-1] >> 20} MiB, grew {growth >> 10} KiB; files {before}")
    assert tally.wrong == []
    for name, node in swarm.local.peers.items():
        assert node.process.poll() is None, f"{name} ended by itself: {list(node.log)[-20:]}"
    load_all(swarm)
    for model in MODELS:
        wait_until(lambda model=model: swarm.quiet(model), f"{model} holds nothing", SETTLE_S)  # type: ignore[misc]
        assert (
            swarm.openai.chat.completions.create(model=model, messages=[{"role": "user", "content": "hello"}])
            .choices[0]
            .message.content
            == REPLY
        )
    unload_all(swarm)
    assert swarm.client.get("/api/v1/nodes")["rings"] == []
    nodes = {node.process.pid for node in (*swarm.local.peers.values(), coordinator)}
    wait_until(lambda: not set(filter(alive, descendants(os.getpid()))) - nodes, "no worker is left")
    wait_until(
        lambda: all(count <= before[name] + SPARE_FDS for name, count in open_files(swarm).items()),
        f"open files are back at {before}",
    )
    assert growth < GROWTH_BYTES
    assert coordinator.process.poll() is None
    assert not list(coordinator.log), "the coordinator met nothing it did not expect"
    assert {"replied", "streamed", "left", "stage_lost", "stage_failed"} <= tally.outcomes.keys()


def chaos(swarm: Swarm, tally: Tally, coordinator_pid: int) -> None:
    """Clients, chaos and watch for SOAK_S; returns when every request has ended."""
    rng = random.Random(SEED)
    threads = [
        threading.Thread(target=be_a_client, args=(swarm.local.api, random.Random(rng.random()), tally))
        for _ in range(CLIENTS)
    ]
    threads.append(threading.Thread(target=be_chaos, args=(swarm, random.Random(rng.random()), tally)))
    threads.append(threading.Thread(target=keep_loaded, args=(swarm, tally)))
    threads.append(threading.Thread(target=watch, args=(coordinator_pid, tally)))
    for thread in threads:
        thread.start()
    time.sleep(SOAK_S)
    tally.stop.set()
    for thread in threads:
        thread.join(timeout=2 * REQUEST_S)
    assert not any(thread.is_alive() for thread in threads), "a request has no end"


def memory_growth(samples: list[int]) -> int:
    """From the second quarter of the run to its last: the first one warms caches up."""
    quarter = max(1, len(samples) // 4)
    return int(median(samples[-quarter:]) - median(samples[quarter : 2 * quarter] or samples))
