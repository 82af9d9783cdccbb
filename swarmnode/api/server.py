"""The API port: our own listeners, one `Connection` per client, and an end that always comes."""

from __future__ import annotations

import logging
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

import trio
from hypercorn.trio.worker_context import WorkerContext

from swarmnode.api.connection import Connection, hypercorn_config
from swarmnode.api.limits import DEFAULT_LIMITS, ApiLimits

if TYPE_CHECKING:
    import ssl
    from collections.abc import Sequence

    from starlette.types import ASGIApp

log = logging.getLogger("swarmnode.api.http")

BACKLOG = 128
Address = tuple[str, int]


async def open_api_listeners(host: str, port: int) -> list[trio.SocketListener]:
    """Listening sockets for `host`; port 0 takes a free one. Raises OSError where the address cannot be bound."""
    listeners = await trio.open_tcp_listeners(port, host=host, backlog=BACKLOG)
    if port == 0:
        for extra in listeners[1:]:  # another family would get another port
            await extra.aclose()
        del listeners[1:]
    return listeners


async def serve_api(
    app: ASGIApp,
    listeners: Sequence[trio.SocketListener],
    tls: ssl.SSLContext | None = None,
    *,
    limits: ApiLimits = DEFAULT_LIMITS,
    task_status: trio.TaskStatus[list[Address]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled, over `tls` where it is given; reports the bound addresses.

    When cancelled it stops accepting, gives running replies `grace_s`, and then cuts every connection. That takes no
    longer even when a client has stopped reading.
    """
    server = _Server(app, listeners, tls, limits)
    stopping = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run, stopping)
        task_status.started([listener.socket.getsockname()[:2] for listener in listeners])
        try:
            await trio.sleep_forever()
        finally:
            stopping.set()


class _Server:
    def __init__(
        self, app: ASGIApp, listeners: Sequence[trio.SocketListener], tls: ssl.SSLContext | None, limits: ApiLimits
    ) -> None:
        self._app = app
        self._listeners = list(listeners)
        self._tls = tls
        self._limits = limits
        self._config = hypercorn_config(limits)
        self._context = WorkerContext(None)
        self._connections: set[Connection] = set()
        self._none_left = trio.Event()

    async def run(self, stopping: trio.Event) -> None:
        """Shielded, since it ends by `stopping`: with a deadline from that moment on."""
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as clients:
                async with trio.open_nursery() as accepting:
                    accepting.start_soon(
                        partial(trio.serve_listeners, self._serve, self._listeners, handler_nursery=clients)
                    )
                    await stopping.wait()
                    accepting.cancel_scope.cancel()
                await self._drain()
                clients.cancel_scope.cancel()

    async def _serve(self, stream: trio.SocketStream) -> None:
        connection = Connection(self._app, self._config, self._context, stream, self._tls, self._limits)
        if not self._make_room():
            log.warning("refused a connection: %s are open and busy", self._limits.connections)
            connection.abort()
            return
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)
            if not self._connections:
                self._none_left.set()

    def _make_room(self) -> bool:
        """Whether one more connection may be open; the one that has been idle longest is ended for it."""
        if len(self._connections) < self._limits.connections:
            return True
        idle = [(since_s, one) for one in self._connections if (since_s := one.idle_since_s) is not None]
        if not idle:
            return False
        _, longest = min(idle, key=itemgetter(0))
        self._connections.discard(longest)  # its task ends soon; its place is free now
        longest.abort()
        return True

    async def _drain(self) -> None:
        for listener in self._listeners:
            await listener.aclose()
        await self._context.terminated.set()  # idle connections end now, busy ones after their reply
        with trio.move_on_after(self._limits.grace_s):
            while self._connections:
                self._none_left = trio.Event()
                await self._none_left.wait()
        for connection in self._connections:
            connection.abort()
