"""Stage 0's prompts, on a thread of their own: chat messages to token ids.

A long prompt takes seconds to tokenize. On the text thread that would hold up the text of every running reply.
"""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from queue import SimpleQueue
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Any

from swarmnode.errors import MAX_MESSAGE_CHARS, InternalError, InvalidRequest, Overloaded, SwarmError
from swarmnode.ring.head_messages import Cancel, HeadInput, Open
from swarmnode.ring.work import Sampling
from swarmnode.wire.frames import Frame

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from swarmnode.compute.text import TextPipeline
    from swarmnode.ids import RequestId


@dataclass(frozen=True, slots=True)
class OpenChat:
    """A chat request as it came over the wire; `body` is its structured body (see docs/wire.md, `open`)."""

    request: RequestId
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Opened:
    """The text thread is told of a request before the head is, so it knows it when the head's events come."""

    request: RequestId
    stops: tuple[str, ...]


class PromptThread:
    """Turns `OpenChat`s into `Open`s for the loop (`submit`), in order; `announce` hears of each just before.

    `limit` requests may wait here; one more is refused at once, as the head would refuse it a moment later. A `Cancel`
    passes behind the `OpenChat`s that came before it.
    """

    def __init__(
        self,
        pipeline: TextPipeline,
        submit: Callable[[HeadInput], None],
        announce: Callable[[Opened], None],
        post: Callable[[Frame], None],
        limit: int,
    ) -> None:
        self._queue: SimpleQueue[OpenChat | Cancel | None] = SimpleQueue()
        self._limit = limit
        self._room = BoundedSemaphore(limit)
        self._pipeline = pipeline
        self._submit = submit
        self._announce = announce
        self._post = post

    def put(self, message: OpenChat | Cancel) -> None:
        """Callable from any thread; never waits."""
        if isinstance(message, OpenChat) and not self._room.acquire(blocking=False):
            error = Overloaded(f"{self._limit} requests are already waiting to be read; try again later")
            self._post(error_frame(message.request, error))
        else:
            self._queue.put(message)

    def close(self) -> None:
        """End `run` behind what is queued; callable from any thread."""
        self._queue.put(None)

    def run(self) -> None:
        """Serve until `close`."""
        while (message := self._queue.get()) is not None:
            if isinstance(message, Cancel):
                self._submit(message)
            else:
                self._open(message)
                self._room.release()

    def _open(self, chat: OpenChat) -> None:
        try:
            opened = self._prepare(chat)
        except SwarmError as error:
            self._post(error_frame(chat.request, error))
        except Exception as error:  # a template or tokenizer bug ends its request, not the stage
            traceback.print_exc(file=sys.stderr)
            self._post(error_frame(chat.request, InternalError(f"tokenizing failed: {error}")))
        else:
            self._announce(Opened(chat.request, tuple(chat.body.get("stop", ()))))
            self._submit(opened)

    def _prepare(self, chat: OpenChat) -> Open:
        body = chat.body
        prompt = self._pipeline.encode_chat(body["messages"], body.get("template_kwargs", {}))
        if not prompt:
            raise InvalidRequest("the chat template made an empty prompt of these messages", param="messages")
        return Open(chat.request, tuple(prompt), body.get("max_tokens"), Sampling(**body["sampling"]))


def error_frame(request: RequestId, error: SwarmError) -> Frame:
    """The end of a request that fails."""
    header = {"request": request, "code": error.code, "message": error.message[:MAX_MESSAGE_CHARS]}
    return Frame("error", header | ({"param": error.param} if error.param else {}))
