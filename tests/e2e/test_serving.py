"""A scripted model over real processes: the OpenAI client, sessions side by side, ends of every kind."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import openai
import pytest
from local_swarms import REPLY, Swarm, alive, wait_until

from swarmnode.errors import LoadRefused, ModelNotFound, PeerNotFound, SwarmError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.e2e
MODEL = "scripted"


@pytest.fixture(scope="module", autouse=True)
def loaded(swarm: Swarm) -> Iterator[None]:
    swarm.load(MODEL)
    yield
    swarm.unload(MODEL)


def ask(swarm: Swarm, text: str = "hello", **options: object) -> openai.types.chat.ChatCompletion:
    return swarm.openai.chat.completions.create(  # type: ignore[call-overload,no-any-return]
        model=MODEL, messages=[{"role": "user", "content": text}], **options
    )


def test_a_chat_is_answered(swarm: Swarm) -> None:
    reply = ask(swarm)
    assert reply.choices[0].message.content == REPLY
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == len(REPLY.encode()) + 1


def test_a_stream_gives_the_same_text_and_the_usage(swarm: Swarm) -> None:
    chunks = list(
        swarm.openai.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "hello"}],
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(texts) == REPLY
    assert len([text for text in texts if text]) > 5, "the reply came in pieces"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(REPLY.encode()) + 1


def test_a_second_turn_is_continued_and_the_usage_and_the_status_say_so(swarm: Swarm) -> None:
    turns = [{"role": "user", "content": "what bees do"}, {"role": "assistant", "content": REPLY}]
    first = ask(swarm, turns[0]["content"])
    second = swarm.openai.chat.completions.create(
        model=MODEL,
        messages=[*turns, {"role": "user", "content": "and then?"}],  # type: ignore[list-item]
    )
    assert second.choices[0].message.content == REPLY
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached == first.usage.prompt_tokens + first.usage.completion_tokens - 1, "all but the last sampled token"
    wait_until(lambda: swarm.quiet(MODEL), "both are over")
    status = swarm.status(MODEL)
    assert status["parked"] > 0
    assert status["kv_tokens"] == status["kv_tokens_planned"] >= status["kv_parked_tokens"] > cached
    assert [(stage["device"], stage["threads"]) for stage in status["stages"]] == [("script", 1)] * 2
    assert {stage["kv_budget_tokens"] for stage in status["stages"]} == {status["kv_tokens"]}


def test_the_reply_says_where_the_time_went(swarm: Swarm) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    timing = swarm.client.post("/v1/chat/completions", body)["swarm"]["timing"]
    assert timing["stage0_ms"] >= 1
    assert timing["stage1_ms"] >= 1
    assert {"link_ms", "queue_ms", "prefill_ms"} <= timing.keys()
    assert timing["bytes_per_token"] > 0
    assert timing["route"] == "direct"


def test_a_stop_string_ends_the_reply_before_it(swarm: Swarm) -> None:
    reply = ask(swarm, stop=["群れ"])
    assert reply.choices[0].message.content == REPLY.split("群れ")[0]
    assert reply.choices[0].finish_reason == "stop"
    wait_until(lambda: swarm.quiet(MODEL), "the stopped session is freed")


def test_max_tokens_cuts_the_reply(swarm: Swarm) -> None:
    reply = ask(swarm, max_tokens=4)
    assert reply.choices[0].message.content == REPLY[:4]
    assert reply.choices[0].finish_reason == "length"


def test_eight_clients_at_once_each_get_their_own(swarm: Swarm) -> None:
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda i: ask(swarm, "long" if i % 2 else "hello", max_tokens=60), range(8)))
    for index, reply in enumerate(replies):
        expected = "abcdefghij" * 6 if index % 2 else REPLY.encode()[:60].decode(errors="ignore")
        assert reply.choices[0].message.content.startswith(expected[:55])
    wait_until(lambda: swarm.quiet(MODEL), "all sessions are freed")


def test_a_failing_session_ends_alone(swarm: Swarm) -> None:
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(ask, swarm, "long", max_tokens=200)
        with pytest.raises(openai.InternalServerError, match="the script fails"):
            ask(swarm, "broken")
        with pytest.raises(openai.InternalServerError, match="the script fails"):
            ask(swarm, "early")
        assert other.result().choices[0].message.content == "abcdefghij" * 20
    wait_until(lambda: swarm.quiet(MODEL), "the failed sessions are freed")


def test_a_stream_that_fails_ends_with_an_error_event(swarm: Swarm) -> None:
    stream = swarm.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "broken"}], stream=True
    )
    texts = []
    with pytest.raises(openai.APIError, match="the script fails") as raised:
        texts += [chunk.choices[0].delta.content or "" for chunk in stream]
    assert raised.value.code == "stage_failed"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_everything(swarm: Swarm, stream: bool) -> None:
    import httpx

    body = {"model": MODEL, "messages": [{"role": "user", "content": "long"}], "stream": stream}
    with httpx.Client(base_url=swarm.local.api, timeout=0.5 if not stream else 10, trust_env=False) as client:
        if stream:
            with client.stream("POST", "/v1/chat/completions", json=body) as response:
                lines = response.iter_lines()
                for _ in range(6):
                    next(lines)
                assert not swarm.quiet(MODEL)
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/chat/completions", json=body)
    wait_until(lambda: swarm.quiet(MODEL), "the abandoned session is freed")


def test_what_can_never_fit_is_413_with_the_numbers(swarm: Swarm) -> None:
    with pytest.raises(openai.APIStatusError, match="5,000 of max_tokens") as raised:
        ask(swarm, max_tokens=5000)
    assert raised.value.status_code == 413
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError) as too_long:
        ask(swarm, "x" * 5000)
    assert too_long.value.status_code == 413


def test_loads_that_cannot_work_are_refused_before_anything_is_sent(swarm: Swarm) -> None:
    with pytest.raises(LoadRefused, match="4 layers"):
        swarm.load("scripted-two", num_stages=5)
    with pytest.raises(PeerNotFound, match="peer-0"):
        swarm.load("scripted-two", peers=["nobody", "peer-2"])
    where = {"peers": list(swarm.worker_pids(MODEL)), "plan": True}
    assert swarm.client.post("/api/v1/models/scripted-two/load", where)["evicts"] == [MODEL], "and it only says so"
    assert swarm.status(MODEL)["state"] == "ready"
    with pytest.raises(ModelNotFound, match="scripted-two"):
        swarm.load("nothing")
    assert swarm.status("scripted-two")["state"] == "available"


def test_another_model_beside_it_and_an_unload_that_ends_its_worker(swarm: Swarm) -> None:
    status = swarm.load("scripted-two", num_stages=1)
    assert status["state"] == "ready"
    (pid,) = swarm.worker_pids("scripted-two").values()
    reply = swarm.openai.chat.completions.create(
        model="scripted-two", messages=[{"role": "user", "content": "hello"}], extra_body={"min_p": 0.1}
    )
    assert reply.choices[0].message.content == REPLY
    swarm.unload("scripted-two")
    wait_until(lambda: not alive(pid), "the worker has ended")
    with pytest.raises(SwarmError, match="model-load"):
        swarm.client.post(
            "/v1/chat/completions", {"model": "scripted-two", "messages": [{"role": "user", "content": "x"}]}
        )
    assert ask(swarm).choices[0].message.content == REPLY


def test_unload_lets_a_running_reply_finish_and_force_does_not(swarm: Swarm) -> None:
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(ask, swarm, "long", max_tokens=400)
        wait_until(lambda: swarm.status(MODEL)["running"] == 1, "the reply runs")
        unload = pool.submit(swarm.unload, MODEL, force=False)
        wait_until(lambda: swarm.status(MODEL)["state"] == "unloading", "it drains")
        with pytest.raises(openai.APIStatusError, match="unload") as late:
            ask(swarm)
        assert (late.value.status_code, late.value.code) == (503, "model_unloading")
        assert int(late.value.response.headers["retry-after"]) > 0
        assert running.result().choices[0].message.content == "abcdefghij" * 40
        assert unload.result()["state"] == "available"
        swarm.load(MODEL)
        running = pool.submit(ask, swarm, "long", max_tokens=4000)
        wait_until(lambda: swarm.status(MODEL)["running"] == 1, "the reply runs")
        workers = swarm.worker_pids(MODEL)
        swarm.unload(MODEL, force=True)
        assert not any(map(alive, workers.values()))
        with pytest.raises(openai.APIStatusError, match="unload") as cut:
            running.result()
        assert cut.value.code == "model_unloading"
    swarm.load(MODEL)


def test_an_unload_goes_on_when_whoever_asked_for_it_leaves(swarm: Swarm) -> None:
    import httpx

    workers = swarm.worker_pids(MODEL)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask, swarm, "long", max_tokens=400)
        wait_until(lambda: swarm.status(MODEL)["running"] == 1, "the reply runs")
        url = f"{swarm.local.api}/api/v1/models/{MODEL}/unload"
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json={}, timeout=0.3, trust_env=False)
        assert running.result().choices[0].message.content == "abcdefghij" * 40
    wait_until(lambda: swarm.status(MODEL)["state"] == "available", "it is unloaded all the same")
    assert not any(map(alive, workers.values()))
    swarm.load(MODEL)
