"""Chat completions: a validated request runs on the backend, and its events become one body or an SSE stream."""

from __future__ import annotations

import logging
import secrets
import time
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import trio
from fastapi import APIRouter
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations at run time
from starlette.responses import JSONResponse, Response

from swarmnode.api import sse
from swarmnode.api.auth import needs
from swarmnode.api.backend import ChatRequest, Done, TextDelta
from swarmnode.api.errors import describe, error_response, internal_error
from swarmnode.api.exchange import exchange_of
from swarmnode.api.json_body import parse_json_object
from swarmnode.api.middleware import REQUEST_ID_KEY
from swarmnode.api.openai_models import ChatBody, parse_chat
from swarmnode.cluster.token_book import Scope
from swarmnode.errors import InternalError, SwarmError
from swarmnode.ring.work import Sampling

if TYPE_CHECKING:
    from starlette.types import Receive, Send
    from starlette.types import Scope as AsgiScope

    from swarmnode.api.backend import Backend, ChatEvent, ModelCard
    from swarmnode.api.limits import ApiLimits

    _Item = ChatEvent | SwarmError | bytes
    """What goes into a stream: its events, their failure, or bytes as they are."""

log = logging.getLogger("swarmnode.api")

EVENTS_AHEAD = 64
"""Events taken from the ring before the client's socket must move: what is queued goes out in one write."""
MAX_SEED = (1 << 63) - 1


def chat_router(backend: Backend, limits: ApiLimits) -> APIRouter:
    """`POST /v1/chat/completions` and the same under `/api`."""

    @needs(Scope.OPERATE)
    async def chat(request: Request) -> Response:
        body = parse_chat(parse_json_object(await exchange_of(request.scope).body()))
        chat_request = to_chat_request(body, backend.model(body.model))
        if body.stream:
            return ChatStream(backend, chat_request, limits, include_usage=body.wants_usage)
        return await whole_reply(backend, chat_request, request.scope)

    router = APIRouter()
    for path in ("/v1/chat/completions", "/api/v1/chat/completions"):
        router.add_api_route(path, chat, methods=["POST"], response_model=None, openapi_extra=_OPENAPI)
    return router


_OPENAPI: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": ChatBody.model_json_schema()}}}
}


def to_chat_request(body: ChatBody, card: ModelCard) -> ChatRequest:
    return ChatRequest(
        model=card.id,
        messages=tuple(
            {"role": "system" if m.role == "developer" else m.role, "content": m.text()} for m in body.messages
        ),
        sampling=_sampling(body, card.defaults),
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        stop=tuple(dict.fromkeys(text for text in body.stop or () if text)),  # "" would stop before the first token
        template_kwargs=body.template_kwargs(),
    )


def _sampling(body: ChatBody, defaults: Sampling) -> Sampling:
    """The request's values over the model's defaults; an explicit null of top_k or min_p switches it off."""
    given = body.model_fields_set
    top_k = body.top_k if "top_k" in given else defaults.top_k
    min_p = body.min_p if "min_p" in given else defaults.min_p
    return Sampling(
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        top_k=max(0, top_k or 0),
        min_p=min_p or 0.0,
        seed=secrets.randbelow(MAX_SEED) if body.seed is None else body.seed & MAX_SEED,
    )


def new_reply_id() -> str:
    return f"chatcmpl-{uuid.uuid4().hex}"


def expected_failure(error: Exception, request_id: str) -> SwarmError:
    """A request's failure in the swarm's terms; a bug is logged here and named by its request id."""
    found: BaseException = error
    while isinstance(found, BaseExceptionGroup) and len(found.exceptions) == 1:
        found = found.exceptions[0]  # trio's nurseries wrap what a backend raises inside one
    if isinstance(found, SwarmError):
        return found
    log.error("request %s failed", request_id, exc_info=error)
    return internal_error(request_id)


async def whole_reply(backend: Backend, request: ChatRequest, scope: AsgiScope) -> JSONResponse:
    """Collect all events of a request that is not streamed; a client that leaves cancels it."""
    done: Done | None = None
    texts: list[str] = []
    with exchange_of(scope).generation():
        try:
            async with backend.open_chat(request) as events:
                async for event in events:
                    if isinstance(event, TextDelta):
                        texts.append(event.text)
                    elif isinstance(event, Done):
                        done = event
        except Exception as error:
            raise expected_failure(error, scope[REQUEST_ID_KEY]) from error
    if done is None:
        raise InternalError("the reply ended without an end event")
    return JSONResponse(_completion(request, "".join(texts), done))


