"""Links of a ring that break while its stages live: resumed within seconds, else linked anew; never loaded again."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import openai
import pytest
from local_swarms import REPLY, Swarm, alive, start_swarm, wait_until
from toxics import ToxicProxy, toxic_proxy

from swarmnode.cluster.membership import RETURN_S
from swarmnode.roles.lane_ends import LATE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e
MODEL = "scripted"
AGAIN_WITHIN_S = 10.0
DOWN_S = RETURN_S + LATE_S + 1.0
"""Longer than a link is waited for."""
ERROR_WITHIN_S = RETURN_S + LATE_S + 5.0
LONG = "abcdefghij" * 400


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory, models_root: Path) -> Iterator[tuple[Swarm, list[ToxicProxy]]]:
    """Two peers that dial each other through proxies, with a model over both."""
    folder, straight = tmp_path_factory.mktemp("relinking"), {"SWARM_LINK_ROUTES": "direct"}
    with ExitStack() as stack:
        proxies = [stack.enter_context(toxic_proxy()) for _ in range(2)]
        swarm = stack.enter_context(closing(start_swarm(folder, models_root, peers=0, environment=straight)))
        for name, proxy in zip(("one", "two"), proxies, strict=True):
            swarm.local.start_peers(name, extra=("--advertise", proxy.place))
            proxy.target = swarm.swarm_port(name)
        swarm.load(MODEL, peers=["one", "two"])
        assert proxies[1].connections == 2, "lanes act and pre"
        yield swarm, proxies


def answered_again(swarm: Swarm) -> None:
    """Meanwhile only errors that ask to come back."""
    refusals: list[openai.APIStatusError] = []
    wait_until(lambda: answers(swarm, refusals), "a chat is answered again", AGAIN_WITHIN_S)
    for refused in refusals:
        assert (refused.status_code, refused.code in ("stage_lost", "model_not_loaded")) == (503, True)
        assert int(refused.response.headers["retry-after"]) > 0


def answers(swarm: Swarm, refusals: list[openai.APIStatusError]) -> bool:
    try:
        return swarm.ask(MODEL) == REPLY
    except openai.APIStatusError as refused:
        refusals.append(refused)
        return False


def long_reply(swarm: Swarm, tokens: int) -> openai.Stream[Any]:
    """A reply that has begun."""
    messages = [{"role": "user", "content": "long"}]
    stream: openai.Stream[Any] = swarm.openai.chat.completions.create(
        model=MODEL,
        messages=messages,
        stream=True,
        max_tokens=tokens,  # type: ignore[call-overload]
    )
    return stream


def down(proxies: list[ToxicProxy], side: int, seconds: float) -> None:
    """Cut what runs, and let nothing through for a while."""
    proxies[side].closed = True
    proxies[side].hang_up()
    threading.Timer(seconds, setattr, (proxies[side], "closed", False)).start()


@pytest.mark.parametrize("side", [0, 1], ids=["answers", "steps and prompts"])
def test_a_link_that_drops_for_a_moment_is_resumed_and_the_reply_goes_on(
    ring: tuple[Swarm, list[ToxicProxy]], side: int
) -> None:
    swarm, proxies = ring
    stream, text, carried = long_reply(swarm, 300), "", proxies[side].connections
    for number, chunk in enumerate(stream):
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        if number in (5, 40):
            down(proxies, side, 0.3)
    assert text == LONG[:300]
    assert proxies[side].connections > carried, "it was cut"
    assert swarm.status(MODEL)["state"] == "ready"


def test_a_line_that_stays_down_ends_the_reply_and_the_ring_is_linked_anew(
    ring: tuple[Swarm, list[ToxicProxy]],
) -> None:
    swarm, proxies = ring
    workers = swarm.worker_pids(MODEL)
    stream = long_reply(swarm, 4000)
    assert next(iter(stream))
    cut_s = time.monotonic()
    down(proxies, 1, DOWN_S)
    with pytest.raises(openai.APIError) as raised:
        for _ in stream:
            pass
    assert raised.value.code == "stage_lost"
    assert "linked anew" in raised.value.message
    assert time.monotonic() - cut_s < ERROR_WITHIN_S
    answered_again(swarm)
    assert swarm.worker_pids(MODEL) == workers
    assert all(map(alive, workers.values()))
    wait_until(lambda: swarm.quiet(MODEL), "nothing of the lost reply is held")


def test_a_line_that_goes_down_while_nothing_runs(ring: tuple[Swarm, list[ToxicProxy]]) -> None:
    swarm, proxies = ring
    workers = swarm.worker_pids(MODEL)
    down(proxies, 0, DOWN_S)
    wait_until(lambda: swarm.status(MODEL)["state"] == "relinking", "it is noticed", DOWN_S + 5)
    answered_again(swarm)
    assert swarm.worker_pids(MODEL) == workers
