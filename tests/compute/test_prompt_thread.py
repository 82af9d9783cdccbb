"""Stage 0's text threads: prompts hold no reply up; each request is announced, opened and ended in order."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import pytest

from swarmnode.compute.byte_tokenizer import BYTE_EOS_ID, write_byte_tokenizer
from swarmnode.compute.prompt_thread import OpenChat, Opened, PromptThread
from swarmnode.compute.text import TextPipeline
from swarmnode.compute.text_thread import TextThread
from swarmnode.errors import InvalidTemplate
from swarmnode.ids import RequestId, RingId
from swarmnode.ring.head_messages import Cancel, Finished, Open, Probed, Refused, Sampled

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from swarmnode.wire.frames import Frame

PATIENCE_S = 10.0


def chat(request: str, text: str = "hello", **body: Any) -> OpenChat:
    sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0}
    messages = [{"role": "user", "content": text}]
    return OpenChat(RequestId(request), {"messages": messages, "sampling": sampling, **body})


class Gated:
    """A pipeline that waits at the word `slow`, breaks at `broken`, refuses at `refused`."""

    def __init__(self, pipeline: TextPipeline) -> None:
        self._pipeline = pipeline
        self.reading = threading.Event()
        self.go_on = threading.Event()

    def encode_chat(self, messages: list[dict[str, str]], kwargs: object) -> list[int]:
        text = messages[0]["content"]
        if text == "slow":
            self.reading.set()
            assert self.go_on.wait(PATIENCE_S)
        if text == "broken":
            raise KeyError("a bug in a template")
        if text == "refused":
            raise InvalidTemplate("no such role", param="messages")
        return [] if text == "nothing" else self._pipeline.encode_chat(messages, {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)


class Threads:
    """Both threads with what they send; `done` collects in the order of sending, whoever sent it."""

    def __init__(self, folder: Path, limit: int) -> None:
        write_byte_tokenizer(folder)
        self.pipeline: Any = Gated(TextPipeline(folder))
        self.done: SimpleQueue[Any] = SimpleQueue()
        self.text = TextThread(RingId("r"), self.pipeline, self.done.put, self._post)
        self.prompts = PromptThread(self.pipeline, self.done.put, self._announce, self.done.put, limit)
        self.threads = [threading.Thread(target=run) for run in (self.text.run, self.prompts.run)]
        for thread in self.threads:
            thread.start()

    def _announce(self, opened: Opened) -> None:
        self.done.put(opened)
        self.text.inbox.put(opened)

    def _post(self, *frames: Frame) -> None:
        for frame in frames:
            self.done.put(frame)

    def next(self) -> Any:
        return self.done.get(timeout=PATIENCE_S)

    def close(self) -> None:
        self.pipeline.go_on.set()
        self.prompts.close()
        self.text.inbox.put(None)
        for thread in self.threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        assert self.done.empty()


@pytest.fixture
def threads(tmp_path: Path) -> Iterator[Threads]:
    made = Threads(tmp_path, limit=2)
    yield made
    made.close()


def error_of(frame: Frame) -> tuple[str, str]:
    assert frame.kind == "error"
    return frame.header["request"], frame.header["code"]


def test_a_request_is_announced_before_it_is_opened(threads: Threads) -> None:
    threads.prompts.put(chat("a", "hi", stop=["x"], max_tokens=5))
    assert threads.next() == Opened(RequestId("a"), ("x",))
    opened = threads.next()
    assert isinstance(opened, Open)
    assert (opened.request, opened.max_new_tokens, opened.sampling.temperature) == ("a", 5, 0.0)
    assert bytes(token for token in opened.prompt if token < 256).count(b"hi") == 1


def test_replies_go_on_while_a_prompt_is_read(threads: Threads) -> None:
    threads.prompts.put(chat("a"))
    for kind in (Opened, Open):
        assert isinstance(threads.next(), kind)
    threads.prompts.put(chat("b", "slow"))
    assert threads.pipeline.reading.wait(PATIENCE_S)
    threads.text.inbox.put(Sampled(RequestId("a"), ord("y")))
    text = threads.next()
    assert (text.kind, text.header["text"], text.header["n"]) == ("text", "y", 1)
    threads.text.inbox.put(Finished(RequestId("a"), "stop", 7, 1, {}, cached_tokens=3))
    done = threads.next()
    assert (done.kind, done.header["cached"], done.header["prompt_tokens"]) == ("done", 3, 7)
    threads.pipeline.go_on.set()
    assert isinstance(threads.next(), Opened)
    assert isinstance(threads.next(), Open)


def test_texts_of_one_step_are_posted_together(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    posts: SimpleQueue[list[str]] = SimpleQueue()
    text = TextThread(
        RingId("r"), TextPipeline(tmp_path), posts.put, lambda *frames: posts.put([f.header["text"] for f in frames])
    )
    for request in "ab":
        text.inbox.put(Opened(RequestId(request), ()))
    for request, token in zip("aba", b"xyz", strict=True):
        text.inbox.put(Sampled(RequestId(request), token))
    running = threading.Thread(target=text.run)
    running.start()
    assert posts.get(timeout=PATIENCE_S) == ["xz", "y"]
    text.inbox.put(None)
    running.join(PATIENCE_S)
    assert posts.empty()


def test_a_queue_that_never_runs_empty_keeps_no_answer(tmp_path: Path) -> None:
    """Every token of the reply brings another one."""
    write_byte_tokenizer(tmp_path)
    text: TextThread
    told: list[str] = []

    def post(*frames: Frame) -> None:
        told.extend(frame.kind for frame in frames)
        text.inbox.put(None)

    class Endless(SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            found = super().get(block, timeout)
            self.put(Sampled(RequestId("a"), ord("x")))
            return found

    text = TextThread(RingId("r"), TextPipeline(tmp_path), lambda _: None, post)
    text.inbox = Endless()
    text.inbox.put(Opened(RequestId("a"), ()))
    text.inbox.put(Refused(RequestId("b"), "overloaded", "no room"))
    running = threading.Thread(target=text.run, daemon=True)
    running.start()
    running.join(PATIENCE_S)
    assert not running.is_alive()
    assert told[0] == "error"


def test_a_cancel_stays_behind_its_open_and_further_requests_are_refused_at_once(threads: Threads) -> None:
    threads.prompts.put(chat("a", "slow"))
    assert threads.pipeline.reading.wait(PATIENCE_S)
    threads.prompts.put(chat("b"))
    threads.prompts.put(Cancel(RequestId("a")))
    threads.prompts.put(chat("c"))
    assert error_of(threads.next()) == ("c", "overloaded")
    threads.pipeline.go_on.set()
    seen = [threads.next() for _ in range(5)]
    assert [getattr(each, "request", None) for each in seen] == ["a", "a", "b", "b", "a"]
    assert isinstance(seen[-1], Cancel)
    threads.prompts.put(chat("d"))
    assert threads.next().request == threads.next().request == "d"


def test_a_prompt_that_fails_ends_its_request_only(threads: Threads, capfd: pytest.CaptureFixture[str]) -> None:
    failing = {"broken": "internal_error", "refused": "invalid_messages", "nothing": "invalid_request"}
    for text, code in failing.items():
        threads.prompts.put(chat(text, text))
        assert error_of(threads.next()) == (text, code)
    assert "a bug in a template" in capfd.readouterr().err
    threads.prompts.put(chat("after"))
    assert threads.next().request == threads.next().request == "after"


def test_the_probes_time_is_told_and_logged(threads: Threads, capfd: pytest.CaptureFixture[str]) -> None:
    threads.text.inbox.put(Probed(1, 21.5))
    assert threads.next().header == {"ring": "r", "ms": 21.5}
    assert "came round in 21.50 ms" in capfd.readouterr().err


def test_one_tokenizer_encodes_and_decodes_at_once(tmp_path: Path) -> None:
    """Both threads share it; an older tokenizers raised `Already borrowed`."""
    write_byte_tokenizer(tmp_path)
    pipeline = TextPipeline(tmp_path)
    long = "".join(map(chr, range(32, 1000))) * 30
    expected = pipeline.encode_chat([{"role": "user", "content": long}])
    found: list[list[int]] = []
    encoding = threading.Thread(
        target=lambda: found.extend(pipeline.encode_chat([{"role": "user", "content": long}]) for _ in range(5))
    )
    encoding.start()
    replies = 0
    while encoding.is_alive():
        reply = pipeline.detokenizer()
        text = "".join(reply.push(token) for token in [*"Grüße 群れ".encode(), BYTE_EOS_ID])
        assert text + reply.finish() == "Grüße 群れ"
        replies += 1
    encoding.join()
    assert found == [expected] * 5
    assert replies > 1
