"""Polled links over HTTP: nodes behind tunnels and proxies push their bytes and fetch what comes back (W3).

Open to all as far as API tokens go: a request is signed with its node's key, and its body is TLS between the nodes.
Whatever its head says is checked before its body is waited for.
Plain ASGI ahead of the API's routing, which would cost more than all else in the two requests that carry a frame.
"""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from starlette.datastructures import Headers

from swarmnode.api.exchange import exchange_of
from swarmnode.errors import InvalidRequest, Unauthorized
from swarmnode.roles.polling import Asker
from swarmnode.wire.carried import MAX_BUNDLE
from swarmnode.wire.deadlines import PUSH_S
from swarmnode.wire.poll_signature import check
from swarmnode.wire.polled import (
    BUNDLE_HEADER,
    BUNDLES_HEADER,
    MAX_BODY_BYTES,
    NUMBER_LIMIT,
    let_on,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Receive, Scope, Send

    from swarmnode.ids import NodeId
    from swarmnode.roles.polling import PolledLinks
    from swarmnode.wire.poll_signature import Signed

PATH = re.compile(r"/api/v1/infer/(responses|requests)/([^/]+)")
METHODS = {"responses": "POST", "requests": "GET"}
DIGITS = re.compile(r"[0-9]{1,16}")
ANSWERED = ((BUNDLES_HEADER.encode(), b"1"), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no"))
"""On every answer: that bundles are understood, and that no proxy may keep it."""


class PollingMiddleware:
    """`POST /api/v1/infer/responses/{link}?n=…`, `GET /api/v1/infer/requests/{peer}?link=…&n=…`; the rest goes on."""

    def __init__(self, app: ASGIApp, links: PolledLinks, is_member: Callable[[NodeId], bool]) -> None:
        """`is_member` raises NodeRemoved for a node that was removed."""
        self._app = app
        self._links = links
        self._is_member = is_member

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if found is None or scope["method"] != METHODS[found[1]]:
            await self._app(scope, receive, send)
        elif found[1] == "responses":
            await self._push(found[2], scope, send)
        else:
            await self._pop(found[2], scope, send)

    async def _push(self, link: str, scope: Scope, send: Send) -> None:
        exchange, headers = exchange_of(scope), Headers(scope=scope)
        signed = _signed(scope, headers)
        source = scope["client"][0] if scope["client"] else ""
        asker = Asker(signed.node, self._is_member(signed.node), source)
        number, frames = _number(_query(scope), "n", NUMBER_LIMIT), _frames(headers)
        self._links.expect_push(asker, link, number)
        exchange.narrow(MAX_BODY_BYTES, PUSH_S)
        body = await exchange.body()
        signed.check_body(body)
        await self._links.push(asker, link, number, frames, body)
        await let_on()
        await _answer(send, 204)

    async def _pop(self, peer: str, scope: Scope, send: Send) -> None:
        node = _signed(scope, Headers(scope=scope)).node
        if node != peer:
            raise Unauthorized("the request is signed by another node than it asks for")
        self._is_member(node)
        query = _query(scope)
        number = _number(query, "n", NUMBER_LIMIT)
        with exchange_of(scope).generation():  # whoever hung up takes nothing out of the queue
            taken = await self._links.pop(node, query.get("link", ""), number)
        if taken is None:
            await _answer(send, 204)
        else:
            await _answer(send, 200, *taken)


async def _answer(send: Send, status: int, body: bytes = b"", frames: int | None = None) -> None:
    headers = list(ANSWERED)
    if frames is not None:
        headers.append((BUNDLE_HEADER.encode(), str(frames).encode()))
        headers += ((b"content-type", b"application/octet-stream"), (b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _signed(scope: Scope, headers: Headers) -> Signed:
    target = f"{scope['path']}?{scope['query_string'].decode('latin-1')}"
    return check(headers, scope["method"], target, time.time())


def _query(scope: Scope) -> dict[str, str]:
    """The last value of each name."""
    return {name: values[-1] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}


def _number(given: dict[str, str], name: str, limit: int) -> int:
    text = given.get(name, "")
    if not DIGITS.fullmatch(text) or int(text) >= limit:
        raise InvalidRequest(f"{name} is a number below {limit}, not {text[:20]!r}")
    return int(text)


def _frames(headers: Headers) -> int:
    text = headers.get(BUNDLE_HEADER, "1")
    if not DIGITS.fullmatch(text) or int(text) > MAX_BUNDLE:
        raise InvalidRequest(f"{BUNDLE_HEADER} is a number of frames, at most {MAX_BUNDLE}, not {text[:20]!r}")
    return int(text)
