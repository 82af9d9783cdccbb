"""Server-sent events of one streamed chat: the OpenAI chunks in their golden order, as bytes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarmnode.api.backend import Done

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
BOUNDARY = b"\n\n"
"""Ends an event that was sent in part; between events it means nothing."""
_ERROR_START = b'data: {"error":'
"""Nothing else has these bytes: within a JSON string the quotes are escaped."""
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the stream into one answer
)


def event(payload: object) -> bytes:
    """One `data:` event. ASCII-escaped: httpx and others split lines at U+2028 and U+0085 as well."""
    return b"data: " + json.dumps(payload, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n\n"


def error_event(error: dict[str, Any]) -> bytes:
    return event({"error": error})


def is_over(last: bytes) -> bool:
    """Whether a stream whose last bytes these are says itself how its reply ended: with the end mark, or an error."""
    return last.endswith(DONE) or _ERROR_START in last


class ChunkEncoder:
    """The chunks of one reply: id, created and model are the same in all of them.

    With `include_usage` every chunk but the usage chunk carries `usage: null`; without, none has the key.
    """

    def __init__(self, reply_id: str, created: int, model: str, *, include_usage: bool) -> None:
        self._base = {"id": reply_id, "object": "chat.completion.chunk", "created": created, "model": model}
        self._usage: dict[str, None] = {"usage": None} if include_usage else {}
        self._include_usage = include_usage
        mark = "\0"  # the content comes after everything the base holds, so its mark is the last
        before, after = self._content(mark).rsplit(json.dumps(mark).encode("ascii"), 1)
        self._before, self._after = before, after

    def role(self) -> bytes:
        return self._choice({"role": "assistant", "content": ""})

    def content(self, text: str) -> bytes:
        """The hot path: only the text is encoded anew."""
        return self._before + json.dumps(text).encode("ascii") + self._after

    def end(self, done: Done) -> bytes:
        """The finish chunk with the timing, the usage chunk if asked for, and the end mark."""
        extra: dict[str, Any] = {"swarm": {"timing": dict(done.timing)}}
        finish = self._choice({}, done.finish_reason, stop_sequence=done.stop_sequence, extra=extra)
        usage = event({**self._base, "choices": [], "usage": usage_of(done)}) if self._include_usage else b""
        return finish + usage + DONE

    def _content(self, text: str) -> bytes:
        return self._choice({"content": text})

    def _choice(
        self,
        delta: dict[str, str],
        finish_reason: str | None = None,
        *,
        stop_sequence: str | None = None,
        extra: dict[str, Any] | None = None,
    ) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        if stop_sequence is not None:
            choice["stop_reason"] = stop_sequence
        return event({**self._base, "choices": [choice], **self._usage, **(extra or {})})


def usage_of(done: Done) -> dict[str, Any]:
    return {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.completion_tokens,
        "total_tokens": done.prompt_tokens + done.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
    }