def _completion(request: ChatRequest, text: str, done: Done) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": text, "refusal": None},
        "logprobs": None,
        "finish_reason": done.finish_reason,
    }
    if done.stop_sequence is not None:
        choice["stop_reason"] = done.stop_sequence
    return {
        "id": new_reply_id(),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [choice],
        "usage": sse.usage_of(done),
        "swarm": {"timing": dict(done.timing)},
    }


class ChatStream(Response):
    """One streamed reply. One task takes the backend's events, one writes them, one keeps the line alive.

    The first event decides the status: 200 only once the backend has accepted, else a plain error body. A failure
    after that is an error event, and then a body without its end: no client can take it for a clean one.
    """

    def __init__(self, backend: Backend, request: ChatRequest, limits: ApiLimits, *, include_usage: bool) -> None:
        super().__init__()
        self._backend = backend
        self._request = request
        self._limits = limits
        self._chunks = sse.ChunkEncoder(new_reply_id(), int(time.time()), request.model, include_usage=include_usage)
        self._wrote_s = trio.current_time()
        self._silence = trio.CancelScope()
        """Of the task that fills it with comments."""

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        sink, source = trio.open_memory_channel["_Item"](EVENTS_AHEAD)
        started = False
        try:
            with exchange_of(scope).generation():
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._take_events, sink, scope[REQUEST_ID_KEY])
                    first = await _next(source)
                    if isinstance(first, SwarmError):
                        await error_response(first)(scope, receive, send)
                        return
                    started = True
                    nursery.start_soon(self._keep_alive, sink)
                    nursery.start_soon(self._write, first, source, send)
        except SwarmError as error:  # cut
            if not started:
                raise
            await send({"type": "http.response.body", "body": sse.error_event(describe(error)[1]), "more_body": True})

    async def _take_events(self, sink: trio.MemorySendChannel[_Item], request_id: str) -> None:
        with sink:
            try:
                async with self._backend.open_chat(self._request) as events:
                    async for event in events:
                        try:
                            sink.send_nowait(event)
                        except trio.WouldBlock:
                            await sink.send(event)
            except Exception as error:
                await sink.send(expected_failure(error, request_id))

    async def _write(self, first: _Item, source: trio.MemoryReceiveChannel[_Item], send: Send) -> None:
        """A task of its own: to wake one within the application's stack, some thirty coroutines are resumed."""
        await send({"type": "http.response.start", "status": 200, "headers": list(sse.HEADERS)})
        data, ended, clean = self._encode([first])
        data = self._chunks.role() + data
        while not ended:
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._wrote_s = trio.current_time()
            item = await _next(source)
            data, ended, clean = self._encode([item, *_queued(source)])
        self._silence.cancel()
        await send({"type": "http.response.body", "body": data, "more_body": not clean})

    async def _keep_alive(self, sink: trio.MemorySendChannel[_Item]) -> None:
        """A comment wherever nothing was written for so long. A task of its own: a deadline for every token would be
        paid by every token."""
        with self._silence, suppress(trio.ClosedResourceError):
            while True:
                due_s = self._wrote_s + self._limits.sse_keep_alive_s
                if trio.current_time() < due_s:
                    await trio.sleep_until(due_s)
                    continue
                with suppress(trio.WouldBlock):  # the client does not read; it needs no sign of life
                    sink.send_nowait(sse.KEEP_ALIVE)
                self._wrote_s = trio.current_time()

    def _encode(self, items: list[_Item]) -> tuple[bytes, bool, bool]:
        """The bytes of some events; whether the reply is over; whether it ended cleanly."""
        parts: list[bytes] = []
        for item in items:
            if isinstance(item, TextDelta):
                if item.text:
                    parts.append(self._chunks.content(item.text))
            elif isinstance(item, bytes):
                parts.append(item)
            elif isinstance(item, Done):
                return b"".join([*parts, self._chunks.end(item)]), True, True
            elif isinstance(item, SwarmError):
                return b"".join([*parts, sse.error_event(describe(item)[1])]), True, False
        return b"".join(parts), False, False


async def _next(source: trio.MemoryReceiveChannel[_Item]) -> _Item:
    try:
        return await source.receive()
    except trio.EndOfChannel:
        return InternalError("the reply ended without an end event")


def _queued(source: trio.MemoryReceiveChannel[_Item]) -> list[_Item]:
    """What is there already, without waiting: many tokens share one write when the socket is the slower side."""
    items: list[_Item] = []
    while len(items) < EVENTS_AHEAD:
        try:
            items.append(source.receive_nowait())
        except (trio.WouldBlock, trio.EndOfChannel):
            break
    return items
