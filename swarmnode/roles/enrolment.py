"""How certificates come to nodes: join by token, renewal before the end, removal. Both sides of it."""

from __future__ import annotations

import logging
import secrets
import time
from typing import TYPE_CHECKING, Any

import trio

from swarmnode.cluster.join_book import AttemptBudget
from swarmnode.cluster.join_token import ID_BYTES, SECRET_BYTES, JoinToken, format_join_token
from swarmnode.errors import JoinRefused, LinkBroken, ProtocolError, SwarmError
from swarmnode.ids import NodeId, parse_node_name
from swarmnode.wire import certificates as certs
from swarmnode.wire.address import Address, parse_address
from swarmnode.wire.bodies import pack_body, unpack_body
from swarmnode.wire.deadlines import JOIN_S
from swarmnode.wire.direct import connect, dial_over
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import JOIN_KIND
from swarmnode.wire.tls import secure_unverified

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cryptography import x509

    from swarmnode.cluster.join_book import JoinBook
    from swarmnode.cluster.node_book import NodeBook, NodeRecord
    from swarmnode.roles.identity import NodeIdentity, SwarmAuthority
    from swarmnode.roles.swarm_state import SwarmState
    from swarmnode.wire.link import Channel, Hello, Identity
    from swarmnode.wire.tls import SwarmTls

PEER_ROLES = ("peer",)
"""What a token gives; nobody becomes a coordinator by joining."""
RENEWAL_CHECK_S = 3600.0
"""A laptop's clock jumps over sleep, so the certificate is looked at every hour rather than slept up to."""

_log = logging.getLogger(__name__)


