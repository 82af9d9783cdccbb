"""Stage 0's replies, on a thread of their own: token ids to text, stop strings, the frames a client hears of."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from swarmnode.compute.prompt_thread import Opened
from swarmnode.compute.stops import StopMatcher
from swarmnode.errors import MAX_MESSAGE_CHARS
from swarmnode.ring.head_messages import (
    Accepted,
    Cancel,
    Finished,
    HeadEvent,
    HeadInput,
    Probed,
    Refused,
    Sampled,
    Started,
)
from swarmnode.wire.bodies import pack_body
from swarmnode.wire.frames import Frame
from swarmnode.wire.limits import MAX_TEXT_CHARS

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarmnode.compute.detokenizer import IncrementalDetokenizer
    from swarmnode.compute.text import TextPipeline
    from swarmnode.ids import RequestId, RingId
    from swarmnode.wire.frames import Post

TOGETHER = 64
"""Inputs that are handled before anything is sent: more than a step has replies. A queue that never runs empty must not
keep an answer."""

TextInput = Opened | HeadEvent | None


@dataclass(slots=True)
class _Reply:
    """Text state of one request between `open` and its end."""

    detokenizer: IncrementalDetokenizer
    stops: StopMatcher
    texts: list[str] = field(default_factory=list)
    pending_tokens: int = 0
    tokens: int = 0
    stopped_by: str | None = None


class TextThread:
    """Turns the head's events into frames (`post`); a reply that met a stop string is cancelled (`submit`)."""

    def __init__(
        self,
        ring: RingId,
        pipeline: TextPipeline,
        submit: Callable[[HeadInput], None],
        post: Post,
    ) -> None:
        self.inbox: SimpleQueue[TextInput] = SimpleQueue()
        self._ring = ring
        self._pipeline = pipeline
        self._submit = submit
        self._post = post
        self._replies: dict[RequestId, _Reply] = {}
        self._outgoing: list[Frame] = []
        """To be posted after some inputs."""

    def run(self) -> None:
        """Serve until None arrives."""
        while self._handle_some():
            self._add_texts()
            self._send()
        self._send()

    def _handle_some(self) -> bool:
        """What is queued, TOGETHER at most, so that the texts of a step's replies travel together; False after None."""
        for _ in range(TOGETHER):
            message = self.inbox.get()
            if message is None:
                return False
            self._handle(message)
            if self.inbox.empty():
                break
        return True

    def _handle(self, message: TextInput) -> None:
        match message:
            case Opened(request=request, stops=stops):
                self._replies[request] = _Reply(self._pipeline.detokenizer(), StopMatcher(stops))
            case Accepted(request=request, prompt_tokens=count):
                self._outgoing.append(Frame("accepted", {"request": request, "prompt_tokens": count}))
            case Started(request=request):
                self._outgoing.append(Frame("started", {"request": request}))
            case Sampled(request=request, token=token):
                self._take_token(request, token)
            case Finished():
                self._finish(message)
            case Refused(request=request, code=code, message=text):
                self._replies.pop(request, None)
                header = {"request": request, "code": code, "message": text[:MAX_MESSAGE_CHARS]}
                self._outgoing.append(Frame("error", header))
            case Probed(round_ms=round_ms):
                print(f"[stage0] the ring's probe came round in {round_ms:.2f} ms", file=sys.stderr, flush=True)
                self._outgoing.append(Frame("probed", {"ring": self._ring, "ms": round_ms}))

    def _take_token(self, request: RequestId, token: int) -> None:
        reply = self._replies.get(request)
        if reply is None or reply.stopped_by is not None:
            return
        reply.tokens += 1
        reply.pending_tokens += 1
        self._take_text(request, reply, reply.detokenizer.push(token))

    def _take_text(self, request: RequestId, reply: _Reply, text: str) -> None:
        if not text:
            return
        emitted, reply.stopped_by = reply.stops.push(text)
        if emitted:
            reply.texts.append(emitted)
        if reply.stopped_by is not None:
            self._submit(Cancel(request, "stop"))

    def _finish(self, end: Finished) -> None:
        reply = self._replies.pop(end.request, None)
        if reply is None:
            return
        if reply.stopped_by is None:
            self._take_text(end.request, reply, reply.detokenizer.finish())
        if reply.stopped_by is None and (rest := reply.stops.finish()):
            reply.texts.append(rest)
        self._add_text(end.request, reply)
        stopped = reply.stopped_by is not None
        header: dict[str, Any] = {
            "request": end.request,
            "finish_reason": "stop" if stopped else end.reason,
            "prompt_tokens": end.prompt_tokens,
            "completion_tokens": reply.tokens if stopped else end.completion_tokens,
        }
        if end.cached_tokens:
            header["cached"] = end.cached_tokens
        if reply.stopped_by is not None:
            header["stop"] = reply.stopped_by
        self._outgoing.append(Frame("done", header, pack_body(dict(end.timing))))

    def _send(self) -> None:
        if self._outgoing:
            self._post(*self._outgoing)
            self._outgoing = []

    def _add_texts(self) -> None:
        for request, reply in self._replies.items():
            self._add_text(request, reply)

    def _add_text(self, request: RequestId, reply: _Reply) -> None:
        """One frame with all that is final; a longer text than a frame takes goes in several."""
        if not reply.texts and not reply.pending_tokens:
            return
        text, tokens = "".join(reply.texts), reply.pending_tokens
        reply.texts, reply.pending_tokens = [], 0
        for start in range(0, max(len(text), 1), MAX_TEXT_CHARS):
            part = text[start : start + MAX_TEXT_CHARS]
            self._outgoing.append(Frame("text", {"request": request, "text": part, "n": tokens}))
            tokens = 0
