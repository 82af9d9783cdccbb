"""The coordinator's side of certificates: join tokens, who may join, renewal, removal."""

from __future__ import annotations

import logging
import math
import secrets
import time
from typing import TYPE_CHECKING, Any

import trio

from swarmnode.cluster.join_book import AttemptBudget
from swarmnode.cluster.join_token import ID_BYTES, SECRET_BYTES, JoinToken, format_join_token
from swarmnode.errors import Conflict, LinkBroken, NoSpace, ProtocolError, SwarmError
from swarmnode.roles.identity import MAX_ADDRESSES
from swarmnode.wire import certificates as certs
from swarmnode.wire.address import home_of, parse_place
from swarmnode.wire.bodies import pack_body, unpack_body
from swarmnode.wire.frames import Frame

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cryptography import x509

    from swarmnode.cluster.join_book import JoinBook, JoinRecord
    from swarmnode.cluster.node_book import NodeBook, NodeRecord
    from swarmnode.cluster.voter_book import Seated, VoterBook
    from swarmnode.ids import NodeId
    from swarmnode.roles.identity import NodeIdentity, SwarmAuthority
    from swarmnode.roles.swarm_state import SwarmState
    from swarmnode.wire.address import Place
    from swarmnode.wire.certificates import NodeCertificate
    from swarmnode.wire.link import Channel, Hello
    from swarmnode.wire.tls import SwarmTls

PEER_ROLES = ("peer",)
"""What a token gives; nobody becomes a coordinator by joining."""
VOTER_ROLES = ("coordinator", "peer")
"""What a node needs that may coordinate: while it does not, it dials whoever does as a peer would."""
RENEWAL_CHECK_S = 3600.0
"""A laptop's clock jumps over sleep, so the certificate is looked at every hour rather than slept up to."""
DAY_S = 86_400.0
CLOCK_SPREAD_S = DAY_S
"""A node asks by its own clock."""
RENEWAL_PAUSE_S = 600.0
"""Between two certificates of one node; less than the hour after which it asks again."""

_log = logging.getLogger(__name__)


