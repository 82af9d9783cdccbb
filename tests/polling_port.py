"""An API port with nothing but polled links on it, behind the middlewares that a coordinator's has before them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware import Middleware

from swarmnode.api.exchange import ExchangeMiddleware
from swarmnode.api.hosts import HostMiddleware, host_rules
from swarmnode.api.limits import DEFAULT_LIMITS
from swarmnode.api.middleware import ErrorMiddleware, RequestIdMiddleware
from swarmnode.api.server import open_api_listeners, serve_api
from swarmnode.cluster.node_book import NodeBook
from swarmnode.roles.polling_routes import PollingMiddleware

if TYPE_CHECKING:
    import trio

    from swarmnode.roles.polling import PolledLinks


async def start_polling_port(nursery: trio.Nursery, links: PolledLinks, nodes: NodeBook | None = None) -> str:
    """Its URL. `nodes`: the members; None: nobody is one."""
    app = FastAPI(
        middleware=[
            Middleware(ExchangeMiddleware, limits=DEFAULT_LIMITS),
            Middleware(RequestIdMiddleware),
            Middleware(ErrorMiddleware),
            Middleware(HostMiddleware, rules=host_rules("127.0.0.1")),
            Middleware(PollingMiddleware, links=links, is_member=(nodes or NodeBook()).is_member),
        ]
    )
    listeners = await open_api_listeners("127.0.0.1", 0)
    await nursery.start(links.run)
    await nursery.start(serve_api, app, listeners)
    return f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
