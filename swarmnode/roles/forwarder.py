"""The API port of a node that does not coordinate: every call goes on to the coordinator, streaming both ways.

It travels on an `api` channel of the swarm's own links. Tokens are checked at its end, by whoever keeps them. What a
browser may do is checked here, where its Host and Origin are.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from swarmnode.api import sse
from swarmnode.api.auth import REQUIRE_TOKEN_HEADER, presented_token
from swarmnode.api.errors import RETRY_AFTER_S, HttpError, describe
from swarmnode.api.hosts import HostMiddleware
from swarmnode.api.middleware import (
    REQUEST_ID_KEY,
    CorsMiddleware,
    ErrorMiddleware,
    PathMiddleware,
    RequestIdMiddleware,
)
from swarmnode.cluster.let_in import LetIn
from swarmnode.errors import LinkBroken, NoCoordinator, NodeRemoved, SwarmError, Unauthorized
from swarmnode.roles.coordinator_links import CoordinatorLinks
from swarmnode.roles.http_channel import Call
from swarmnode.roles.last_known import last_known
from swarmnode.wire.nursery import open_flat_nursery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.types import ASGIApp, Receive, Scope, Send

    from swarmnode.api.hosts import HostRules
    from swarmnode.cluster.let_in import Under
    from swarmnode.roles.context import NodeContext
    from swarmnode.roles.http_channel import Header

FORWARDED = ("/v1", "/api/v1")
NODES, LAST_KNOWN = "/api/v1/nodes", b"last_known=1"
"""Only who asks for them gets the last known nodes: everybody else is better off with an error."""
ANSWERED_KEY = "swarmnode.answered"
"""In a call's scope: the coordinator's answer has begun, and no other can."""
UNKNOWN = "this node is not connected to its coordinator at the moment; try again in a few seconds"
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade host expect origin x-request-id".split()
)
"""Headers about this connection alone (RFC 9110, 7.6.1), and those that are checked or made anew on either side."""
OWN_HEADERS = ((b"host", b"localhost"), (b"connection", b"close"))
"""The client's Host is this node's name, and was checked as such. A call has its channel to itself."""


class Forwarder:
    """`app` is what the port serves; it forwards while `follow` runs."""

    def __init__(self, context: NodeContext, *, closed: bool) -> None:
        """`closed`: other machines reach this port, so the coordinator must not let its calls in without a token."""
        self._context = context
        self._closed = closed
        self._links: CoordinatorLinks | None = None
        self._let_in = LetIn()
        """Those that the coordinator showed its nodes to."""

    def app(self, hosts: HostRules) -> ASGIApp:
        guarded = PathMiddleware(HostMiddleware(self, hosts))
        return RequestIdMiddleware(CorsMiddleware(ErrorMiddleware(guarded), hosts.origins))

    async def follow(self) -> None:
        """Forward to the coordinator until cancelled; then what runs ends, and calls are answered 503."""
        self._links = CoordinatorLinks(self._context)
        try:
            await self._links.run()
        finally:
            self._links = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path == "/health":
            await JSONResponse({"status": "ok"})(scope, receive, send)
            return
        if not any(path == root or path.startswith(f"{root}/") for root in FORWARDED):
            raise HttpError(404, "unknown_url", f"unknown URL: {path[:200]}; this node forwards /v1 and /api/v1")
        if self._links is None:
            await self._without_coordinator(scope, receive, send, UNKNOWN)
            return
        try:
            await self._forward(self._links, scope, receive, send)
        except (LinkBroken, NodeRemoved) as error:
            why = f"the call did not get through to the coordinator: {error.message}"
            await self._without_coordinator(scope, receive, send, why)

    @property
    def _lets_everybody_in(self) -> bool:
        return self._context.known.heading.open and not self._closed

    @property
    def _under(self) -> Under:
        """What a token counts under that is let in now."""
        return self._context.known.mark[0], self._context.known.heading.revocations

    async def _without_coordinator(self, scope: Scope, receive: Receive, send: Send, why: str) -> None:
        """Whoever asks for the last known nodes gets them, if the coordinator lets everybody in, or let them in."""
        asked = (scope["method"], scope["path"], scope["query_string"]) == ("GET", NODES, LAST_KNOWN)
        if asked and not scope.get(ANSWERED_KEY):
            token, known, now = _hashed_token(scope), self._context.known, time.time()
            let_in = token is not None and self._let_in.holds(token, self._under, now)
            found = last_known(known, now)
            if found is not None and (self._lets_everybody_in or let_in):
                await JSONResponse(found)(scope, receive, send)
                return
        if self._context.roads.removed:
            raise HttpError(
                NodeRemoved.status, NodeRemoved.code, f"this node was removed from the swarm; {NodeRemoved.mend}"
            )
        raise _no_coordinator(why)

    def _note_answer(self, scope: Scope, status: int, under: Under) -> None:
        """What it says of the call's token: nothing where everybody is let in, or where that is not known yet. `under`
        is of the call's beginning: the coordinator looked at the token since, and may have revoked it since then."""
        scope[ANSWERED_KEY] = True
        token = _hashed_token(scope)
        if self._lets_everybody_in:
            self._let_in.forget_all()
        elif token is None or self._context.known.as_of_s is None:
            return
        elif status == Unauthorized.status:
            self._let_in.refuse(token)
        elif status == 200 and (scope["method"], scope["path"]) == ("GET", NODES):
            self._let_in.admit(token, under, time.time())

    async def _forward(self, links: CoordinatorLinks, scope: Scope, receive: Receive, send: Send) -> None:
        """One call; the client's leaving ends it at the coordinator, too, which frees the stages."""
        under = self._under
        async with links.open() as channel, open_flat_nursery() as nursery:
            call = Call(channel)
            try:
                await call.begin(scope["method"], _target(scope), self._headers(scope))
                nursery.start_soon(_hand_on_body, receive, call, nursery.cancel_scope.cancel)
                await _answer(call, send, lambda status: self._note_answer(scope, status, under))
            finally:
                await call.hang_up()
            nursery.cancel_scope.cancel()

    def _headers(self, scope: Scope) -> list[Header]:
        given: list[Header] = [(name.lower(), value) for name, value in scope["headers"]]
        named = {token.strip().lower() for name, value in given if name == b"connection" for token in value.split(b",")}
        kept = [(name, value) for name, value in given if name not in HOP_BY_HOP | named]
        kept += [*OWN_HEADERS, (b"x-request-id", scope[REQUEST_ID_KEY].encode())]
        if any(name == b"transfer-encoding" for name, _ in given):
            kept.append((b"transfer-encoding", b"chunked"))
        if self._closed:
            kept.append((REQUIRE_TOKEN_HEADER.encode(), b"1"))
        return kept


