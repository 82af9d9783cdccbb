"""Which names and web pages may use the API port: the defence against DNS rebinding and foreign pages."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from swarmnode.api.errors import HttpError
from swarmnode.local_access import LOOPBACK_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import ASGIApp, Receive, Scope, Send

ANY_ORIGIN = "*"
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253})(?::(?P<port>[0-9]{1,5}))?")


@dataclass(frozen=True, slots=True)
class HostRules:
    """The names this API answers to, and the origins of pages that may call it besides its own."""

    names: frozenset[str]
    any_address: bool = False
    """Any IP address is a name: for a port bound to all of them. An address cannot be rebound as a name can."""
    origins: frozenset[str] = frozenset()

    def knows(self, name: str) -> bool:
        return name in self.names or (self.any_address and _is_address(name))

    def allows(self, origin: str, host: str) -> bool:
        """`host` is the request's Host header, already known."""
        if ANY_ORIGIN in self.origins or origin.lower() in self.origins:
            return True
        parts = urlsplit(origin)  # "null" and others have no host
        return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()


def host_rules(bound: str, names: Iterable[str] = (), origins: Iterable[str] = ()) -> HostRules:
    """The rules of an API port bound to `bound`, with the names and origins that the operator allows besides."""
    allowed = {name.lower().rstrip(".") for name in (*names, bound)}
    unspecified = _is_address(bound) and ipaddress.ip_address(bound).is_unspecified
    return HostRules(LOOPBACK_NAMES | allowed, unspecified, frozenset(origin.lower().rstrip("/") for origin in origins))


class HostMiddleware:
    """Refuse a Host that is not ours, and a browser's Origin that is neither ours nor allowed.

    A page whose own name was rebound to this address still sends that name as Host.
    """

    def __init__(self, app: ASGIApp, rules: HostRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            host = self._check_host(headers.getlist("host"))
            for origin in headers.getlist("origin"):
                if not self._rules.allows(origin, host):
                    message = f"pages of {origin[:100]!r} may not call this API; allow them with --api-origin"
                    raise HttpError(403, "origin_not_allowed", message)
        await self._app(scope, receive, send)

    def _check_host(self, given: list[str]) -> str:
        host = given[0] if len(given) == 1 else ""
        found = _HOST.fullmatch(host)
        name = found["name"].strip("[]").lower().rstrip(".") if found else ""
        if not found or not self._rules.knows(name):
            message = f"this API does not answer to the host {host[:100]!r}; allow its name with --api-host"
            raise HttpError(403, "host_not_allowed", message)
        return host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
