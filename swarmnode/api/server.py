"""The API as a server: one `Connection` per client of its port or of a link, and an end that always comes."""

from __future__ import annotations

import logging
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

import trio
from hypercorn.trio.worker_context import WorkerContext

from swarmnode.api.connection import Client, Connection, hypercorn_config, tcp_client
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
    """A server of `app` on a port alone; see `ApiServer.listen`."""
    await ApiServer(app, limits).listen(listeners, tls, task_status=task_status)


class ApiServer:
    """Serves one application on the listeners of a port, and to clients that come over links; all count together."""

    def __init__(self, app: ASGIApp, limits: ApiLimits = DEFAULT_LIMITS) -> None:
        self._app = app
        self._limits = limits
        self._config = hypercorn_config()
        self._context = WorkerContext(None)
        self._connections: set[Connection] = set()
        self._none_left = trio.Event()

    async def listen(
        self,
        listeners: Sequence[trio.SocketListener],
        tls: ssl.SSLContext | None = None,
        *,
        task_status: trio.TaskStatus[list[Address]] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until cancelled, over `tls` where it is given; reports the bound addresses.

        When cancelled it stops accepting, gives running replies `grace_s`, and then cuts every connection. That takes
        no longer even when a client has stopped reading.
        """
        stopping = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run, listeners, tls, stopping)
            task_status.started([listener.socket.getsockname()[:2] for listener in listeners])
            try:
                await trio.sleep_forever()
            finally:
                stopping.set()

    async def _run(
        self, listeners: Sequence[trio.SocketListener], tls: ssl.SSLContext | None, stopping: trio.Event
    ) -> None:
        """Shielded, since it ends by `stopping`: with a deadline from that moment on."""

        async def serve_socket(stream: trio.SocketStream) -> None:
            await self.serve(tcp_client(stream, self._limits.write_s), tls)

        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as clients:
                async with trio.open_nursery() as accepting:
                    accepting.start_soon(
                        partial(trio.serve_listeners, serve_socket, list(listeners), handler_nursery=clients)
                    )
                    await stopping.wait()
                    accepting.cancel_scope.cancel()
                await self._drain(listeners)
                clients.cancel_scope.cancel()

    async def serve(self, client: Client, tls: ssl.SSLContext | None = None) -> None:
        """One client, until it or this server ends."""
        connection = Connection(self._app, self._config, self._context, client, tls, self._limits)
        if not self._make_room(client):
            log.warning("refused a connection%s: too many are open", f" through {client.via}" if client.via else "")
            connection.abort()
            return
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)
            if not self._connections:
                self._none_left.set()

    def _make_room(self, client: Client) -> bool:
        """Whether one more connection may be open, of all that share its bound; each bound has its own idle ones."""
        limits, every = self._limits, tuple(self._connections)
        if client.via is None:
            most = limits.connections - (0 if client.local else limits.local_connections)
            return _has_room(every, most) or self._end_longest_idle(every)
        linked = tuple(one for one in every if one.via is not None)
        theirs = tuple(one for one in linked if one.via == client.via)
        shares = ((theirs, limits.node_connections), (linked, limits.link_connections))
        crowded = next((ones for ones, most in shares if not _has_room(ones, most)), None)
        if crowded is not None:
            return self._end_longest_idle(crowded)
        return _has_room(every, limits.connections - limits.local_connections) or self._end_longest_idle(every)

    def _end_longest_idle(self, among: Sequence[Connection]) -> bool:
        """End the one that has been idle longest, for a new one; False where all are busy."""
        idle = [(since_s, one) for one in among if (since_s := one.idle_since_s) is not None]
        if not idle:
            return False
        _, longest = min(idle, key=itemgetter(0))
        self._connections.discard(longest)  # its task ends soon; its place is free now
        longest.abort()
        return True

    async def _drain(self, listeners: Sequence[trio.SocketListener]) -> None:
        for listener in listeners:
            await listener.aclose()
        await self._context.terminated.set()  # idle connections end now, busy ones after their reply
        with trio.move_on_after(self._limits.grace_s):
            while self._connections:
                self._none_left = trio.Event()
                await self._none_left.wait()
        for connection in self._connections:
            connection.abort()


def _has_room(connections: Sequence[Connection], most: int) -> bool:
    return len(connections) < most
