"""One HTTP exchange's client side: its body under a cap, whether it has left, and a polite end after a refusal.

Outermost middleware. Its reader runs as long as the exchange: hypercorn's connection stops reading, and so never
notices that a client left, when an application does not receive.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import trio

from swarmnode.api.errors import HttpError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from swarmnode.api.limits import ApiLimits
    from swarmnode.errors import SwarmError

SCOPE_KEY = "swarmnode.exchange"
ABORT_KEY = "swarmnode.abort"
"""In the connection's state: closes it at once."""
VIA_KEY = "swarmnode.via"
"""In the connection's state: the name of the node whose link it came over, None for a client of this port itself."""


class ClientLeft(Exception):
    """The client closed its side before the request was complete; nobody reads an answer."""


class Exchange:
    """What handlers may ask about the client of one request."""

    def __init__(self, scope: Scope, receive: Receive, limits: ApiLimits, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._abort: Callable[[], None] = scope["state"][ABORT_KEY]
        self._receive = receive
        self._limits = limits
        self._body = bytearray()
        self._progress = trio.Event()
        self._delivered = False
        self._generations: set[trio.CancelScope] = set()
        self._cut_by: SwarmError | None = None
        self.left = trio.Event()
        self.complete = trio.Event()
        self._declared_bytes = _declared_length(scope)
        self.too_large = self._declared_bytes > limits.body_bytes

    def narrow(self, body_bytes: int, body_total_s: float) -> None:
        """Bound this body more closely than the port does. Raises HttpError 413 where it is known to be larger."""
        self._limits = replace(self._limits, body_bytes=body_bytes, body_total_s=body_total_s)
        if max(self._declared_bytes, len(self._body)) > body_bytes:
            self.too_large = True
            raise self.too_large_error()

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Work for this client alone: cancelled as soon as it leaves or is cut.

        Then raises ClientLeft, or the error it was cut by.
        """
        if self.left.is_set() or self._cut_by is not None:
            raise self._cut_by or ClientLeft
        with trio.CancelScope() as scope:
            self._generations.add(scope)
            try:
                yield
            finally:
                self._generations.discard(scope)
        if scope.cancelled_caught:
            raise self._cut_by or ClientLeft

    def cut(self, error: SwarmError) -> None:
        """End this exchange's work although the client is still there; `error` tells it why.

        A client that does not read the reason loses its connection.
        """
        self._cut_by = error
        self._cancel_generations()
        self._nursery.start_soon(self._abort_soon)

    async def _abort_soon(self) -> None:
        await trio.sleep(self._limits.cut_s)
        self._abort()

    def _cancel_generations(self) -> None:
        for scope in self._generations:
            scope.cancel()

    async def body(self) -> bytes:
        """The whole body; raises HttpError 413 or 408, or ClientLeft."""
        with trio.move_on_after(self._limits.body_total_s):
            while not self.complete.is_set() and not self.left.is_set() and not self.too_large:
                self._progress = trio.Event()
                with trio.move_on_after(self._limits.body_idle_s) as idle:
                    await self._progress.wait()
                if idle.cancelled_caught:
                    break
        if self.too_large:
            raise self.too_large_error()
        if self.complete.is_set():
            return bytes(self._body)
        if self.left.is_set():
            raise ClientLeft
        raise HttpError(408, "request_timeout", "the request body came too slowly", headers={"connection": "close"})

    def too_large_error(self) -> HttpError:
        limit = self._limits.body_bytes
        return HttpError(413, "request_too_large", f"the request body is larger than the limit of {limit} bytes")

    async def read(self) -> None:
        """Take all that the connection has for this exchange, until the client or the exchange ends."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                break
            self._take(message)
        self.left.set()
        self._progress.set()
        self._cancel_generations()

    def _take(self, message: Message) -> None:
        data = message.get("body", b"")
        if len(self._body) + len(data) > self._limits.body_bytes:
            self.too_large = True
        if self.too_large:
            self._body.clear()  # nobody will ask for it; keep reading, so that the connection moves on
        else:
            self._body += data
        if not message.get("more_body", False):
            self.complete.set()
        self._progress.set()

    async def receive(self) -> Message:
        """ASGI receive for whatever sits inside: the body once, then the disconnect."""
        if not self._delivered:
            self._delivered = True
            return {"type": "http.request", "body": await self.body(), "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def linger(self) -> None:
        """Wait a little for the rest of the body, so that closing the socket does not destroy the answer in flight."""
        with trio.move_on_after(self._limits.linger_s):
            while not self.complete.is_set() and not self.left.is_set():
                self._progress = trio.Event()
                await self._progress.wait()


def exchange_of(scope: Scope) -> Exchange:
    return cast("Exchange", scope[SCOPE_KEY])


def _declared_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name.lower() == b"content-length":
            return int(value)  # h11 has checked that it is a number
    return 0


class ExchangeMiddleware:
    """Give every request an `Exchange`, and run its reader beside the application."""

    def __init__(self, app: ASGIApp, limits: ApiLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        failure: list[Exception] = []
        async with trio.open_nursery() as nursery:
            exchange = Exchange(scope, receive, self._limits, nursery)
            nursery.start_soon(exchange.read)
            try:
                await self._app({**scope, SCOPE_KEY: exchange}, exchange.receive, _lingering(exchange, send))
            except Exception as error:
                failure.append(error)  # carried out as itself, not as a group
            nursery.cancel_scope.cancel()
        if failure:
            raise failure[0]


def _lingering(exchange: Exchange, send: Send) -> Any:
    async def lingering_send(message: Message) -> None:
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if last and not exchange.complete.is_set() and not exchange.left.is_set():
            await send({**message, "more_body": True})
            await exchange.linger()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await send(message)

    return lingering_send
