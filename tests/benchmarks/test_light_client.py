"""The studies' client reads what the command line's does."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.gateway import replay_gateway
from benchmarks.light_client import chunks_of, light_chat

TOKENS = 6
TOKEN_MS = 20.0


def test_a_chat_is_read_with_the_time_of_each_piece() -> None:
    times_s: list[float] = []
    with replay_gateway(TOKENS, TOKEN_MS) as target:
        body = {"model": target.model, "messages": [{"role": "user", "content": "Count."}]}
        result = light_chat(f"http://{target.host}:{target.port}", "any", body, times_s)
        with pytest.raises(RuntimeError, match="refused with 404"):
            light_chat(f"http://{target.host}:{target.port}", "any", {**body, "model": "another"}, [])
    assert result.text == " token" * TOKENS
    assert (result.finish_reason, result.completion_tokens) == ("stop", TOKENS)
    assert len(times_s) == TOKENS
    assert all(a < b for a, b in pairwise(times_s))
    assert 0 < result.ttft_s < result.total_s - (TOKENS - 2) * TOKEN_MS / 1e3


def test_a_reply_that_failed_or_was_cut_is_no_reply() -> None:
    with pytest.raises(RuntimeError, match=r"without its end mark.*stage_lost"):
        list(chunks_of(b'data: {"choices":[]}\n\ndata: {"error":{"code":"stage_lost"}}\n\n'))
