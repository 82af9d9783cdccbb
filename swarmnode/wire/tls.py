"""TLS around the swarm's connections: 1.3 only, a certificate on both sides, and who may go on after the handshake."""

from __future__ import annotations

import ssl
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from swarmnode.errors import LinkBroken, ProtocolError
from swarmnode.wire.certificates import NodeCertificate, load_certificate, read_certificate
from swarmnode.wire.deadlines import TLS_S
from swarmnode.wire.tls_stream import TlsStream

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from swarmnode.ids import NodeId

ALPN = "swarmnode/1"


@dataclass(frozen=True, slots=True)
class CredentialFiles:
    """PEM files: this node's key, its certificate, and the CA that both ends must come from."""

    key: Path
    certificate: Path
    ca: Path


@dataclass(frozen=True, slots=True)
class Secured:
    """A stream after its handshake; `peer` is None for one that presented no certificate."""

    stream: trio.abc.Stream
    peer: NodeCertificate | None


class SwarmTls:
    """This node's credentials, the nodes that were removed, and the live connections that a removal cuts.

    With `enrolment` a client may come without a certificate; the listener then gives it nothing but the `join` channel.
    """

    def __init__(self, files: CredentialFiles, *, enrolment: bool = False) -> None:
        self._enrolment = enrolment
        self._revoked: frozenset[NodeId] = frozenset()
        self._live: dict[NodeId, set[trio.CancelScope]] = {}
        self.use(files)

    def use(self, files: CredentialFiles, *, enrolment: bool | None = None) -> None:
        """Take these files for every new connection (after a renewal); those that are up go on. `enrolment`: as in the
        constructor, from now on."""
        self._enrolment = self._enrolment if enrolment is None else enrolment
        self._client = _client_context(files)
        self._server = _server_context(files, enrolment=self._enrolment)

    async def secure_dialed(self, stream: trio.abc.Stream) -> Secured:
        """The dialer's handshake. It proves who answered; whether *we* are welcome only shows at the first read."""
        secured = await _handshake(TlsStream(stream, self._client))
        if secured.peer is None or self.is_revoked(secured.peer.node):
            await trio.aclose_forcefully(secured.stream)
            raise ProtocolError("the listener presented no certificate, or that of a node that was removed")
        return secured

    async def secure_accepted(self, stream: trio.abc.Stream) -> Secured:
        """The listener's handshake. A revoked peer is let through, so that it can be told; see `is_revoked`."""
        return await _handshake(TlsStream(stream, self._server, server_side=True))

    def is_revoked(self, node: NodeId) -> bool:
        return node in self._revoked

    def revoke(self, nodes: frozenset[NodeId]) -> None:
        """These nodes are out: their live connections end now, new ones are refused."""
        self._revoked = nodes
        for node in nodes:
            for scope in self._live.get(node, ()):
                scope.cancel()

    @contextmanager
    def until_revoked(self, node: NodeId) -> Iterator[None]:
        """The block is cancelled when `node` is revoked."""
        scopes = self._live.setdefault(node, set())
        with trio.CancelScope() as scope:
            scopes.add(scope)
            if self.is_revoked(node):  # it was removed between its handshake and this
                scope.cancel()
            try:
                yield
            finally:
                scopes.discard(scope)
                if not scopes:
                    self._live.pop(node, None)


async def secure_unverified(stream: trio.abc.Stream) -> tuple[TlsStream, bytes]:
    """A joiner's handshake: it has nothing to verify with yet, so the listener's certificate comes back in DER.

    The handshake still proves that the listener holds that certificate's key.
    """
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    secured = TlsStream(stream, context)
    return secured, await _shake(secured) or b""


async def _handshake(stream: TlsStream) -> Secured:
    der = await _shake(stream)
    try:
        return Secured(stream, read_certificate(load_certificate(der)) if der else None)
    except ProtocolError:
        await trio.aclose_forcefully(stream)
        raise


async def _shake(stream: TlsStream) -> bytes | None:
    """Handshake within TLS_S; returns the other end's certificate. Raises LinkBroken, with the stream closed."""
    try:
        with trio.fail_after(TLS_S):
            await stream.do_handshake()
        if stream.selected_alpn_protocol() != ALPN:
            raise LinkBroken(f"the other end does not speak {ALPN}; is it a swarm port?")
        der = stream.peer_certificate()
    except BaseException as error:
        await trio.aclose_forcefully(stream)
        if isinstance(error, trio.TooSlowError):
            raise LinkBroken(f"no TLS handshake within {TLS_S:g} s") from None
        if isinstance(error, trio.BrokenResourceError | trio.ClosedResourceError | ssl.CertificateError):
            raise LinkBroken(f"the TLS handshake failed: {_why(error)}") from error
        raise
    return der


def _why(error: BaseException) -> str:
    """What OpenSSL says of the other end's certificate, where that was it."""
    cause = error.__cause__ or error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"the other end's certificate: {cause.verify_message}; does it belong to this swarm?"
    return str(cause) or type(cause).__name__


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([ALPN])
    return context


def _client_context(files: CredentialFiles) -> ssl.SSLContext:
    """Node ids take the place of host names, so those are not checked here but against HELLO and WELCOME."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    _load(context, files)
    return context


def _server_context(files: CredentialFiles, *, enrolment: bool) -> ssl.SSLContext:
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_OPTIONAL if enrolment else ssl.CERT_REQUIRED
    context.num_tickets = 0  # no resumption: every connection shows its certificate
    _load(context, files)
    return context


def _load(context: ssl.SSLContext, files: CredentialFiles) -> None:
    context.load_cert_chain(files.certificate, files.key)
    context.load_verify_locations(cafile=files.ca)
