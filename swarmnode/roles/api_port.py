"""The API port of a node, the coordinator's own or one that forwards: listeners, TLS, tokens and allowed names."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmnode.api.app import create_app
from swarmnode.api.auth import Credentials
from swarmnode.api.connection import Client
from swarmnode.api.hosts import host_rules
from swarmnode.api.server import ApiServer, open_api_listeners, serve_api
from swarmnode.errors import Conflict, InvalidRequest
from swarmnode.local_access import make_local_access, write_local_access
from swarmnode.roles.forwarder import Forwarder
from swarmnode.roles.http_channel import ChannelStream
from swarmnode.roles.polling_routes import polling_router
from swarmnode.roles.token_store import TokenStore
from swarmnode.wire.address import Address, is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import trio

    from swarmnode.api.backend import Backend
    from swarmnode.config import Settings
    from swarmnode.roles.context import NodeContext
    from swarmnode.roles.polling import PolledLinks
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


def open_tokens(options: ApiOptions, settings: Settings) -> TokenStore:
    """The tokens of this port; raises InvalidRequest where it would be open to other machines.

    Such a port stays closed when its last token is revoked: open mode is for loopback.
    """
    reachable = not options.loopback and not options.insecure_open
    store = TokenStore(settings.api_tokens_file, required=settings.require_api_token or reachable)
    if reachable and not settings.require_api_token and not store.records():
        raise InvalidRequest(
            f"the API at {options.listen} would be open to other machines: there are no API tokens. Start it on "
            "127.0.0.1 and run `swarmnode token-create` first, or start it closed with SWARM_REQUIRE_API_TOKEN=1, "
            "or let everybody in with --insecure-open-api"
        )
    return store


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


async def start_api_port(
    options: ApiOptions,
    backend: Backend,
    settings: Settings,
    polled: PolledLinks,
    emit: Callable[[str, Mapping[str, object]], None],
    nursery: trio.Nursery,
) -> tuple[ApiServer, str]:
    """Serve the coordinator's API in `nursery`; returns the server, for calls that come over links, and its URL."""
    tokens, tls = open_tokens(options, settings), tls_context(options)
    listeners, url = await _open(options)
    access = make_local_access(url, options.certificate)
    write_local_access(settings.data_dir, access)
    rules = host_rules(options.listen.host, options.hosts, options.origins)
    credentials = Credentials(tokens, access.secret)
    server = ApiServer(create_app(backend, hosts=rules, credentials=credentials, also=[polling_router(polled)]))
    await nursery.start(server.listen, listeners, tls)
    for text in _warnings(options, enforced=tokens.enforced()):
        emit("warning", {"text": text})
    return server, url


async def start_forwarder_port(
    options: ApiOptions, context: NodeContext, nursery: trio.Nursery
) -> tuple[Forwarder, str]:
    """Serve the API of a node that forwards in `nursery`; returns what follows its coordinator, and the URL."""
    closed = not options.loopback and not options.insecure_open
    forwarder, tls = Forwarder(context, closed=closed), tls_context(options)
    listeners, url = await _open(options)
    rules = host_rules(options.listen.host, options.hosts, options.origins)
    await nursery.start(serve_api, forwarder.app(rules), listeners, tls)
    for text in _warnings(options, enforced=closed):
        context.emit("warning", {"text": text})
    return forwarder, url


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
