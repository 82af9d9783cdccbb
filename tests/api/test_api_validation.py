"""What a chat request may hold: every refusal is a 400 that names the field, everything else reaches the backend."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.api.backend import ChatRequest
from swarmnode.api.chat import to_chat_request
from swarmnode.api.errors import HttpError
from swarmnode.api.json_body import MAX_JSON_DEPTH, MAX_JSON_VALUES, MAX_SEPARATORS, parse_json_object
from swarmnode.api.openai_models import UNSUPPORTED, ChatBody, parse_chat
from swarmnode.api.replay import ReplayBackend
from swarmnode.ring.work import Sampling

USER = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "replay-1", "messages": USER, **fields}


def refused(data: dict[str, Any]) -> HttpError:
    with pytest.raises(HttpError) as caught:
        parse_chat(data)
    assert caught.value.status == 400
    assert caught.value.param is not None
    return caught.value


def sent(**fields: Any) -> Any:
    """What the backend gets for a body."""
    return to_chat_request(parse_chat(chat(**fields)), ReplayBackend().model("replay-1"))


REFUSED = [
    # row 38
    ({"messages": []}, "messages", "empty_array"),
    ({"messages": None}, "messages", "invalid_type"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": [{}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
    ({"messages": [*USER, None]}, "messages[1]", "invalid_type"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"role": "system", "content": None}]}, "messages[0].content", "invalid_value"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": {}}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]", "invalid_type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "missing_required_parameter",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "unsupported_value"),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "messages[0].content",
        "unsupported_value",
    ),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "unsupported_value"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "unsupported_value"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": None, "content": "x"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls", "unsupported_value"),
    ({"messages": USER * 5000}, "messages", "array_too_long"),
    ({"model": None}, "model", "invalid_type"),
    ({"model": 5}, "model", "invalid_type"),
    ({"model": ""}, "model", "invalid_value"),
    ({"model": "m" * 300}, "model", "string_too_long"),
    # rows 35 and 46
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    ({"max_tokens": 1 << 31}, "max_tokens", "invalid_value"),
    ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
    ({"max_tokens": True}, "max_tokens", "invalid_type"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    ({"temperature": -0.1}, "temperature", "invalid_value"),
    ({"temperature": 2.1}, "temperature", "invalid_value"),
    ({"temperature": "1"}, "temperature", "invalid_type"),
    ({"top_p": 1.01}, "top_p", "invalid_value"),
    ({"top_p": -0.01}, "top_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"top_k": 1.5}, "top_k", "invalid_type"),
    ({"min_p": 2}, "min_p", "invalid_value"),
    ({"seed": 1 << 63}, "seed", "invalid_value"),
    ({"seed": 0.5}, "seed", "invalid_type"),
    ({"stop": 5}, "stop", "invalid_type"),
    ({"stop": [5]}, "stop[0]", "invalid_type"),
    ({"stop": ["x"] * 17}, "stop", "array_too_long"),
    ({"stop": "x" * 257}, "stop[0]", "string_too_long"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream": 1}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options", "invalid_value"),
    ({"stream_options": [], "stream": True}, "stream_options", "invalid_type"),
    ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage", "invalid_type"),
    ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs.enable_thinking", "invalid_type"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "invalid_type"),
    ({"n": 0}, "n", "unsupported_parameter"),
    ({"n": 2}, "n", "unsupported_parameter"),
    ({"n": True}, "n", "unsupported_parameter"),
    ({"response_format": {"type": ""}}, "response_format", "unsupported_parameter"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    # row 74
    ({"response_format": {"type": "json_schema", "json_schema": 123}}, "response_format", "unsupported_parameter"),
    ({"logprobs": True}, "logprobs", "unsupported_parameter"),  # row 67: refused, not null
    ({"top_logprobs": 3}, "top_logprobs", "unsupported_parameter"),
    ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
    ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter"),
    ({"presence_penalty": 0.5}, "presence_penalty", "unsupported_parameter"),
    ({"frequency_penalty": -1}, "frequency_penalty", "unsupported_parameter"),
    ({"repetition_penalty": 1.1}, "repetition_penalty", "unsupported_parameter"),
    ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    ({"audio": {"voice": "x"}}, "audio", "unsupported_parameter"),
]


@pytest.mark.parametrize(("fields", "param", "code"), REFUSED, ids=[json.dumps(row[0])[:60] for row in REFUSED])
def test_refusals_name_the_field(fields: dict[str, Any], param: str | None, code: str) -> None:
    error = refused(chat(**fields))
    assert error.code == code
    if param is not None:
        assert error.param == param
    assert (error.param or "") in error.message or repr(error.param) in error.message


@pytest.mark.parametrize("field", ["model", "messages"])
def test_missing_fields_are_named(field: str) -> None:
    data = chat()
    del data[field]
    assert (refused(data).param, refused(data).code) == (field, "missing_required_parameter")


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_neutral_values_pass_and_others_do_not(name: str) -> None:
    """Never silently ignored: what asks for something is refused, what asks for nothing is not."""
    for neutral in UNSUPPORTED[name]:
        parse_chat(chat(**{name: json.loads(json.dumps(neutral))}))
    assert refused(chat(**{name: {"asks": "for something"}})).param == name


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_zero_as_a_float_is_neutral_and_false_is_not(name: str) -> None:
    parse_chat(chat(**{name: 0.0}))
    refused(chat(**{name: False}))


def test_unknown_fields_are_ignored() -> None:
    plain, extra = (
        parse_chat(chat()),
        parse_chat(chat(user="u", store=True, metadata={}, x_y=[1], parallel_tool_calls=True)),
    )
    assert plain == extra


def test_null_means_not_given() -> None:
    names = [name for name in ChatBody.model_fields if name not in ("model", "messages")]
    request = sent(**dict.fromkeys(names))
    assert (request.max_tokens, request.stop, request.template_kwargs) == (None, (), {})
    assert (request.sampling.temperature, request.sampling.top_p) == (0.7, 0.9)


def test_defaults_of_the_model_fill_what_is_missing() -> None:
    sampling = sent().sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 40, 0.0)


@pytest.mark.parametrize("off", [-1, 0, None])
def test_top_k_off(off: int | None) -> None:
    assert sent(top_k=off).sampling.top_k == 0


def test_zeros_are_values() -> None:
    """Row 46: top_p 0 and temperature 0 are legal, and not "not given"."""
    sampling = sent(temperature=0, top_p=0, min_p=0, seed=0).sampling
    assert sampling == Sampling(temperature=0.0, top_p=0.0, top_k=40, min_p=0.0, seed=0)


def test_a_missing_seed_is_drawn_anew() -> None:
    assert len({sent().sampling.seed for _ in range(8)}) == 8


@pytest.mark.parametrize("seed", [-1, -(1 << 63), (1 << 63) - 1, 42])
def test_seeds_fit_the_wire(seed: int) -> None:
    assert 0 <= sent(seed=seed).sampling.seed < 1 << 63
    assert sent(seed=seed).sampling.seed == sent(seed=seed).sampling.seed


def test_max_completion_tokens_wins() -> None:
    """Row 44."""
    assert sent(max_tokens=9).max_tokens == 9
    assert sent(max_completion_tokens=5).max_tokens == 5
    assert sent(max_tokens=9, max_completion_tokens=5).max_tokens == 5
    assert sent().max_tokens is None


def test_stop_strings() -> None:
    assert sent(stop="END").stop == ("END",)
    assert sent(stop=["a", "", "b", "a"]).stop == ("a", "b")
    assert sent(stop="").stop == ()
    assert sent(stop=[]).stop == ()


def test_roles_and_content() -> None:
    """Rows 32 and 33: developer becomes system, text parts become one string, an assistant may say nothing."""
    messages = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "x"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "tool_calls": [], "function_call": None},
        {"role": "user", "content": ""},
    ]
    assert list(sent(messages=messages).messages) == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None},
        {"role": "user", "content": ""},
    ]


def test_thinking() -> None:
    assert sent(chat_template_kwargs={"enable_thinking": False, "other": 1}).template_kwargs == {
        "enable_thinking": False
    }
    assert sent(reasoning_effort="none").template_kwargs == {"enable_thinking": False}
    assert sent(reasoning_effort="high").template_kwargs == {}
    both = sent(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert both.template_kwargs == {"enable_thinking": True}


NOT_OBJECTS = [
    b'"str"', b"[]", b"1", b"null", b"true", b"", b"   ", b"{", b'{"a":}', b"\xff\xfe", b'{"a":NaN}',
    b'{"a":-Infinity}',
    b'{"a":"\\ud800"}', b'{"\\udfff":1}', b'{"a":["x",{"b":"\\ud83d"}]}', b'{"a":"\x01"}', b"{'a':1}",
    b'{"a":' + b"9" * 5000 + b"}", b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"a":' + b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH + b"}", b"{}{}",
    b'{"a":[' + b"1," * MAX_JSON_VALUES + b"1]}", b'{"a":[' + b"{}," * MAX_JSON_VALUES + b"1]}",
]  # fmt: skip


@pytest.mark.parametrize("data", NOT_OBJECTS, ids=[repr(data[:24]) for data in NOT_OBJECTS])
def test_bad_json_is_400(data: bytes) -> None:
    """Row 50 and the bounds of depth, size and text."""
    with pytest.raises(HttpError) as caught:
        parse_json_object(data)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert len(caught.value.message) < 400


def test_the_counts_are_exact() -> None:
    assert parse_json_object(b'{"a":[' + b"1," * (MAX_JSON_VALUES - 2) + b"1]}")
    with pytest.raises(HttpError):
        parse_json_object(b'{"a":[' + b"1," * (MAX_JSON_VALUES - 1) + b"1]}")
    assert parse_json_object(b'{"a":"' + b"," * (MAX_SEPARATORS - 1) + b'"}')
    with pytest.raises(HttpError):
        parse_json_object(b'{"a":"' + b"," * MAX_SEPARATORS + b'"}')


def test_good_json_passes() -> None:
    assert parse_json_object(b'\xef\xbb\xbf{"a":"\\ud83d\\ude00","b":[[]]}') == {"a": "😀", "b": [[]]}
    depth = MAX_JSON_DEPTH - 1
    assert parse_json_object(b'{"a":' + b"[" * depth + b"]" * depth + b"}")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(sorted({*ChatBody.model_fields, *UNSUPPORTED, "role", "content", "x"}))


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(FIELDS, JSON, max_size=4), st.booleans())
def test_any_object_is_a_request_or_a_400(fields: dict[str, Any], complete: bool) -> None:
    data = chat(**fields) if complete else fields
    outcome: Any
    try:
        outcome = to_chat_request(
            parse_chat(parse_json_object(json.dumps(data).encode())), ReplayBackend().model("replay-1")
        )
    except HttpError as error:
        outcome = error.status
    assert isinstance(outcome, ChatRequest) or outcome == 400


@pytest.mark.parametrize("raw", [b'"str"', b"[]", b"1", b"null", b"{", b"", b'{"model":"replay-1"}'])
async def test_bad_bodies_over_http(gateway: Any, raw: bytes) -> None:
    """Rows 38 and 50 through the whole stack: OpenAI's error object, 400 and not 422 or 500."""
    reply = await gateway.client.post(CHAT, content=raw, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert gateway.backend.requests == []
