"""Who may call which route: the API token of a request, and the scope that the route it reached declares."""

from __future__ import annotations

import hashlib
import hmac
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotations at run time

from swarmnode.api.errors import HttpError
from swarmnode.api.exchange import VIA_KEY, exchange_of
from swarmnode.cluster.token_book import Scope
from swarmnode.errors import Forbidden, TokenRevoked, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from starlette.types import ASGIApp, Receive, Send
    from starlette.types import Scope as AsgiScope

    from swarmnode.api.exchange import Exchange
    from swarmnode.cluster.token_book import TokenRecord

CALLER_KEY = "swarmnode.caller"
REQUIRE_TOKEN_HEADER = "x-swarm-require-token"
"""Set by a node that forwards what other machines sent it: open mode is for this machine only. A client that sets it
itself only gives rights away."""
_NEEDS = "swarmnode_needs"
_OPEN_SCOPE = Scope.OPERATE
"""What everybody may do while no token is enforced. Tokens and nodes always need an administrator: whoever makes the
first token decides who gets in afterwards."""
_FIX = "send Authorization: Bearer sk-swarm-…; `swarmnode token-create` on the coordinator's machine makes one"

Endpoint = TypeVar("Endpoint", bound="Callable[..., object]")


class Tokens(Protocol):
    """The API tokens, as the coordinator keeps them."""

    def enforced(self) -> bool: ...

    def authenticate(self, token: str) -> TokenRecord | None:
        """The record of a token that is good now; all others take equally long."""

    def records(self) -> Sequence[TokenRecord]: ...

    async def issue(self, label: str, scope: Scope, expires_in_s: float | None) -> tuple[TokenRecord, str]: ...

    async def revoke(self, token_id: str) -> TokenRecord: ...

    def when_revoked(self, watcher: Callable[[str], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class Credentials:
    """What the API checks callers against. `local_secret` is this machine's own command line: always an admin."""

    tokens: Tokens
    local_secret: str


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. `scope` None: nobody that is known, while tokens are enforced.

    `via`: the node whose link it came over, as its certificate and not the request says.
    """

    scope: Scope | None
    presented: bool
    token_id: str | None = None
    via: str | None = None


def needs(scope: Scope) -> Callable[[Endpoint], Endpoint]:
    """Mark a route's endpoint with the scope it needs. A route without a mark needs `admin`."""
    return _mark(scope)


def open_to_all(endpoint: Endpoint) -> Endpoint:
    """Mark a route's endpoint as answering anybody."""
    return _mark(None)(endpoint)


def _mark(scope: Scope | None) -> Callable[[Endpoint], Endpoint]:
    def mark(endpoint: Endpoint) -> Endpoint:
        setattr(endpoint, _NEEDS, scope)
        return endpoint

    return mark


async def authorize(request: Request) -> None:
    """A dependency of every route: FastAPI calls it for the very route that will handle the request.

    So no trick with paths, slashes or Host can make the check look at another route than the one that runs.
    """
    needed: Scope | None = getattr(request.scope["endpoint"], _NEEDS, Scope.ADMIN)
    if needed is None:
        return
    caller: Caller = request.scope[CALLER_KEY]
    if caller.scope is None or (caller.scope < needed and not caller.presented):
        raise _unauthorized(caller, needed)
    if caller.scope < needed:
        raise HttpError(
            Forbidden.status,
            Forbidden.code,
            f"this API token has scope {caller.scope.label}; this call needs {needed.label}",
            headers={"www-authenticate": f'Bearer error="insufficient_scope", scope="{needed.label}"'},
        )


def _unauthorized(caller: Caller, needed: Scope) -> HttpError:
    if caller.presented:
        message = f"the API token is unknown, expired or revoked, and this call needs scope {needed.label}; {_FIX}"
        challenge = 'Bearer realm="swarmnode", error="invalid_token"'
    else:
        message = f"this call needs an API token with scope {needed.label}; {_FIX}"
        challenge = 'Bearer realm="swarmnode"'
    if caller.via is not None and needed > _OPEN_SCOPE:
        message += f". It came through {caller.via}: no machine but the coordinator's own does this without a token"
    return HttpError(Unauthorized.status, Unauthorized.code, message, headers={"www-authenticate": challenge})


class AuthMiddleware:
    """Find out who calls, before the body is read, and cut what a token has running when it is revoked."""

    def __init__(self, app: ASGIApp, credentials: Credentials) -> None:
        self._app = app
        self._tokens = credentials.tokens
        self._local_hash = _hash(credentials.local_secret)
        self._running: dict[str, set[Exchange]] = {}
        self._tokens.when_revoked(self._cut)

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        closed, via = REQUIRE_TOKEN_HEADER in headers, scope["state"].get(VIA_KEY)
        caller = self._caller(presented_token(headers), closed=closed, via=via)
        with self._watched(caller, exchange_of(scope)):
            await self._app({**scope, CALLER_KEY: caller}, receive, send)

    def _caller(self, token: str | None, *, closed: bool, via: str | None) -> Caller:
        """Both lookups always run, so that the time tells nothing about which one failed.

        The command line's secret counts only from this machine: another node has no business with it.
        """
        presented = token is not None
        record = self._tokens.authenticate(token or "")
        local = hmac.compare_digest(self._local_hash, _hash(token or ""))
        if local and via is None:
            return Caller(Scope.ADMIN, presented)
        if record is not None:
            return Caller(record.scope, presented, record.id, via)
        if closed or self._tokens.enforced():
            return Caller(None, presented, via=via)
        return Caller(_OPEN_SCOPE, presented=False, via=via)  # clients send any key where none is needed

    @contextmanager
    def _watched(self, caller: Caller, exchange: Exchange) -> Iterator[None]:
        if caller.token_id is None:
            yield
            return
        running = self._running.setdefault(caller.token_id, set())
        running.add(exchange)
        try:
            yield
        finally:
            running.discard(exchange)
            if not running:
                self._running.pop(caller.token_id, None)

    def _cut(self, token_id: str) -> None:
        for exchange in self._running.get(token_id, ()):
            exchange.cut(TokenRevoked("the API token was revoked while this reply was running"))


def presented_token(headers: Headers) -> str | None:
    """The one token of Authorization and x-api-key; None where there is none.

    Raises HttpError 401 for several that differ: a proxy in between might have checked the other one.
    """
    found = {_bearer(value) for value in headers.getlist("authorization")} | set(headers.getlist("x-api-key"))
    if len(found) > 1:
        raise HttpError(
            Unauthorized.status,
            Unauthorized.code,
            "the request carries more than one API token; send one, in Authorization or in x-api-key",
            headers={"www-authenticate": 'Bearer realm="swarmnode", error="invalid_request"'},
        )
    return found.pop() if found else None


def _bearer(value: str) -> str:
    """The token of a Bearer header; of any other scheme nothing, which no token equals."""
    scheme, _, token = value.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
