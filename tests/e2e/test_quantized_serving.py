"""The demo model in 8 and 4 bits over two peers, in real processes: it answers sensibly and its stages are smaller."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from local_swarms import Swarm, start_swarm, wait_until

from swarmnode.errors import SwarmError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.model]
MODEL = "smollm2-135m-instruct"
ALL = ("none", "int8", "int4-fast")
LESS_BYTES = {("none", "int8"): 60 << 20, ("none", "int4-fast"): 65 << 20, ("int8", "int4-fast"): 5 << 20}
"""By how much at least the second method takes less than the first, over both peers."""
QUESTION = "Why is the sky blue? Answer in one sentence."


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory, demo_models_root: Path) -> Iterator[Swarm]:
    swarm = start_swarm(tmp_path_factory.mktemp("quantized"), demo_models_root, peers=2)
    yield swarm
    swarm.close()


def rss_anon_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def answer(swarm: Swarm) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 12, "temperature": 0}
    text: str = swarm.client.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize("methods", [("none", "int4-fast"), pytest.param(ALL, marks=pytest.mark.soak)])
def test_fewer_bits_answer_and_take_less(swarm: Swarm, methods: tuple[str, ...]) -> None:
    taken: dict[str, int] = {}
    for method in methods:
        status = swarm.load(MODEL, num_stages=2, quantization={"method": method})
        assert (status["quantization"], status["dtype"]) == (method, "bfloat16")
        kernels = {stage["kernels"] for stage in status["stages"]}
        possible = {"fastcpu", "dense"} if method == "none" else {"fastcpu", "torch", "fastcpu+torch"}
        assert kernels <= possible, kernels
        taken[method] = sum(rss_anon_bytes(pid) for pid in swarm.worker_pids(MODEL).values())
        assert "sky" in answer(swarm).lower()
        wait_until(lambda: swarm.quiet(MODEL), "all sessions are freed")
        swarm.unload(MODEL)
    for more, less in pairwise(methods):
        assert taken[more] > taken[less] + LESS_BYTES[more, less], taken


def test_m5_a_peer_gets_the_other_half_from_the_peer_that_has_it(swarm: Swarm) -> None:
    """Each holds one stage's part by now; one stage on one of them needs both parts."""
    status = swarm.load(MODEL, num_stages=1)
    holder = status["stages"][0]["peer"]
    swarm.unload(MODEL)
    (other,) = set(swarm.local.peers) - {holder}
    (*_, came) = [event["bytes"] for event in swarm.local.peers[holder].seen if event["event"] == "fetched"]
    assert came[other] > 50e6
    assert came.get("the coordinator", 0) < 1e6, "only a header"


def test_what_is_not_served_is_refused_with_what_is(swarm: Swarm) -> None:
    with pytest.raises(SwarmError, match="int4-fast"):
        swarm.load(MODEL, quantization={"method": "gptq"})
