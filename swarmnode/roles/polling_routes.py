"""Polled links over HTTP: nodes behind tunnels and proxies push their bytes and fetch what comes back (W3).

Open to all as far as API tokens go: a request is signed with its node's key, and its body is TLS between the nodes.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations at run time
from starlette.responses import Response

from swarmnode.api.auth import open_to_all
from swarmnode.api.exchange import exchange_of
from swarmnode.errors import InvalidRequest, Unauthorized
from swarmnode.wire.poll_signature import check
from swarmnode.wire.polled import BUNDLE_HEADER, BUNDLES_HEADER, MAX_BODY_BYTES, MAX_BUNDLE_FRAMES, NUMBER_LIMIT

if TYPE_CHECKING:
    from swarmnode.ids import NodeId
    from swarmnode.roles.polling import PolledLinks

Number = Annotated[int, Query(ge=0, lt=NUMBER_LIMIT)]
ANSWERED = {BUNDLES_HEADER: "1", "cache-control": "no-store", "x-accel-buffering": "no"}
"""On every answer: that bundles are understood, and that no proxy may keep it."""


def polling_router(links: PolledLinks) -> APIRouter:
    """`POST /api/v1/infer/responses/{link}` and `GET /api/v1/infer/requests/{peer}?link=…`."""
    router = APIRouter(prefix="/api/v1/infer")

    @router.post("/responses/{link}", response_model=None)
    @open_to_all
    async def push(request: Request, link: str, n: Number) -> Response:
        body = await exchange_of(request.scope).body()
        node = _signer(request, body)
        if len(body) > MAX_BODY_BYTES:
            raise InvalidRequest(f"a push has {len(body)} bytes; {MAX_BODY_BYTES} are allowed")
        source = request.client.host if request.client else ""
        await links.push(node, link, n, _frames(request), body, source)
        return Response(status_code=204, headers=ANSWERED)

    @router.get("/requests/{peer}", response_model=None)
    @open_to_all
    async def pop(request: Request, peer: str, link: str, n: Number) -> Response:
        node = _signer(request, b"")
        if node != peer:
            raise Unauthorized("the request is signed by another node than it asks for")
        with exchange_of(request.scope).generation():  # whoever hung up takes nothing out of the queue
            taken = await links.pop(node, link, n)
        if taken is None:
            return Response(status_code=204, headers=ANSWERED)
        data, frames = taken
        headers = {**ANSWERED, BUNDLE_HEADER: str(frames)}
        return Response(data, media_type="application/octet-stream", headers=headers)

    return router


def _signer(request: Request, body: bytes) -> NodeId:
    target = f"{request.url.path}?{request.url.query}"
    return check(request.headers, request.method, target, body, time.time())


def _frames(request: Request) -> int:
    text = request.headers.get(BUNDLE_HEADER, "1")
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise InvalidRequest(f"{BUNDLE_HEADER} is a number of frames, at most {MAX_BUNDLE_FRAMES}, not {text[:20]!r}")
    return int(text)