class Enrolment:
    """The coordinator's side: makes tokens, serves `join` channels, renews, removes. `clock` gives Unix seconds, for
    dates alone: intervals are of trio's clock, which nobody sets back."""

    def __init__(
        self,
        authority: SwarmAuthority,
        state: SwarmState,
        tls: SwarmTls,
        addresses: Sequence[str],
        clock: Callable[[], float] = time.time,
        keeper: NodeRecord | None = None,
    ) -> None:
        """`keeper`: the coordinator itself, whose name nobody else may take."""
        self.authority = authority
        self.keeper = keeper
        self._state = state
        self._tls = tls
        self._own_places = tuple(addresses)
        self._clock = clock
        self._budget = AttemptBudget()
        self._renewed_s: dict[NodeId, float] = {}
        tls.revoke(state.nodes.revoked())

    @property
    def now(self) -> float:
        return self._clock()

    @property
    def places(self) -> tuple[str, ...]:
        """Where coordinators answer: this one first."""
        others = [place for seat in self._state.seats.records() for place in seat.places]
        return tuple(dict.fromkeys([*self._own_places, *others]))[:MAX_ADDRESSES]

    @property
    def nodes(self) -> Sequence[NodeRecord]:
        return self._state.nodes.records()

    @property
    def founders(self) -> Sequence[Seated]:
        """Who has a seat and never joined: the swarm's first coordinator, which certified itself."""
        return _founders(self._state.seats, self._state.nodes)

    def removed(self, node: NodeId) -> bool:
        """Whether somebody took it out for good."""
        return node in self._state.nodes.revoked()

    def revoked(self) -> Frame:
        """The list of removed nodes, for a peer's control channel."""
        return Frame("revoked", {}, pack_body({"nodes": sorted(self._state.nodes.revoked())}))

    def where(self) -> Frame:
        """Where coordinators answer, for a peer's control channel."""
        return Frame("places", {}, pack_body({"places": list(self.places)}))

    async def new_token(self, ttl_s: float, uses: int) -> tuple[str, float]:
        """A join token's line and when it ends; the secret is in no other place."""
        token_id, secret = secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES)
        ca_hash = certs.fingerprint(self.authority.certificate)
        line = format_join_token(JoinToken(ca_hash, self.places, token_id, secret))
        now = self._clock()
        record = await self._state.change(lambda joins, _: joins.add(token_id, secret, ttl_s=ttl_s, uses=uses, now=now))
        return line, record.expires_s

    @property
    def open_tokens(self) -> Sequence[JoinRecord]:
        """The join tokens that let somebody in."""
        return [record for record in self._state.joins.records() if record.open(self._clock())]

    async def withdraw(self, token_id: str) -> JoinRecord:
        """Make a join token useless; raises TokenNotFound for an id that is none."""
        return await self._state.change(lambda joins, _: joins.withdraw(token_id))

    async def serve(self, hello: Hello, channel: Channel) -> None:
        """One `join` channel: the CA for everybody, a certificate for who knows a secret."""
        home = home_of(channel.source)
        self._budget.check(home, trio.current_time())
        await channel.send(Frame("ca", {}, pack_body({"ca": certs.to_der(self.authority.certificate)})))
        asked = await next_body(channel, "join")
        try:
            token_id, secret, request = (bytes_of(asked, name) for name in ("id", "secret", "request"))
            certificate = await self._admit(token_id, secret, request, hello.identity.name)
        except SwarmError as error:
            self._budget.failed(home, trio.current_time())
            _log.warning("a node at %s may not join: %s", channel.source or "?", error)
            raise
        await channel.send(self._issued(certificate))

    async def renew(
        self, node: NodeId, name: str, body: dict[str, Any], shown: NodeCertificate | None = None
    ) -> Frame | None:
        """The next certificate of a node that has one; its key stays, and so do its roles.

        None, and nothing is done, while the one that it shows is young, or right after another: an honest node asks
        hourly, and whoever asks without end must not cost a signature and a write each time.
        """
        request = own_request(node, body)
        now = trio.current_time()
        young = shown is not None and self._clock() < certs.renewal_s(shown) - CLOCK_SPREAD_S
        if young or now - self._renewed_s.get(node, -math.inf) < RENEWAL_PAUSE_S:
            _log.info("node %s asked for its next certificate too early", node[:8])
            return None
        certificate = await self._state.change(lambda _, nodes: self._certify(nodes, request, name))
        self._renewed_s[node] = now
        return self._issued(certificate)

    async def remove(self, name: str, may_go: Callable[[NodeRecord], None] = lambda _: None) -> NodeRecord:
        """Take a node out for good: its links here are cut at once, and no certificate of its key is good any more.
        `may_go` raises what forbids it. Raises Conflict for this coordinator itself."""
        now = self._clock()

        def edit(seats: VoterBook, nodes: NodeBook) -> NodeRecord:
            self._refuse_keeper(name)
            _list_founder(name, seats, nodes, now)
            record = nodes.remove(name, now)
            self._refuse_keeper(record.node)
            may_go(record)
            seats.remove(record.node)
            return record

        record = await self._state.change_seats(edit)
        self._tls.revoke(self._state.nodes.revoked())
        return record

    def _refuse_keeper(self, name: str) -> None:
        """By name or id."""
        if self.keeper is not None and name in (self.keeper.name, self.keeper.node):
            raise Conflict(
                f"{self.keeper.name} coordinates the swarm now, and cannot remove itself; stop it first: another voter "
                "then coordinates (start peers with --voter where there is none), and removes it"
            )

    async def note_name(self, node: NodeId, name: str) -> None:
        """A node may go by another name than it joined under. Raises what `NodeBook.check` raises."""
        known = next((record for record in self.nodes if record.node == node), None)
        if known is not None and known.name == name:
            self._state.nodes.check(node, name, self.keeper)
        else:  # in one with the check, so that of two nodes that want a name one gets it
            await self._state.change(lambda _, nodes: nodes.renamed(node, name, self.keeper))

    def name_of(self, node: NodeId) -> str | None:
        """What the document calls a member."""
        return next((record.name for record in self.nodes if record.node == node), None)

    async def _admit(self, token_id: bytes, secret: bytes, request: bytes, name: str) -> x509.Certificate:
        """The secret first: who does not know one learns nothing about names and nodes, and costs no signature."""
        now = self._clock()

        def edit(joins: JoinBook, nodes: NodeBook) -> x509.Certificate:
            joins.redeem(token_id, secret, certs.node_id(certs.read_request(request)), now)
            return self._certify(nodes, request, name)

        return await self._state.change(edit)

    def _certify(self, nodes: NodeBook, request: bytes, name: str) -> x509.Certificate:
        node = certs.node_id(certs.read_request(request))
        nodes.check(node, name, self.keeper)
        roles = PEER_ROLES if self._state.seats.get(node) is None else VOTER_ROLES
        certificate = self.authority.issue(request, roles, self._clock())
        about = certs.read_certificate(certificate)
        nodes.issued(about.node, name, about.ends_s, self.keeper)
        return certificate

    def _issued(self, certificate: x509.Certificate) -> Frame:
        body = {"certificate": certs.to_der(certificate), "coordinators": list(self.places)}
        return Frame("issued", {}, pack_body(body))


