"""The SSE encoder by itself: any text survives, and no chunk breaks the stream's framing."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swarmnode.api import sse
from swarmnode.api.backend import Done

DONE = Done("stop", 3, 4, {"route": "direct"}, None)


def data_of(chunk: bytes) -> dict[str, object]:
    assert chunk.startswith(b"data: ")
    assert chunk.endswith(b"\n\n")
    assert chunk.count(b"\n") == 2
    value: dict[str, object] = json.loads(chunk[6:])
    return value


@given(st.text(), st.text(max_size=20), st.booleans())
@example("\0", "\0", True)
def test_any_text_survives(text: str, model: str, usage: bool) -> None:
    """Also texts and model names that hold the encoder's own split mark or JSON."""
    chunk = sse.ChunkEncoder("id", 1, model, include_usage=usage).content(text)
    assert chunk.isascii()
    value = data_of(chunk)
    assert value["choices"] == [{"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}]
    assert value["model"] == model
    assert ("usage" in value) is usage


@pytest.mark.parametrize("usage", [False, True])
def test_the_end(usage: bool) -> None:
    events = sse.ChunkEncoder("id", 1, "m", include_usage=usage).end(DONE).split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    finish = json.loads(events[0][6:])
    assert finish["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert finish["swarm"] == {"timing": {"route": "direct"}}
    assert len(events) == (4 if usage else 3)


def test_a_stop_string_is_told_in_the_finish_chunk() -> None:
    end = sse.ChunkEncoder("id", 1, "m", include_usage=False).end(Done("stop", 1, 1, {}, "END"))
    assert json.loads(end.split(b"\n\n")[0][6:])["choices"][0]["stop_reason"] == "END"


def test_comments_and_errors_are_framed() -> None:
    assert sse.KEEP_ALIVE.startswith(b":")
    assert data_of(sse.error_event({"message": "a\nb"})) == {"error": {"message": "a\nb"}}
