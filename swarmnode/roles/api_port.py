"""The API port of a node, the coordinator's own or one that forwards: listeners, TLS, tokens and allowed names."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from starlette.middleware import Middleware

from swarmnode.api.app import create_app
from swarmnode.api.auth import Credentials
from swarmnode.api.connection import Client
from swarmnode.api.hosts import host_rules
from swarmnode.api.server import ApiServer, open_api_listeners
from swarmnode.errors import Conflict, InvalidRequest
from swarmnode.local_access import forget_local_access, make_local_access, write_local_access
from swarmnode.roles.forwarder import Forwarder
from swarmnode.roles.gateway import Gateway
from swarmnode.roles.http_channel import ChannelStream
from swarmnode.roles.polling_routes import PollingMiddleware
from swarmnode.roles.token_store import TokenStore
from swarmnode.wire.address import Address, is_loopback

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

    import trio
    from starlette.types import Receive, Scope, Send

    from swarmnode.cluster.token_book import TokenBook
    from swarmnode.config import Settings
    from swarmnode.roles.context import NodeContext
    from swarmnode.roles.coordinator import Coordinator
    from swarmnode.roles.polling import PolledLinks
    from swarmnode.roles.swarm_state import SwarmState
    from swarmnode.wire.link import Channel


@dataclass(frozen=True, slots=True)
class ApiOptions:
    """What `swarmnode up` was asked for its API port. `hosts` and `origins` are allowed besides its own."""

    listen: Address
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    certificate: Path | None = None
    key: Path | None = None
    insecure_open: bool = False
    """Let anybody in while there are no tokens, although other machines can reach the port."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise InvalidRequest("--api-cert and --api-key belong together; give both, or neither")

    @property
    def loopback(self) -> bool:
        return is_loopback(self.listen.host)

    @property
    def closed(self) -> bool:
        """Other machines reach it, so nobody comes in without a token."""
        return not self.loopback and not self.insecure_open


def open_tokens(
    options: ApiOptions, settings: Settings, share: Callable[[TokenBook], Awaitable[None]] | None = None
) -> TokenStore:
    """The tokens of this port. One that other machines reach stays closed when its last token is revoked: open mode is
    for loopback. `share`: see `TokenStore`."""
    return TokenStore(settings.api_tokens_file, required=settings.require_api_token or options.closed, share=share)


def check_closed(options: ApiOptions, settings: Settings) -> None:
    """Raises InvalidRequest where a coordinator's port would be open to other machines."""
    if options.closed and not settings.require_api_token and not open_tokens(options, settings).records():
        raise InvalidRequest(
            f"the API at {options.listen} would be open to other machines: there are no API tokens. Start it on "
            "127.0.0.1 and run `swarmnode token-create` first, or start it closed with SWARM_REQUIRE_API_TOKEN=1, "
            "or let everybody in with --insecure-open-api"
        )


def tls_context(options: ApiOptions) -> ssl.SSLContext | None:
    """The TLS of the API port, HTTP/1.1 inside; raises InvalidRequest that names the files."""
    if options.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(options.certificate, options.key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest(
            f"--api-cert {options.certificate} and --api-key {options.key} cannot be used ({error}); both are PEM "
            "files, and the key must be the certificate's"
        ) from error
    return context


class ApiPort:
    """A node's API port, open from its start to its end: it forwards, and while the node coordinates it serves."""

    def __init__(
        self, options: ApiOptions, context: NodeContext, emit: Callable[[str, Mapping[str, object]], None]
    ) -> None:
        self._options = options
        self._settings = context.settings
        self._emit = emit
        self._rules = host_rules(options.listen.host, options.hosts, options.origins)
        self._forwarder = Forwarder(context, closed=options.closed)
        self._forwarding = self._forwarder.app(self._rules)
        self._app = self._forwarding
        self._server = ApiServer(self)
        self.url = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def open(self, nursery: trio.Nursery) -> None:
        """Listen in `nursery`; raises Conflict where the port is taken. What let the command line in before this start
        lets nobody in now: it would be sent to whoever coordinates instead, as a token that nobody knows."""
        forget_local_access(self._settings.data_dir)
        options = self._options
        tls = tls_context(options)
        listeners, self.url = await _open(options)
        await nursery.start(self._server.listen, listeners, tls)

    async def follow(self) -> None:
        """Forward to whoever coordinates, until cancelled."""
        await self._forwarder.follow()

    async def serve(self, coordinator: Coordinator, state: SwarmState, polled: PolledLinks) -> None:
        """From now on calls are this node's own, those too that come over links."""
        options = self._options
        tokens = open_tokens(options, self._settings, state.keep_tokens)
        if len(state.seats.records()) <= 1:  # nobody else ever coordinated this swarm: its list is the one on this disk
            await state.keep_tokens(tokens.book)
        else:
            await tokens.take(state.tokens)
        access = make_local_access(self.url, options.certificate)
        write_local_access(self._settings.data_dir, access)
        tokens.when_revoked(coordinator.token_revoked)
        coordinator.polled = polled
        coordinator.lets_in = lambda: not tokens.enforced()
        coordinator.serve_api = partial(serve_linked, self._server)
        credentials = Credentials(tokens, access.secret)
        backend = Gateway(coordinator)
        ahead = [Middleware(PollingMiddleware, links=polled, is_member=lambda node: state.nodes.is_member(node))]
        self._app = create_app(backend, hosts=self._rules, credentials=credentials, ahead=ahead)
        self.warn(enforced=tokens.enforced())

    def warn(self, *, enforced: bool) -> None:
        """Say what the port lets other machines do or see; `enforced`: nobody comes in without a token."""
        for text in _warnings(self._options, enforced=enforced):
            self._emit("warning", {"text": text})

    def forward(self) -> None:
        """From now on they are another node's."""
        self._app = self._forwarding
        forget_local_access(self._settings.data_dir)


async def _open(options: ApiOptions) -> tuple[list[trio.SocketListener], str]:
    try:
        listeners = await open_api_listeners(options.listen.host, options.listen.port)
    except OSError as error:
        raise Conflict(f"cannot open the API on {options.listen}: {error}; choose another --api-listen") from error
    host, port = listeners[0].socket.getsockname()[:2]
    return listeners, f"{'http' if options.certificate is None else 'https'}://{Address(host, port)}"


async def serve_linked(server: ApiServer, via: str, channel: Channel) -> None:
    """Serve a call that the node `via` forwards, as its certificate and the swarm's document call it."""
    stream = ChannelStream(channel)
    await server.serve(Client(stream, stream.abort, via=via))


def _warnings(options: ApiOptions, *, enforced: bool) -> list[str]:
    if options.loopback:
        return []
    found = []
    if not enforced:
        found.append(f"everybody who reaches {options.listen} may use this swarm (--insecure-open-api)")
    if options.certificate is None:
        found.append(f"prompts, replies and API tokens cross {options.listen} unencrypted; give --api-cert, --api-key")
    return found
