"""W5 on a ring of real processes: one uplink of 10 Mbit/s for all of a node's connections, and a long prompt on it.

What a small frame waits for is one bounded burst: what the router's queue and its reader hold already, and what
the prompt's connection had handed to the kernel. The rest of the prompt waits in the node, on its own connection.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from local_swarms import Swarm, wait_until
from toxics import FIFO_BYTES, READ_BYTES, ToxicProxy, Uplink, toxic_proxy

from swarmnode.cli.local_swarm import LocalSwarm
from swarmnode.cluster.membership import BEAT_INTERVAL_S
from swarmnode.compute.scripted_servable import write_scripted_servable
from swarmnode.wire.direct import NOTSENT_LOWAT_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.e2e

MODEL = "scripted-wide"
UPLINK_BYTES_PER_S = 1_250_000
BURST_S = (FIFO_BYTES + READ_BYTES + NOTSENT_LOWAT_BYTES) / UPLINK_BYTES_PER_S
"""0.37 s at 10 Mbit/s."""
USERS = 3
STAGES = 2
HIDDEN = 2048
ROW_BYTES = 4 * HIDDEN
PIECE_TOKENS = 256
DECODE_MS, PREFILL_MS = 5.0, 0.2
STEP_S = STAGES * DECODE_MS / 1e3 + USERS * ROW_BYTES / UPLINK_BYTES_PER_S
"""Compute, and the group's own bytes."""
PIECE_S = PIECE_TOKENS * PREFILL_MS / 1e3
PROMPT_TOKENS = 1200
"""10 MB of hidden states: 8 s of the uplink."""
BEAT_LATE_S = 1.0
MACHINE_S = 0.25
"""For a test machine that has other things to do."""
LONG_S = 60.0


@dataclass
class Narrow:
    """Stage 0 on `attic`, behind the uplink; stage 1 on `cellar`. What both send to the coordinator goes out by it."""

    swarm: Swarm
    proxies: list[ToxicProxy] = field(default_factory=list)

    @property
    def carried_bytes(self) -> int:
        return sum(proxy.there.effects.passed_bytes for proxy in self.proxies)

    def silence_s(self) -> float:
        return max(float(peer["silence_s"]) for peer in self.swarm.client.get("/api/v1/nodes")["peers"])


@pytest.fixture
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Narrow]:
    root, uplink = tmp_path_factory.mktemp("models"), Uplink(UPLINK_BYTES_PER_S)
    write_scripted_servable(root, MODEL, script(), layers=4, stages=STAGES)
    with ExitStack() as stack:
        to_coordinator, to_cellar = (stack.enter_context(toxic_proxy()) for _ in range(2))
        straight = {"SWARM_LINK_ROUTES": "direct", "SWARM_SERVE_PREFILL_CHUNK": str(PIECE_TOKENS)}
        local = LocalSwarm(tmp_path_factory.mktemp("narrow"), root, straight)
        stack.callback(local.stop)
        local.start_coordinator(extra=("--advertise", to_coordinator.place))
        host, port = local.swarm.rsplit(":", 1)
        to_coordinator.target = host, int(port)
        swarm = stack.enter_context(closing(Swarm(local)))
        local.start_peers("attic")
        local.start_peers("cellar", extra=("--advertise", to_cellar.place))
        to_cellar.target = swarm.swarm_port("cellar")
        swarm.load(MODEL, peers=["attic", "cellar"])
        to_coordinator.there.uplink = to_cellar.there.uplink = uplink
        yield Narrow(swarm, [to_coordinator, to_cellar])


def script() -> dict[str, Any]:
    return {
        "replies": [{"when": list(b"long"), "ids": list(b"abcdefghij") * 400}],
        "default": list(b"read"),
        "decode_ms": DECODE_MS,
        "prefill_ms_per_token": PREFILL_MS,
        "hidden": HIDDEN,
        "noise": True,
    }


class User(threading.Thread):
    """A long reply, of which it notes when each token came."""

    def __init__(self, swarm: Swarm, over: threading.Event) -> None:
        super().__init__()
        self.came_s: list[float] = []
        self._swarm = swarm
        self._over = over

    def run(self) -> None:
        with chat(self._swarm, "long", 4000) as stream:
            for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    self.came_s.append(time.monotonic())
                if self._over.is_set():
                    return

    def between_s(self, start_s: float, end_s: float) -> list[float]:
        """From token to token, of those that came within."""
        came = [moment for moment in self.came_s if start_s <= moment <= end_s]
        return [after - before for before, after in pairwise(came)]


def chat(swarm: Swarm, prompt: str, tokens: int) -> Any:
    messages = [{"role": "user", "content": prompt}]
    return swarm.openai.chat.completions.create(  # type: ignore[call-overload]
        model=MODEL, messages=messages, stream=True, max_tokens=tokens, timeout=LONG_S
    )


class Prompt(threading.Thread):
    """A long prompt, from its request to its first token."""

    def __init__(self, swarm: Swarm) -> None:
        super().__init__()
        self.read = ""
        self._swarm = swarm

    def run(self) -> None:
        with chat(self._swarm, "p" * PROMPT_TOKENS, 4) as stream:
            for chunk in stream:
                self.read += chunk.choices[0].delta.content or "" if chunk.choices else ""


def test_with_a_long_prompt_on_a_narrow_uplink_tokens_and_heartbeats_come_in_time(ring: Narrow) -> None:
    over, silences_s = threading.Event(), list[float]()
    users = [User(ring.swarm, over) for _ in range(USERS)]
    for user in users:
        user.start()
    wait_until(lambda: all(len(user.came_s) > 5 for user in users), "every user's reply has begun")
    prompt, before_bytes, began_s = Prompt(ring.swarm), ring.carried_bytes, time.monotonic()
    prompt.start()
    while prompt.is_alive():
        silences_s.append(ring.silence_s())
        prompt.join(0.2)
    ended_s = time.monotonic()
    over.set()
    for user in users:
        user.join(LONG_S)
    assert prompt.read == "read"
    assert ring.carried_bytes - before_bytes > 0.9 * (ended_s - began_s) * UPLINK_BYTES_PER_S, "the uplink was full"
    itl_s = sorted(gap for user in users for gap in user.between_s(began_s, ended_s))
    assert len(itl_s) > 50
    assert itl_s[int(0.99 * len(itl_s))] <= STEP_S + PIECE_S + BURST_S + MACHINE_S
    assert max(silences_s) <= BEAT_INTERVAL_S + BEAT_LATE_S
