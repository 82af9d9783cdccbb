"""The API port of a node that does not coordinate: every call goes on to the coordinator's API, streaming both ways.

Tokens are checked there, by whoever keeps them. What a browser may do is checked here, where its Host and Origin are.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING

import httpx
import trio
from starlette.responses import JSONResponse

from swarmnode.api.auth import REQUIRE_TOKEN_HEADER
from swarmnode.api.errors import RETRY_AFTER_S, HttpError
from swarmnode.api.hosts import HostMiddleware
from swarmnode.api.middleware import (
    REQUEST_ID_KEY,
    CorsMiddleware,
    ErrorMiddleware,
    PathMiddleware,
    RequestIdMiddleware,
)
from swarmnode.errors import LinkBroken
from swarmnode.local_access import trust_exactly
from swarmnode.wire.nursery import open_flat_nursery

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator

    from starlette.types import ASGIApp, Receive, Scope, Send

    from swarmnode.api.hosts import HostRules

FORWARDED = ("/v1", "/api/v1")
UNKNOWN = "this node knows no coordinator at the moment; try again in a few seconds"
CONNECT_S = 5.0
CLOSE_S = 1.0
"""For the goodbye of TLS."""
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade host expect origin x-request-id".split()
)
"""Headers about this connection alone (RFC 9110, 7.6.1), and those that are checked or made anew on either side."""


class Forwarder:
    """Tell it where the coordinator's API is, and when that is no longer known; `app` is what a port serves.

    `run` it: it closes the connections that are no longer used.
    """

    def __init__(self, *, closed: bool) -> None:
        """`closed`: other machines reach this port, so the coordinator must not take its calls for local ones."""
        self._closed = closed
        self._client: httpx.AsyncClient | None = None
        self._why_not = UNKNOWN
        self._running: set[trio.CancelScope] = set()
        self._retire, self._retired = trio.open_memory_channel[httpx.AsyncClient](math.inf)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        try:
            async for client in self._retired:
                await _close(client)
        finally:
            self.disconnect()
            with suppress(trio.WouldBlock):
                while True:
                    await _close(self._retired.receive_nowait())

    def app(self, hosts: HostRules) -> ASGIApp:
        guarded = PathMiddleware(HostMiddleware(self, hosts))
        return RequestIdMiddleware(CorsMiddleware(ErrorMiddleware(guarded), hosts.origins))

    def connect(self, url: str, certificate: str | None) -> None:
        """Forward to `url` from now on; `certificate` (PEM) is the one its TLS must show."""
        self.disconnect()
        self._client = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(None, connect=CONNECT_S),  # a load may be silent for minutes; `disconnect` ends it
            limits=httpx.Limits(max_connections=None),
            verify=False if certificate is None else trust_exactly(certificate),
            trust_env=False,
        )

    def disconnect(self, why: str = UNKNOWN) -> None:
        """The coordinator is gone: end what runs, and answer 503 that says `why` until the next `connect`."""
        self._why_not = why
        for scope in self._running:
            scope.cancel()
        if self._client is not None:
            self._retire.send_nowait(self._client)
        self._client = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path == "/health":
            await JSONResponse({"status": "ok"})(scope, receive, send)
            return
        if not any(path == root or path.startswith(f"{root}/") for root in FORWARDED):
            raise HttpError(404, "unknown_url", f"unknown URL: {path[:200]}; this node forwards /v1 and /api/v1")
        if self._client is None:
            raise _no_coordinator(self._why_not)
        with trio.CancelScope() as running:
            self._running.add(running)
            try:
                await self._forward(self._client, scope, receive, send)
            finally:
                self._running.discard(running)
        if running.cancelled_caught:
            raise _no_coordinator("the connection to the coordinator was lost")

    async def _forward(self, client: httpx.AsyncClient, scope: Scope, receive: Receive, send: Send) -> None:
        """One exchange; the client's leaving cancels the other side's, which frees the stages."""
        sink, source = trio.open_memory_channel[bytes](0)
        body = _parts(source) if _has_body(scope) else None
        request = client.build_request(scope["method"], _target(scope), headers=self._headers(scope), content=body)
        try:
            async with open_flat_nursery() as nursery:
                nursery.start_soon(_read_client, receive, sink, nursery.cancel_scope)
                response = await client.send(request, stream=True)
                try:
                    await _answer(response, send)
                finally:
                    with trio.CancelScope(shield=True):  # closing a socket does not wait
                        await response.aclose()
                nursery.cancel_scope.cancel()
        except httpx.ConnectError as error:
            raise _no_coordinator(f"the coordinator's API at {client.base_url} cannot be reached") from error
        except httpx.HTTPError as error:
            raise LinkBroken(f"the coordinator's API broke off: {error or type(error).__name__}") from error

    def _headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        named = {
            token.strip().lower()
            for name, value in scope["headers"]
            if name == b"connection"
            for token in value.split(b",")
        }
        kept = [(name, value) for name, value in scope["headers"] if name.lower() not in HOP_BY_HOP | named]
        kept.append((b"x-request-id", scope[REQUEST_ID_KEY].encode()))
        if self._closed:
            kept.append((REQUIRE_TOKEN_HEADER.encode(), b"1"))
        return kept


async def _close(client: httpx.AsyncClient) -> None:
    with trio.move_on_after(CLOSE_S, shield=True):
        await client.aclose()


async def _read_client(receive: Receive, sink: trio.MemorySendChannel[bytes], exchange: trio.CancelScope) -> None:
    """Hand the body on part by part, then wait for the client to leave."""
    with sink:
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                exchange.cancel()
                return
            if data := message.get("body", b""):
                await sink.send(data)
            if not message.get("more_body", False):
                break
    while (await receive())["type"] != "http.disconnect":
        pass
    exchange.cancel()


async def _parts(source: trio.MemoryReceiveChannel[bytes]) -> AsyncGenerator[bytes, None]:
    async for part in source:
        yield part


async def _answer(response: httpx.Response, send: Send) -> None:
    headers = list(_response_headers(response))
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    parts = response.aiter_raw()
    try:
        async for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
    except BaseException:
        await _abandon(response, parts)
        raise
    await send({"type": "http.response.body", "body": b""})


async def _abandon(response: httpx.Response, parts: AsyncIterator[bytes]) -> None:
    """Close the connection, and let httpx's nested generators meet that: closing the outer one leaves the inner ones
    to the garbage collector."""
    with trio.CancelScope(shield=True), suppress(httpx.HTTPError, httpx.StreamError):
        await response.aclose()
        async for _ in parts:
            pass


def _response_headers(response: httpx.Response) -> Iterator[tuple[bytes, bytes]]:
    for name, value in response.headers.raw:
        lower = name.lower()
        if lower not in HOP_BY_HOP and not lower.startswith(b"access-control-"):
            yield lower, value


def _has_body(scope: Scope) -> bool:
    return any(name.lower() in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])


def _target(scope: Scope) -> str:
    query = scope["query_string"].decode("latin-1")
    path = httpx.URL(path=scope["path"]).raw_path.decode("ascii")
    return f"{path}?{query}" if query else path


def _no_coordinator(message: str) -> HttpError:
    return HttpError(503, "no_coordinator", message, headers={"retry-after": str(RETRY_AFTER_S)})
