"""What every request passes through, as plain ASGI: request id, CORS, errors, HEAD, paths and content types.

Starlette's BaseHTTPMiddleware is avoided: it buffers streams, needs anyio task groups and hides disconnects.
"""

from __future__ import annotations

import logging
import re
import uuid
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response

from swarmnode.api.auth import CALLER_KEY, Caller
from swarmnode.api.errors import HttpError, error_response, internal_error
from swarmnode.api.exchange import ClientLeft, exchange_of
from swarmnode.errors import SwarmError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("swarmnode.api")

REQUEST_ID_KEY = "swarmnode.request_id"
HEAD_KEY = "swarmnode.head"
_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")
_BODY_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_ALLOWED_METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
_ALLOWED_HEADERS = "authorization, content-type, x-api-key, x-request-id"
_HEADER_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")
_CLIENT_HEADER_PREFIXES = ("openai-", "x-stainless-")
PREFLIGHT_MAX_AGE_S = 600
"""Chrome and Safari cap it at ten minutes or less."""


class RequestIdMiddleware:
    """Echo a sane X-Request-Id of the client, else give one; on every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SANE_REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app({**scope, REQUEST_ID_KEY: request_id}, receive, send_with_id)


class CorsMiddleware:
    """Answer OPTIONS before anything else can refuse it; the same headers on every response, errors and SSE too.

    No credentials are ever allowed: API tokens travel in Authorization, which a page must hold itself.
    """

    def __init__(self, app: ASGIApp, allowed_origins: Iterable[str] = ()) -> None:
        self._app = app
        self._allowed = frozenset(allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = self._origin(headers.get("origin"))
        if scope["method"] == "OPTIONS":
            await self._preflight(headers, origin)(scope, receive, send)
            return

        async def send_with_cors(message: Message) -> None:
            if message["type"] == "http.response.start":
                _add_origin(MutableHeaders(scope=message), origin)
            await send(message)

        await self._app(scope, receive, send_with_cors)

    def _origin(self, origin: str | None) -> str | None:
        if "*" in self._allowed:
            return "*"
        return origin if origin in self._allowed else None

    def _preflight(self, headers: Headers, origin: str | None) -> Response:
        response = Response(status_code=204, headers={"allow": _ALLOWED_METHODS})
        _add_origin(response.headers, origin)
        if origin is not None:
            response.headers["access-control-allow-methods"] = _ALLOWED_METHODS
            response.headers["access-control-allow-headers"] = _allowed_headers(headers)
            response.headers["access-control-max-age"] = str(PREFLIGHT_MAX_AGE_S)
        return response


def _add_origin(headers: MutableHeaders, origin: str | None) -> None:
    if origin is None:
        return
    headers["access-control-allow-origin"] = origin
    headers["access-control-expose-headers"] = "x-request-id, retry-after"
    if origin != "*":
        headers.add_vary_header("origin")


def _allowed_headers(headers: Headers) -> str:
    """The fixed list, and those of the OpenAI clients' own families that this preflight asks for."""
    asked = headers.get("access-control-request-headers", "")[:4096].lower().split(",")
    names = [name.strip() for name in asked if name.strip().startswith(_CLIENT_HEADER_PREFIXES)]
    return ", ".join([_ALLOWED_HEADERS, *(name for name in names[:64] if _HEADER_NAME.fullmatch(name))])


class ErrorMiddleware:
    """Turn whatever escapes into one JSON error; a bug is logged with the request id and shown without a traceback."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientLeft:
            log.info("request %s: the client left", scope[REQUEST_ID_KEY])
            return
        except (SwarmError, HttpError) as error:
            response = error_response(error)
        except Exception:
            request_id = scope[REQUEST_ID_KEY]
            log.exception("request %s: %s %.200s failed", request_id, scope["method"], scope["path"])
            response = error_response(internal_error(request_id))
        else:
            return
        if not started:  # else returning without the last body part cuts the connection: an honest end
            await response(scope, receive, send)


class HeadMiddleware:
    """HEAD works wherever GET does: the same headers, no body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET", HEAD_KEY: True}, receive, send_without_body)


class PathMiddleware:
    """`//v1//models/` and `http://host/v1/models` mean `/v1/models`: base URLs with a slash too many are common."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = normalise_path(scope["path"])
            scope = {**scope, "path": path, "raw_path": path.encode("utf-8", "replace")}
        await self._app(scope, receive, send)


def normalise_path(path: str) -> str:
    """One slash between parts, none at the end, no scheme and host."""
    path = re.sub(r"^https?://[^/]*", "", path, flags=re.IGNORECASE)
    return "/" + "/".join(part for part in path.split("/") if part)


class ContentMiddleware:
    """Refuse bodies that are not JSON before they are read.

    Forms and text/plain are what a foreign web page can send without asking (a CORS "simple" request), so they never
    reach a route. A missing content type passes: many scripts forget it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in _BODY_METHODS and _may_speak(scope):
            check_content(Headers(scope=scope))
            exchange = exchange_of(scope)
            if exchange.too_large:
                raise exchange.too_large_error()
        await self._app(scope, receive, send)


def _may_speak(scope: Scope) -> bool:
    """Whether the caller is anybody: who needs a token and has none is told that, whatever the body would have been."""
    caller: Caller | None = scope.get(CALLER_KEY)
    return caller is None or caller.scope is not None


def check_content(headers: Headers) -> None:
    """Raise HttpError 415 unless the body is plain JSON."""
    if len(headers.getlist("content-type")) > 1:
        raise HttpError(415, "unsupported_media_type", "the request carries more than one content type; send one")
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type and media_type != "application/json" and not re.fullmatch(r"application/[\w.-]+\+json", media_type):
        raise HttpError(
            415, "unsupported_media_type", f"content type {media_type[:100]!r} is not allowed; send application/json"
        )
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in {"", "identity"}:
        raise HttpError(
            415, "unsupported_content_encoding", f"content encoding {encoding[:100]!r} is not supported; send it plain"
        )
