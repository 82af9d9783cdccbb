"""Chat replies over a real socket: bodies, the golden SSE order, failures before and after 200."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from swarmnode.api.replay import Replay
from swarmnode.errors import ContextTooLong, InternalError, InvalidTemplate, ModelRestoring, Overloaded, StageLost

if TYPE_CHECKING:
    import httpx

CHAT = "/v1/chat/completions"

GOLDEN = """\
data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"replay-1","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"replay-1","choices":[{"index":0,"delta":{"content":"Hel"},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"replay-1","choices":[{"index":0,"delta":{"content":"lo"},"logprobs":null,"finish_reason":null}],"usage":null}

data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"replay-1","choices":[{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}],"usage":null,"swarm":{"timing":{"stage0_ms":0.0,"link_ms":0.0,"prefill_ms":0.0,"route":"replay"}}}

data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"replay-1","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9,"prompt_tokens_details":{"cached_tokens":0}}}

data: [DONE]

"""  # noqa: E501


def chunks(text: str) -> list[dict[str, Any]]:
    """The JSON events of a stream, without [DONE] and comments."""
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def joined(text: str) -> str:
    return "".join(c["delta"].get("content", "") for chunk in chunks(text) for c in chunk["choices"])


async def test_stream_matches_the_golden_text(gateway: Any) -> None:
    """Rows 11, 17, 19 and 1.4: order, role once, one finish chunk, usage only at the end, [DONE]."""
    gateway.backend.replay = Replay(texts=("Hel", "lo"), finish_reason="length")
    reply = await gateway.chat(stream=True, stream_options={"include_usage": True})
    ids = set(re.findall(r'"id":"(chatcmpl-[0-9a-f]{32})"', reply.text))
    created = set(re.findall(r'"created":(\d+)', reply.text))
    assert (reply.status_code, len(ids), len(created)) == (200, 1, 1)
    text = re.sub(r'"id":"chatcmpl-[0-9a-f]+"', '"id":"ID"', reply.text)
    assert re.sub(r'"created":\d+', '"created":0', text) == GOLDEN


async def test_stream_has_no_usage_key_unless_asked(gateway: Any) -> None:
    """Row 12."""
    for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
        reply = await gateway.chat(stream=True, **options)
        assert '"usage"' not in reply.text
        assert all(chunk["choices"] for chunk in chunks(reply.text))
        assert reply.text.endswith("data: [DONE]\n\n")


async def test_stream_headers(gateway: Any) -> None:
    """Rows 53, 62 and 65: media type, no buffering by proxies, CORS on the stream itself."""
    reply: httpx.Response = await gateway.client.post(
        CHAT,
        json={"model": "replay-1", "messages": [{"role": "user", "content": "hi"}], "stream": True},
        headers={"origin": "http://page.example", "x-request-id": "mine-1"},
    )
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert reply.headers["access-control-allow-origin"] == "*"
    assert reply.headers["x-request-id"] == "mine-1"


async def test_whole_reply_has_every_required_key(gateway: Any) -> None:
    """1.1: message requires refusal, choice requires logprobs; R8: timing."""
    gateway.backend.replay = Replay(texts=("a", "", "b"), stop_sequence="END")
    reply = (await gateway.chat()).json()
    assert re.fullmatch("chatcmpl-[0-9a-f]{32}", reply.pop("id"))
    assert isinstance(reply.pop("created"), int)
    assert reply == {
        "object": "chat.completion",
        "model": "replay-1",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "ab", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": "END",
            }
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 3,
            "total_tokens": 10,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
        "swarm": {"timing": {"stage0_ms": 0.0, "link_ms": 0.0, "prefill_ms": 0.0, "route": "replay"}},
    }


@pytest.mark.parametrize("path", [CHAT, "/api/v1/chat/completions"])
async def test_both_paths_answer_alike(gateway: Any, body: Any, path: str) -> None:
    reply = await gateway.client.post(path, json=body())
    assert reply.json()["choices"][0]["message"]["content"] == "Hello, world!"


async def test_stream_joins_to_the_whole_reply(gateway: Any) -> None:
    """Rows 1 and 2: text outside the BMP, combining marks and line separators come through unchanged."""
    texts = ("你是", "谁?", "\U0001f6d1", "e\u0301", "\u2028line\u0085", 'q"\\\n', "\0\x7f")
    gateway.backend.replay = Replay(texts=texts)
    whole = (await gateway.chat()).json()["choices"][0]["message"]["content"]
    stream = (await gateway.chat(stream=True)).text
    assert joined(stream) == whole == "".join(texts)
    assert "\ufffd" not in stream


async def test_events_are_ascii_lines(gateway: Any) -> None:
    """Clients that split at U+2028 or U+0085 (httpx does) still see one line an event."""
    gateway.backend.replay = Replay(texts=("\u2028\u0085",))
    text = (await gateway.chat(stream=True)).text
    assert text.isascii()
    assert all(not line or line.startswith("data: ") for line in text.splitlines())


async def test_empty_deltas_make_no_chunk(gateway: Any) -> None:
    gateway.backend.replay = Replay(texts=("a", "", "", "b"))
    found = chunks((await gateway.chat(stream=True)).text)
    assert [c["choices"][0]["delta"].get("content") for c in found] == ["", "a", "b", None]


async def test_a_client_that_reads_slowly_gets_every_token_in_order(gateway: Any) -> None:
    """More than the sockets hold: chunks are written at once, then in part, then behind those that wait."""
    texts = [f"{number}-" + "x" * 4000 for number in range(3000)]
    gateway.backend.replay = Replay(texts=texts)
    raw = await gateway.raw()
    await raw.post(CHAT, _streamed())
    await trio.testing.wait_all_tasks_blocked()  # the gateway waits for room
    reply = await raw.reply()
    assert reply.complete
    found = [c["choices"][0]["delta"].get("content") for c in chunks(reply.body.decode())]
    assert [text for text in found if text] == texts


@pytest.mark.parametrize("silent", ["queue_s", "prefill_s"])
async def test_silence_is_filled_with_comments(gateway: Any, silent: str) -> None:
    """1.4: after Accepted the 200 and the role are out at once, and comments follow while nothing else comes."""
    gateway.backend.replay = replace(Replay(texts=("x",)), **{silent: 0.3})
    async with gateway.client.stream("POST", CHAT, json=_streamed()) as reply:
        lines = [line async for line in reply.aiter_lines() if line]
    kinds = ["comment" if line == ": keep-alive" else "data" for line in lines]
    assert kinds[0] == "data"
    assert 2 <= kinds.count("comment") <= 6
    assert kinds[-3:] == ["data", "data", "data"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ContextTooLong("2000 prompt tokens, the context holds 1024"), 413, "context_length_exceeded"),
        (InvalidTemplate("System message must be at the beginning"), 400, "invalid_messages"),
        (Overloaded("24 requests wait already"), 503, "overloaded"),
        (StageLost("stage 1 on pc-2 went away"), 503, "stage_lost"),
        (ModelRestoring("it is being loaded again"), 503, "model_restoring"),
        (InternalError("a bug"), 500, "internal_error"),
    ],
)
async def test_a_refusal_before_accepted_is_a_real_status(
    gateway: Any, stream: bool, error: Exception, status: int, code: str
) -> None:
    """Rows 39, 41 and 42."""
    gateway.backend.replay = Replay(refuse=error)
    reply = await gateway.chat(stream=stream)
    assert reply.status_code == status
    assert reply.headers["content-type"] == "application/json"
    assert reply.json()["error"]["code"] == code
    assert reply.json()["error"]["message"] == str(error)
    assert ("retry-after" in reply.headers) == (status == 503)


async def test_a_failure_after_200_is_an_error_event_and_a_cut_body(gateway: Any, body: Any) -> None:
    """Row 71: never a clean end, never [DONE]; the truncated chunked body is visible to every client."""
    gateway.backend.replay = Replay(error=StageLost("stage 1 on pc-2 went away"), error_after=2)
    raw = await gateway.raw()
    await raw.post(CHAT, body(stream=True))
    reply = await raw.reply()
    assert (reply.status, reply.complete) == (200, False)
    assert b"[DONE]" not in reply.body
    events = chunks(reply.body.decode())
    assert [c["choices"][0]["delta"]["content"] for c in events[:-1]] == ["", "Hello", ", "]
    assert events[-1] == {
        "error": {
            "message": "stage 1 on pc-2 went away",
            "type": "unavailable_error",
            "param": None,
            "code": "stage_lost",
        }
    }


async def test_a_failure_after_accepted_is_a_status_when_not_streamed(gateway: Any) -> None:
    gateway.backend.replay = Replay(error=StageLost("gone"), error_after=2)
    reply = await gateway.chat()
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "stage_lost")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_is_named_by_its_request_id_only(gateway: Any, caplog: Any, stream: bool) -> None:
    """1.5: a 500 has a JSON body, the log has the traceback."""
    gateway.backend.replay = Replay(refuse=KeyError("secret detail"))
    reply = await gateway.chat(stream=stream)
    assert reply.status_code == 500
    error = reply.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert reply.headers["x-request-id"] in error["message"]
    assert "secret" not in reply.text
    assert "secret detail" in caplog.text


async def test_an_end_without_done_is_an_error(gateway: Any, body: Any, monkeypatch: Any) -> None:
    async def accepted_only() -> Any:
        from swarmnode.api.backend import Accepted

        yield Accepted(1)

    monkeypatch.setattr(gateway.backend, "_events", accepted_only)
    assert (await gateway.chat()).status_code == 500
    raw = await gateway.raw()
    await raw.post(CHAT, body(stream=True))
    reply = await raw.reply()
    assert not reply.complete
    assert chunks(reply.body.decode())[-1]["error"]["code"] == "internal_error"


async def test_a_model_that_is_not_loaded(gateway: Any) -> None:
    gateway.backend.loaded.clear()
    for stream in (False, True):
        reply = await gateway.chat(stream=stream)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "model_not_loaded")
        assert reply.headers["retry-after"].isdigit()


async def test_an_unknown_model_names_the_known_ones(gateway: Any) -> None:
    """Row 76; ids are case-exact."""
    for name in ("nope", "Replay-1", "replay-1 "):
        reply = await gateway.chat(model=name)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["type"]) == (404, "model_not_found", "not_found_error")
        assert "replay-1" in error["message"]


def _streamed() -> dict[str, Any]:
    return {"model": "replay-1", "messages": [{"role": "user", "content": "hi"}], "stream": True}
