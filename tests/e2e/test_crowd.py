"""Sixteen clients on a ring of three with little memory: cancels, long prompts, a paused session; nothing leaks."""

from __future__ import annotations

import random
import threading
from itertools import pairwise
from typing import TYPE_CHECKING

import httpx
import pytest
from local_swarms import Swarm, open_descriptors, open_files, start_swarm, wait_until
from random_clients import REQUEST_S, Ask, Tally, answer

from swarmnode.catalog.registry import Registry
from swarmnode.cluster.pricing import price_stage
from swarmnode.compute.scripted import KV_BYTES_PER_TOKEN_LAYER
from swarmnode.roles.planning import model_shape

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e
MODEL, STAGES, LAYERS = "scripted-three", 3, 8
CLIENTS, REQUESTS = 16, 3
KV_TOKENS = 2600
"""Not half of what sixteen of these clients want at once, and room for the longest of them."""
ENVIRONMENT = {
    "SWARM_SERVE_IN_FLIGHT": str(CLIENTS),
    "SWARM_SERVE_MAX_IN_FLIGHT": str(2 * CLIENTS),
    "SWARM_SERVE_TYPICAL_TOKENS": "64",
    "SWARM_SERVE_CONTEXT_TOKENS": "2048",
}


def memory_for(models_root: Path, kv_tokens: int) -> str:
    """What a peer must offer to hold the largest slice and so many tokens, and no more."""
    (manifest,) = (manifest for manifest in Registry(models_root).models() if manifest.id == MODEL)
    cuts = [0, *manifest.boundaries, LAYERS]
    prices = [
        price_stage(model_shape(manifest), first, end, "float32", "none", CLIENTS) for first, end in pairwise(cuts)
    ]
    return str(int(max(price.need(kv_tokens) for price in prices)) + 1)


@pytest.fixture
def tight_swarm(tmp_path: Path, models_root: Path) -> Iterator[Swarm]:
    swarm = start_swarm(tmp_path, models_root, peers=0, environment=ENVIRONMENT)
    try:
        names = [f"peer-{index}" for index in range(STAGES)]
        swarm.local.start_peers(*names, memory=memory_for(models_root, KV_TOKENS))
        yield swarm
    finally:
        swarm.close()


def asked(rng: random.Random) -> Ask:
    """Short chats without max_tokens, which grow as they go; long prompts; long replies that are cut or left."""
    text, max_tokens, leaves = rng.choices(
        (
            ("hello", None, False),
            ("x" * rng.randrange(800, 1500), 40, False),
            ("a long one", rng.randrange(60, 150), False),
            ("a long one", None, True),
            ("a long one " + "y" * 700, 500, True),
            ("broken", None, False),
        ),
        (5, 3, 3, 3, 2, 1),
    )[0]
    stream = leaves or rng.random() < 0.5
    after = rng.randrange(60) if leaves else None
    return Ask(MODEL, text, stream, max_tokens, (), after)


GROWING = Ask(MODEL, "a medium one " + "y" * 1000, True, None, (), None)
"""Two of these are let in together, and cannot both grow to their ends: one is paused, and both must be whole."""


def be_first(api: str, tally: Tally) -> None:
    with httpx.Client(base_url=api, timeout=REQUEST_S, trust_env=False) as http:
        answer(http, GROWING, tally)


def be_a_client(api: str, rng: random.Random, tally: Tally) -> None:
    with httpx.Client(base_url=api, timeout=REQUEST_S, trust_env=False) as http:
        for _ in range(REQUESTS):
            answer(http, asked(rng), tally)


def open_files_of_all(swarm: Swarm) -> dict[str, int]:
    """Of nodes and of their workers."""
    workers = {f"{peer}'s worker": open_descriptors(pid) for peer, pid in swarm.worker_pids(MODEL).items()}
    return {**open_files(swarm), **workers}


def test_sixteen_clients_in_little_memory_leave_nothing(tight_swarm: Swarm) -> None:
    swarm, tally = tight_swarm, Tally()
    status = swarm.load(MODEL)
    assert len(status["stages"]) == STAGES
    assert 2048 <= status["kv_tokens"] <= KV_TOKENS
    files = open_files_of_all(swarm)
    first = [threading.Thread(target=be_first, args=(swarm.local.api, tally)) for _ in range(2)]
    for client in first:
        client.start()
    wait_until(lambda: swarm.status(MODEL)["pauses"] > 0, "the budget is tight, and somebody pauses")
    clients = first + [
        threading.Thread(target=be_a_client, args=(swarm.local.api, random.Random(seed), tally))
        for seed in range(CLIENTS)
    ]
    for client in clients[len(first) :]:
        client.start()
    for client in clients:
        client.join()
    assert tally.wrong == []
    assert tally.outcomes.total() == CLIENTS * REQUESTS + len(first)
    assert tally.outcomes.keys() == {"replied", "streamed", "left", "stage_failed"}
    assert tally.outcomes["streamed"] >= len(first)
    wait_until(lambda: swarm.quiet(MODEL), "nothing is held but what is parked")
    after = swarm.status(MODEL)
    assert after["kv_parked_tokens"] <= status["kv_tokens"]
    for stage in after["stages"]:
        first_layer, last_layer = stage["layers"]
        parked_bytes = after["kv_parked_tokens"] * (last_layer - first_layer + 1) * KV_BYTES_PER_TOKEN_LAYER
        assert stage["kv_bytes"] <= parked_bytes
    wait_until(
        lambda: all(count <= files[name] for name, count in open_files_of_all(swarm).items()),
        "no node or worker has more files open than before",
    )
