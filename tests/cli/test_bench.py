"""`swarmnode bench`: how prompts are made, and what the figures of a row are; the command itself is in e2e/test_cli."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from swarmnode.cli.bench import MAX_USERS, Prompts, parse_users
from swarmnode.cli.chat_stream import ChatResult
from swarmnode.cli.crowd import Crowd, Reply, percentile, summary
from swarmnode.errors import InvalidRequest, StageFailed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from swarmnode.cli.client import ApiClient

TEMPLATE_TOKENS = 30


class FakeApi:
    """Answers chats in three pieces; a word is `tokens_a_word` tokens. `fails`: the words of a prompt that fails."""

    def __init__(self, tokens_a_word: float = 1.0, fails: str = "never asked") -> None:
        self.tokens_a_word, self.fails = tokens_a_word, fails
        self.asked: list[str] = []

    def get(self, path: str) -> dict[str, Any]:
        return {"status": "ok"} if path == "/health" else {}

    def close(self) -> None:
        pass

    def stream_chat(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        text = body["messages"][0]["content"]
        self.asked.append(text)
        for piece in ("a", "b", "c"):
            yield {"choices": [{"delta": {"content": piece}, "finish_reason": None}]}
            if self.fails in text:
                raise StageFailed("it fails")
        prompt = TEMPLATE_TOKENS + round(len(text.split()) * self.tokens_a_word)
        yield {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": 3}}


def api(**options: Any) -> ApiClient:
    return cast("ApiClient", FakeApi(**options))


@pytest.mark.parametrize("tokens_a_word", [0.4, 1.0, 5.3])
@pytest.mark.parametrize("tokens", [150, 1000])
def test_prompts_are_fitted_to_the_asked_number_of_tokens(tokens: int, tokens_a_word: float) -> None:
    client, prompts = FakeApi(tokens_a_word), Prompts("model", repeat=False)
    prompts.fit(cast("ApiClient", client), tokens)
    made = prompts.body(8)["messages"][0]["content"]
    assert TEMPLATE_TOKENS + len(made.split()) * tokens_a_word == pytest.approx(tokens, abs=max(2, 2 * tokens_a_word))


def test_a_prompt_shorter_than_the_question_is_the_question() -> None:
    prompts = Prompts("model", repeat=False)
    prompts.fit(api(), 1)
    assert prompts.words == 0


def test_no_two_prompts_begin_alike_unless_repeated() -> None:
    beginnings = [" ".join(Prompts("model", repeat=False).body(8)["messages"][0]["content"].split()[:2])]
    prompts = Prompts("model", repeat=False)
    beginnings += [" ".join(prompts.body(8)["messages"][0]["content"].split()[:2]) for _ in range(50)]
    assert len(set(beginnings)) == len(beginnings)
    same = Prompts("model", repeat=True, words=20)
    assert same.body(8) == same.body(8)


@pytest.mark.parametrize("text", ["", "0", "1,,2", "1;4", "-1", str(MAX_USERS + 1), "9" * 30, "²"])
def test_users_that_cannot_be_say_what_is_allowed(text: str) -> None:
    with pytest.raises(InvalidRequest, match="1,4,8"):
        parse_users(text)


def test_users_are_a_list_of_counts() -> None:
    assert parse_users("1, 4,256") == [1, 4, 256]


def test_every_user_of_a_crowd_sends_all_its_requests() -> None:
    prompts, told = Prompts("model", repeat=False), [0]
    made: list[FakeApi] = []

    def connect() -> ApiClient:
        made.append(FakeApi())
        return cast("ApiClient", made[-1])

    def tell() -> None:
        told[0] += 1

    crowd = Crowd(connect, lambda: [prompts.body(3) for _ in range(2)], 5, tell)
    assert crowd.run() > 0
    assert [len(client.asked) for client in made] == [2] * 5
    assert len({text for client in made for text in client.asked}) == len(crowd.replies) == told[0] == 10
    assert {reply.result.text for reply in crowd.replies} == {"abc"}


def test_a_request_that_fails_ends_the_row_with_its_error() -> None:
    prompts = Prompts("model", repeat=False)
    with pytest.raises(StageFailed, match="it fails"):
        Crowd(lambda: api(fails="lighthouse"), lambda: [prompts.body(3)], 3).run()


def reply(begun_s: float, itl_s: float, tokens: int, **timing: float) -> Reply:
    times_s = [begun_s + 0.5 + index * itl_s for index in range(tokens)]
    result = ChatResult(prompt_tokens=100, completion_tokens=tokens, ttft_s=0.5, timing={"route": "direct", **timing})
    return Reply(result, times_s)


def test_the_figures_of_a_row() -> None:
    slow = reply(0.0, 0.2, 11, stage0_ms=10.0, stage1_ms=30.0, stage10_ms=1.0, link_ms=20.0, queue_ms=2.0)
    fast = [reply(0.0, 0.1, 11, stage0_ms=10.0, stage1_ms=20.0, stage10_ms=1.0, link_ms=20.0) for _ in range(3)]
    row = summary(2, [slow, *fast], took_s=4.0)
    assert (row["users"], row["replies"], row["output_tokens"], row["prompt_tokens"]) == (2, 4, 11, 100)
    assert row["ttft_ms"] == {"p50": 500.0, "p99": 500.0}
    assert row["itl_ms"] == {"p50": pytest.approx(100), "p99": pytest.approx(200)}
    assert row["tokens_per_s_per_user"] == pytest.approx(10.0)
    assert row["tokens_per_s"] == pytest.approx(11.0)
    assert list(row["stage_ms"].items()) == [("stage0", 10.0), ("stage1", 22.5), ("stage10", 1.0)]
    assert (row["link_ms"], row["queue_ms"], row["route"]) == (20.0, 2.0, "direct")


def test_percentiles_are_values_that_were_seen() -> None:
    assert percentile([], 0.5) == 0.0
    assert [percentile([3.0, 1.0, 2.0, 4.0], share) for share in (0.0, 0.5, 0.99)] == [1.0, 2.0, 4.0]
