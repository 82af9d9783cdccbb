"""A peer's API port in front of the coordinator's (N4): the same replies, and a cancel that frees the stages."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from local_swarms import REPLY, Swarm, start_swarm, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e
MODEL = "scripted-two"
NOTICED_WITHIN_S = 10.0


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory, models_root: Path) -> Iterator[Swarm]:
    """Two peers that hold the stages, and a third that only forwards."""
    swarm = start_swarm(tmp_path_factory.mktemp("forwarding"), models_root, peers=2)
    swarm.load(MODEL)
    swarm.local.start_peers("door", extra=("--api-listen", "127.0.0.1:0"))
    yield swarm
    swarm.close()


@pytest.fixture
def door(swarm: Swarm) -> Iterator[openai.OpenAI]:
    url = next(event["api"] for event in swarm.local.peers["door"].seen if event["event"] == "ready")
    assert url != swarm.local.api
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        wait_until(lambda: httpx.get(f"{url}/v1/models", trust_env=False).status_code == 200, "the API is announced")
        yield client


def test_a_peer_answers_as_the_coordinator_does(swarm: Swarm, door: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    assert [model.id for model in door.models.list()] == [model.id for model in swarm.openai.models.list()]
    assert door.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content == REPLY
    chunks = list(door.chat.completions.create(model=MODEL, messages=messages, stream=True))
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == REPLY
    assert len(chunks) > 5, "the reply came in pieces"
    with pytest.raises(openai.NotFoundError, match="nothing"):
        door.chat.completions.create(model="nothing", messages=messages)


def test_a_cancel_through_a_peer_frees_the_stages(swarm: Swarm, door: openai.OpenAI) -> None:
    stream = door.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "long"}], stream=True)
    assert next(iter(stream))
    assert swarm.status(MODEL)["requests"] == 1
    stream.close()
    wait_until(lambda: swarm.quiet(MODEL), "every stage dropped the session")


def test_a_peer_without_coordinator_says_so_and_finds_it_again(swarm: Swarm, door: openai.OpenAI) -> None:
    coordinator = swarm.local.coordinator
    assert coordinator is not None
    models = f"{str(door.base_url).rstrip('/')}/models"
    coordinator.kill()
    killed_s = time.monotonic()
    wait_until(lambda: httpx.get(models, trust_env=False).status_code == 503, "503", NOTICED_WITHIN_S)
    reply = httpx.get(models, trust_env=False)
    assert int(reply.headers["retry-after"]) > 0
    assert reply.json()["error"]["code"] == "no_coordinator"
    assert time.monotonic() - killed_s < NOTICED_WITHIN_S
    swarm.local.start_coordinator(swarm_listen=swarm.local.swarm)
    wait_until(lambda: httpx.get(models, trust_env=False).status_code == 200, "the new API is announced")


def test_a_port_that_other_machines_reach_says_what_crosses_it(swarm: Swarm) -> None:
    swarm.local.start_peers("gate", extra=("--api-listen", "0.0.0.0:0"))
    texts = [event["text"] for event in swarm.local.peers["gate"].seen if event["event"] == "warning"]
    assert len(texts) == 1
    assert "unencrypted; give --api-cert" in texts[0]
