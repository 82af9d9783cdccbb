"""The real openai client against the gateway: what its own parser accepts and raises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest
import trio

from swarmnode.api.replay import Replay
from swarmnode.errors import ContextTooLong, Overloaded, StageLost

if TYPE_CHECKING:
    from collections.abc import Callable

USER: Any = [{"role": "user", "content": "hi"}]


async def call(gateway: Any, use: Callable[[openai.OpenAI], Any]) -> Any:
    """Run `use` in a thread with a strict client that does not retry."""

    def run() -> Any:
        with openai.OpenAI(
            base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
        ) as client:
            return use(client)

    return await trio.to_thread.run_sync(run)


async def test_whole_reply(gateway: Any) -> None:
    reply = await call(gateway, lambda c: c.chat.completions.create(model="replay-1", messages=USER, temperature=0))
    assert reply.choices[0].message.content == "Hello, world!"
    assert (reply.choices[0].finish_reason, reply.usage.total_tokens) == ("stop", 11)
    assert reply.model_extra["swarm"]["timing"]["route"] == "replay"
    assert gateway.backend.requests[0].sampling.temperature == 0


@pytest.mark.parametrize("usage", [False, True])
async def test_stream(gateway: Any, usage: bool) -> None:
    gateway.backend.replay = Replay(texts=("Grüße", " 🛑", "\u2028", "!"), prefill_s=0.12)

    def use(client: openai.OpenAI) -> Any:
        options: Any = {"stream_options": {"include_usage": True}} if usage else {}
        return list(client.chat.completions.create(model="replay-1", messages=USER, stream=True, **options))

    found = await call(gateway, use)
    choices = [chunk.choices[0] for chunk in found if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == "Grüße 🛑\u2028!"
    assert [choice.delta.role for choice in choices] == ["assistant", None, None, None, None, None]
    assert [choice.finish_reason for choice in choices] == [None] * 5 + ["stop"]
    assert len({(chunk.id, chunk.created) for chunk in found}) == 1
    assert [chunk.usage.total_tokens for chunk in found if chunk.usage] == ([11] if usage else [])


@pytest.mark.parametrize("cached", [0, 5])
async def test_cached_tokens_stand_in_the_usage_of_whole_and_streamed_replies(gateway: Any, cached: int) -> None:
    gateway.backend.replay = Replay(cached_tokens=cached)

    def use(client: openai.OpenAI) -> list[Any]:
        asked: Any = {"model": "replay-1", "messages": USER}
        whole = client.chat.completions.create(**asked)
        streamed = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        return [whole.usage, streamed[-1].usage]

    for usage in await call(gateway, use):
        assert (usage.prompt_tokens, usage.total_tokens) == (7, 11)
        assert usage.prompt_tokens_details.cached_tokens == cached


async def test_models(gateway: Any) -> None:
    assert [m.id for m in await call(gateway, lambda c: c.models.list().data)] == ["replay-1"]
    assert (await call(gateway, lambda c: c.models.retrieve("replay-1"))).owned_by == "swarmnode"


@pytest.mark.parametrize(
    ("error", "raised", "code"),
    [
        (ContextTooLong("too long"), openai.APIStatusError, "context_length_exceeded"),
        (Overloaded("full"), openai.InternalServerError, "overloaded"),
    ],
)
async def test_refusals(gateway: Any, error: Exception, raised: type[openai.APIStatusError], code: str) -> None:
    gateway.backend.replay = Replay(refuse=error)
    with pytest.raises(raised) as caught:
        await call(gateway, lambda c: c.chat.completions.create(model="replay-1", messages=USER, stream=True))
    assert caught.value.code == code


async def test_unknown_model_and_bad_field(gateway: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await call(gateway, lambda c: c.chat.completions.create(model="nope", messages=USER))
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as bad:
        await call(gateway, lambda c: c.chat.completions.create(model="replay-1", messages=USER, logprobs=True))
    assert bad.value.param == "logprobs"


async def test_a_failure_in_the_stream_raises(gateway: Any) -> None:
    """Row 71."""
    gateway.backend.replay = Replay(error=StageLost("stage 1 went away"), error_after=2)
    texts: list[str] = []

    def use(client: openai.OpenAI) -> None:
        stream = client.chat.completions.create(model="replay-1", messages=USER, stream=True)
        texts.extend(chunk.choices[0].delta.content or "" for chunk in stream)

    with pytest.raises(openai.APIError, match="stage 1 went away") as caught:
        await call(gateway, use)
    assert (caught.value.code, texts) == ("stage_lost", ["", "Hello", ", "])


async def test_closing_the_stream_cancels(gateway: Any, until: Any) -> None:
    gateway.backend.replay = Replay(texts=("x",) * 100_000, token_s=0.001)

    def use(client: openai.OpenAI) -> None:
        with client.chat.completions.create(model="replay-1", messages=USER, stream=True) as stream:
            for _ in range(3):
                next(stream)

    await call(gateway, use)
    await until(lambda: gateway.backend.open == 0)
    assert gateway.backend.cancelled == 1