async def _hand_on_body(receive: Receive, call: Call, leave: Callable[[], None]) -> None:
    """Part by part; then wait for the client to leave. What the coordinator does not want to read is dropped: its
    answer says why."""
    with suppress(SwarmError):
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                leave()
                return
            if data := message.get("body", b""):
                await call.send_body(data)
            if not message.get("more_body", False):
                await call.end()
                break
    while (await receive())["type"] != "http.disconnect":
        pass
    leave()


async def _answer(call: Call, send: Send, note: Callable[[int], None]) -> None:
    status, headers = await call.answer()
    note(status)
    kept = list(_response_headers(headers))
    await send({"type": "http.response.start", "status": status, "headers": kept})
    part = b""
    try:
        while part := await call.next_part():
            await send({"type": "http.response.body", "body": part, "more_body": True})
    except SwarmError as error:
        if _is_event_stream(kept) and not sse.is_over(part):
            lost = _no_coordinator(f"the coordinator was lost in the middle of this reply ({error.message}); ask again")
            event = sse.BOUNDARY + sse.error_event(describe(lost)[1])
            await send({"type": "http.response.body", "body": event, "more_body": True})
        raise
    await send({"type": "http.response.body", "body": b""})


def _is_event_stream(headers: list[Header]) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)


def _hashed_token(scope: Scope) -> bytes | None:
    """The one token that a call presents, as the coordinator sees it; None for none, and for several that differ."""
    try:
        token = presented_token(Headers(scope=scope))
    except HttpError:
        return None
    return hashlib.sha256(token.encode("latin-1")).digest() if token else None


def _response_headers(headers: list[Header]) -> Iterator[Header]:
    for name, value in headers:
        lower = name.lower()
        if lower not in HOP_BY_HOP and not lower.startswith(b"access-control-"):
            yield lower, value


def _target(scope: Scope) -> str:
    path, query = quote(scope["path"], safe="/!$&'()*+,;=:@"), scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


def _no_coordinator(message: str) -> HttpError:
    return HttpError(NoCoordinator.status, NoCoordinator.code, message, headers={"retry-after": str(RETRY_AFTER_S)})
