"""A ring whose link breaks while its stages live is linked anew: no reload, the same workers, seconds."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import openai
import pytest
from cutting_proxy import CuttingProxy
from local_swarms import REPLY, Swarm, alive, start_swarm, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e
MODEL = "scripted"
AGAIN_WITHIN_S = 8.0
ERROR_WITHIN_S = 5.0


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory, models_root: Path) -> Iterator[tuple[Swarm, list[CuttingProxy]]]:
    """Two peers that dial each other through proxies, with a model over both."""
    proxies = [CuttingProxy(), CuttingProxy()]
    swarm = start_swarm(tmp_path_factory.mktemp("relinking"), models_root, peers=0)
    try:
        for name, proxy in zip(("one", "two"), proxies, strict=True):
            swarm.local.start_peers(name, extra=("--advertise", proxy.address))
            ready = next(event for event in swarm.local.peers[name].seen if event["event"] == "ready")
            host, port = ready["swarm"].rsplit(":", 1)
            proxy.target = (host, int(port))
        swarm.load(MODEL, peers=["one", "two"])
        assert proxies[1].carried == 2, "lanes act and pre"
        yield swarm, proxies
    finally:
        swarm.close()
        for proxy in proxies:
            proxy.close()


def ask(swarm: Swarm) -> str | None:
    messages = [{"role": "user", "content": "hello"}]
    reply = swarm.openai.chat.completions.create(model=MODEL, messages=messages)  # type: ignore[call-overload]
    return str(reply.choices[0].message.content)


def answered_again(swarm: Swarm) -> None:
    """Meanwhile only errors that ask to come back."""
    refusals: list[openai.APIStatusError] = []
    wait_until(lambda: answers(swarm, refusals), "a chat is answered again", AGAIN_WITHIN_S)
    for refused in refusals:
        assert (refused.status_code, refused.code in ("stage_lost", "model_not_loaded")) == (503, True)
        assert int(refused.response.headers["retry-after"]) > 0


def answers(swarm: Swarm, refusals: list[openai.APIStatusError]) -> bool:
    try:
        return ask(swarm) == REPLY
    except openai.APIStatusError as refused:
        refusals.append(refused)
        return False


def test_a_reply_that_runs_ends_once_and_the_next_is_answered(ring: tuple[Swarm, list[CuttingProxy]]) -> None:
    swarm, proxies = ring
    workers = swarm.worker_pids(MODEL)
    stream = swarm.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "long"}], stream=True
    )
    assert next(iter(stream))
    cut_s = time.monotonic()
    proxies[1].cut()
    with pytest.raises(openai.APIError) as raised:
        for _ in stream:
            pass
    assert raised.value.code == "stage_lost"
    assert "linked anew" in raised.value.message
    assert time.monotonic() - cut_s < ERROR_WITHIN_S
    answered_again(swarm)
    assert swarm.worker_pids(MODEL) == workers
    assert all(map(alive, workers.values()))
    assert swarm.status(MODEL)["state"] == "ready"
    wait_until(lambda: swarm.quiet(MODEL), "nothing of the lost reply is held")


@pytest.mark.parametrize("side", [0, 1], ids=["answers", "steps and prompts"])
def test_a_link_that_breaks_while_nothing_runs(ring: tuple[Swarm, list[CuttingProxy]], side: int) -> None:
    swarm, proxies = ring
    workers = swarm.worker_pids(MODEL)
    proxies[side].cut()
    wait_until(lambda: swarm.status(MODEL)["state"] == "relinking", "it is noticed")
    answered_again(swarm)
    assert swarm.worker_pids(MODEL) == workers


def test_a_line_that_stays_down_for_a_while(ring: tuple[Swarm, list[CuttingProxy]]) -> None:
    """The first try on it fails; a later one, or another way round, does not."""
    swarm, proxies = ring
    workers = swarm.worker_pids(MODEL)
    proxies[0].closed = True
    proxies[0].cut()
    threading.Timer(2.5, setattr, (proxies[0], "closed", False)).start()
    wait_until(lambda: swarm.status(MODEL)["state"] == "relinking", "it is noticed")
    answered_again(swarm)
    assert swarm.worker_pids(MODEL) == workers