def _founders(seats: VoterBook, nodes: NodeBook) -> Sequence[Seated]:
    joined = {record.node for record in nodes.records()}
    return [seat for seat in seats.records() if seat.node not in joined]


def _list_founder(name: str, seats: VoterBook, nodes: NodeBook, now: float) -> None:
    """Nothing but its seat tells of a founder; it goes as others do."""
    taken = {record.name for record in nodes.records() if record.removed_s is None}
    for seat in _founders(seats, nodes):
        if name in (seat.node, seat.name) and seat.name not in taken:
            nodes.issued(seat.node, seat.name, now + certs.NODE_DAYS * DAY_S)


async def keep_certified(
    authority: SwarmAuthority,
    identity: NodeIdentity,
    roles: Sequence[str],
    tls: SwarmTls,
    clock: Callable[[], float] = time.time,
) -> None:
    """A coordinator's own certificate, from its own CA: looked at every hour."""
    while True:
        await trio.sleep(RENEWAL_CHECK_S)
        try:
            if certify_self(authority, identity, roles, clock()):
                tls.use(identity.files)
        except NoSpace as error:  # there is a third of the certificate's life left for it
            _log.error("%s", error.message)


def certify_self(authority: SwarmAuthority, identity: NodeIdentity, roles: Sequence[str], now: float) -> bool:
    """Make the coordinator's certificate where there is none for these roles, or it is due; returns whether it did."""
    member = identity.membership()
    if member is not None:
        about = member.about
        if about.roles == tuple(roles) and about.starts_s <= now < certs.renewal_s(about):
            return False
    identity.renew(authority.issue(certs.new_request(identity.key), roles, now))
    return True


async def next_body(channel: Channel, kind: str) -> dict[str, Any]:
    """The body of the next frame, which must be of `kind`."""
    try:
        frame = await channel.receive()
    except trio.EndOfChannel:
        raise LinkBroken(f"the other end hung up before {kind}") from None
    if frame.kind != kind:
        raise ProtocolError(f"a join channel brought {frame.kind} where {kind} was expected")
    return unpack_body(frame.body)


def own_request(node: NodeId, body: dict[str, Any]) -> bytes:
    """The certificate request that a node sent for its own key; raises ProtocolError for another's."""
    request = bytes_of(body, "request")
    if certs.node_id(certs.read_request(request)) != node:
        raise ProtocolError(f"node {node:.8} asked for the certificate of another")
    return request


def places_of(body: dict[str, Any], most: int) -> tuple[Place, ...]:
    """Where somebody answers: at least one place."""
    places = body.get("places")
    if not isinstance(places, list) or not 0 < len(places) <= most:
        raise ProtocolError(f"the places where a node answers are not a list of 1 to {most}")
    return tuple(parse_place(str(place)) for place in places)


def bytes_of(body: dict[str, Any], name: str) -> bytes:
    value = body.get(name)
    if not isinstance(value, bytes) or len(value) > certs.MAX_CERTIFICATE_BYTES:
        raise ProtocolError(f"{name} is not bytes, at most {certs.MAX_CERTIFICATE_BYTES}")
    return value
