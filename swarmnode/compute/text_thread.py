"""Stage 0's text side, on its own thread: chat to token ids, token ids to text, stop strings."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from swarmnode.compute.stops import StopMatcher
from swarmnode.errors import MAX_MESSAGE_CHARS, InternalError, InvalidRequest, SwarmError
from swarmnode.ring.head_messages import (
    Accepted,
    Cancel,
    Finished,
    HeadEvent,
    HeadInput,
    Open,
    Probed,
    Refused,
    Sampled,
    Started,
)
from swarmnode.ring.work import Sampling
from swarmnode.wire.bodies import pack_body
from swarmnode.wire.frames import Frame
from swarmnode.wire.limits import MAX_TEXT_CHARS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from swarmnode.compute.detokenizer import IncrementalDetokenizer
    from swarmnode.compute.text import TextPipeline
    from swarmnode.ids import RequestId, RingId


@dataclass(frozen=True, slots=True)
class OpenChat:
    """A chat request as it came over the wire; `body` is its structured body (see docs/wire.md, `open`)."""

    request: RequestId
    body: Mapping[str, Any]


TextInput = OpenChat | Cancel | HeadEvent | None


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
    """Turns requests into `Open`s for the loop (`submit`) and the head's events into frames (`post`)."""

    def __init__(
        self,
        ring: RingId,
        pipeline: TextPipeline,
        submit: Callable[[HeadInput], None],
        post: Callable[[Frame], None],
    ) -> None:
        self.inbox: SimpleQueue[TextInput] = SimpleQueue()
        self._ring = ring
        self._pipeline = pipeline
        self._submit = submit
        self._post = post
        self._replies: dict[RequestId, _Reply] = {}

    def run(self) -> None:
        """Serve until None arrives. All that is queued is handled before texts are sent, so they travel together."""
        while (message := self.inbox.get()) is not None:
            try:
                while message is not None:
                    self._handle(message)
                    message = self.inbox.get_nowait()
                return
            except Empty:
                self._send_texts()

    def _handle(self, message: TextInput) -> None:
        match message:
            case OpenChat():
                self._open(message)
            case Cancel():
                self._submit(message)
            case Accepted(request=request, prompt_tokens=count):
                self._post(Frame("accepted", {"request": request, "prompt_tokens": count}))
            case Started(request=request):
                self._post(Frame("started", {"request": request}))
            case Sampled(request=request, token=token):
                self._take_token(request, token)
            case Finished():
                self._finish(message)
            case Refused(request=request, code=code, message=text):
                self._replies.pop(request, None)
                self._post_error(request, code, text)
            case Probed(round_ms=round_ms):
                self._post(Frame("probed", {"ring": self._ring, "ms": round_ms}))

    def _open(self, chat: OpenChat) -> None:
        try:
            opened = self._prepare(chat)
        except SwarmError as error:
            self._post_error(chat.request, error.code, error.message, error.param)
        except Exception as error:  # a template or tokenizer bug ends its request, not the stage
            traceback.print_exc(file=sys.stderr)
            self._post_error(chat.request, InternalError.code, f"tokenizing failed: {error}")
        else:
            self._submit(opened)

    def _prepare(self, chat: OpenChat) -> Open:
        body = chat.body
        prompt = self._pipeline.encode_chat(body["messages"], body.get("template_kwargs", {}))
        if not prompt:
            raise InvalidRequest("the chat template made an empty prompt of these messages", param="messages")
        self._replies[chat.request] = _Reply(self._pipeline.detokenizer(), StopMatcher(tuple(body.get("stop", ()))))
        return Open(chat.request, tuple(prompt), body.get("max_tokens"), Sampling(**body["sampling"]))

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
        self._send_text(end.request, reply)
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
        self._post(Frame("done", header, pack_body(dict(end.timing))))

    def _send_texts(self) -> None:
        for request, reply in self._replies.items():
            self._send_text(request, reply)

    def _send_text(self, request: RequestId, reply: _Reply) -> None:
        """One frame with all that is final; a longer text than a frame takes goes in several."""
        if not reply.texts and not reply.pending_tokens:
            return
        text, tokens = "".join(reply.texts), reply.pending_tokens
        reply.texts, reply.pending_tokens = [], 0
        for start in range(0, max(len(text), 1), MAX_TEXT_CHARS):
            part = text[start : start + MAX_TEXT_CHARS]
            self._post(Frame("text", {"request": request, "text": part, "n": tokens}))
            tokens = 0

    def _post_error(self, request: RequestId, code: str, message: str, param: str | None = None) -> None:
        header = {"request": request, "code": code, "message": message[:MAX_MESSAGE_CHARS]}
        if param:
            header["param"] = param
        self._post(Frame("error", header))