class Enrolment:
    """The coordinator's side: makes tokens, serves `join` channels, renews, removes. `clock` gives Unix seconds."""

    def __init__(
        self,
        authority: SwarmAuthority,
        state: SwarmState,
        tls: SwarmTls,
        addresses: Sequence[str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._authority = authority
        self._state = state
        self._tls = tls
        self._addresses = tuple(addresses)
        self._clock = clock
        self._budget = AttemptBudget()
        tls.revoke(state.nodes.revoked())

    @property
    def nodes(self) -> Sequence[NodeRecord]:
        return self._state.nodes.records()

    def revoked(self) -> Frame:
        """The list of removed nodes, for a peer's control channel."""
        return Frame("revoked", {}, pack_body({"nodes": sorted(self._state.nodes.revoked())}))

    async def new_token(self, ttl_s: float, uses: int) -> tuple[str, float]:
        """A join token's line and when it ends; the secret is in no other place."""
        token_id, secret = secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES)
        ca_hash = certs.fingerprint(self._authority.certificate)
        line = format_join_token(JoinToken(ca_hash, self._addresses, token_id, secret))
        now = self._clock()
        record = await self._state.change(lambda joins, _: joins.add(token_id, secret, ttl_s=ttl_s, uses=uses, now=now))
        return line, record.expires_s

    async def serve(self, hello: Hello, channel: Channel) -> None:
        """One `join` channel: the CA for everybody, a certificate for who knows a secret."""
        self._budget.check(channel.source, self._clock())
        await channel.send(Frame("ca", {}, pack_body({"ca": certs.to_der(self._authority.certificate)})))
        asked = await _next(channel, "join")
        try:
            token_id, secret, request = (_bytes(asked, name) for name in ("id", "secret", "request"))
            certificate = await self._admit(token_id, secret, request, _checked_name(hello.identity.name))
        except SwarmError as error:
            self._budget.failed(channel.source, self._clock())
            _log.warning("a node at %s may not join: %s", channel.source or "?", error)
            raise
        await channel.send(self._issued(certificate))

    async def renew(self, node: NodeId, name: str, body: dict[str, Any]) -> Frame:
        """The next certificate of a node that has one; its key stays, and so do its roles."""
        request = _bytes(body, "request")
        if certs.node_id(certs.read_request(request)) != node:
            raise ProtocolError(f"node {node:.8} asked for the certificate of another")
        return self._issued(await self._state.change(lambda _, nodes: self._certify(nodes, request, name)))

    async def remove(self, name: str) -> NodeRecord:
        """Take a node out for good: its links here are cut at once, and no certificate of its key is good any more."""
        now = self._clock()
        record = await self._state.change(lambda _, nodes: nodes.remove(name, now))
        self._tls.revoke(self._state.nodes.revoked())
        return record

    async def note_name(self, node: NodeId, name: str) -> None:
        """A node goes by another name since it joined."""
        known = next((record for record in self.nodes if record.node == node), None)
        if known is not None and known.name != name:
            await self._state.change(lambda _, nodes: nodes.renamed(node, name))

    async def _admit(self, token_id: bytes, secret: bytes, request: bytes, name: str) -> x509.Certificate:
        """The secret first: who does not know one learns nothing about names and nodes, and costs no signature."""
        now = self._clock()

        def edit(joins: JoinBook, nodes: NodeBook) -> x509.Certificate:
            joins.redeem(token_id, secret, now)
            return self._certify(nodes, request, name)

        return await self._state.change(edit)

    def _certify(self, nodes: NodeBook, request: bytes, name: str) -> x509.Certificate:
        nodes.check(certs.node_id(certs.read_request(request)), name)
        certificate = self._authority.issue(request, PEER_ROLES, self._clock())
        about = certs.read_certificate(certificate)
        nodes.issued(about.node, name, about.serial, about.ends_s)
        return certificate

    def _issued(self, certificate: x509.Certificate) -> Frame:
        body = {"certificate": certs.to_der(certificate), "coordinators": list(self._addresses)}
        return Frame("issued", {}, pack_body(body))


async def join_swarm(
    token: JoinToken, identity: NodeIdentity, about: Identity, clock: Callable[[], float] = time.time
) -> None:
    """Become a member of the token's swarm: its addresses are tried in order.

    Raises JoinRefused, Conflict (the node belongs to another swarm) or LinkBroken with what each address said.
    """
    identity.check_swarm(token.ca_hash)
    reasons = []
    for text in token.addresses:
        try:
            with trio.fail_after(JOIN_S):
                await _join_at(parse_address(text), token, identity, about, clock)
            return
        except trio.TooSlowError:
            reasons.append(f"{text}: no answer within {JOIN_S:g} s")
        except (LinkBroken, ProtocolError) as error:
            reasons.append(f"{text}: {error.message}")
    raise LinkBroken("cannot join the swarm; " + "; ".join(reasons))


async def _join_at(
    address: Address, token: JoinToken, identity: NodeIdentity, about: Identity, clock: Callable[[], float]
) -> None:
    stream, listener = await secure_unverified(await connect(address))
    async with dial_over(stream, JOIN_KIND, about) as channel:
        ca = certs.load_certificate(_bytes(await _next(channel, "ca"), "ca"))
        _check_listener(ca, listener, token, clock())
        body = {"id": token.id, "secret": token.secret, "request": certs.new_request(identity.key)}
        await channel.send(Frame("join", {}, pack_body(body)))
        certificate, coordinators = _read_issued(await _next(channel, "issued"), ca, clock())
    identity.join(ca, certificate, coordinators or (address,))


def _check_listener(ca: x509.Certificate, listener: bytes, token: JoinToken, now: float) -> None:
    """Before the secret is sent: the CA is the token's, and whoever holds this connection is its coordinator."""
    if certs.fingerprint(ca) != token.ca_hash:
        raise JoinRefused("the machine that answered belongs to another swarm than the token; was the token's copied?")
    answered = certs.check_issued(certs.load_certificate(listener), ca, now)
    if "coordinator" not in answered.roles:
        raise JoinRefused("the machine that answered is not a coordinator of the token's swarm")


class Renewal:
    """A peer's side of keeping its certificate fresh. `ask` sends a frame to the coordinator."""

    def __init__(self, identity: NodeIdentity, tls: SwarmTls, clock: Callable[[], float] = time.time) -> None:
        self._identity = identity
        self._tls = tls
        self._clock = clock

    async def run(self, ask: Callable[[Frame], None]) -> None:
        """Ask whenever two thirds of the certificate's life have passed, and again every hour until it came."""
        while True:
            member = self._identity.membership()
            if member is not None:
                wait_s = certs.renewal_s(member.about) - self._clock()
                if wait_s <= 0:
                    ask(Frame("renew", {}, pack_body({"request": certs.new_request(self._identity.key)})))
                    wait_s = RENEWAL_CHECK_S
            await trio.sleep(min(wait_s if member is not None else RENEWAL_CHECK_S, RENEWAL_CHECK_S))

    def take(self, frame: Frame) -> None:
        """The certificate that was asked for: kept, and used from the next connection on. Raises ProtocolError."""
        member = self._identity.membership()
        if member is None:
            raise ProtocolError("a certificate came to a node that never joined")
        certificate, coordinators = _read_issued(unpack_body(frame.body), member.ca, self._clock())
        self._identity.renew(certificate)
        if coordinators:
            self._identity.remember(coordinators)
        self._tls.use(self._identity.files)


def _read_issued(
    body: dict[str, Any], ca: x509.Certificate, now: float
) -> tuple[x509.Certificate, tuple[Address, ...]]:
    certificate = certs.load_certificate(_bytes(body, "certificate"))
    certs.check_issued(certificate, ca, now)
    coordinators = body.get("coordinators", [])
    if not isinstance(coordinators, list):
        raise ProtocolError("the coordinators of an issued certificate are not a list")
    return certificate, tuple(parse_address(str(address)) for address in coordinators)


async def _next(channel: Channel, kind: str) -> dict[str, Any]:
    """The body of the next frame, which must be of `kind`."""
    try:
        frame = await channel.receive()
    except trio.EndOfChannel:
        raise LinkBroken(f"the other end hung up before {kind}") from None
    if frame.kind != kind:
        raise ProtocolError(f"a join channel brought {frame.kind} where {kind} was expected")
    return unpack_body(frame.body)


def _bytes(body: dict[str, Any], name: str) -> bytes:
    value = body.get(name)
    if not isinstance(value, bytes) or len(value) > certs.MAX_CERTIFICATE_BYTES:
        raise ProtocolError(f"{name} is not bytes, at most {certs.MAX_CERTIFICATE_BYTES}")
    return value


def _checked_name(name: str) -> str:
    try:
        return parse_node_name(name)
    except ValueError as error:
        raise ProtocolError(str(error)) from None
