"""A peer's side of certificates: joins a swarm by token, and asks for the next certificate in time."""

from __future__ import annotations

import logging
import socket
import time
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import trio

from swarmnode.cluster.fence import Fence
from swarmnode.cluster.membership import next_incarnation
from swarmnode.errors import JoinRefused, LinkBroken, NoSpace, ProtocolError, SwarmError
from swarmnode.ids import NodeId
from swarmnode.roles.enrolment import RENEWAL_CHECK_S, bytes_of, next_body, places_of
from swarmnode.roles.identity import MAX_ADDRESSES, SwarmAuthority
from swarmnode.roles.polling_client import PollingAccess, polled_stream
from swarmnode.wire import certificates as certs
from swarmnode.wire.address import Address, parse_place
from swarmnode.wire.bodies import pack_body
from swarmnode.wire.deadlines import JOIN_S
from swarmnode.wire.direct import connect, dial_over
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import JOIN_KIND
from swarmnode.wire.tls import secure_unverified

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from cryptography import x509

    from swarmnode.cluster.join_token import JoinToken
    from swarmnode.roles.identity import Membership, NodeIdentity
    from swarmnode.wire.address import Place
    from swarmnode.wire.link import Channel, Identity
    from swarmnode.wire.tls import SwarmTls

_log = logging.getLogger(__name__)


async def join_swarm(
    token: JoinToken, identity: NodeIdentity, about: Identity, clock: Callable[[], float] = time.time
) -> None:
    """Become a member of the token's swarm: its addresses are tried in order.

    Raises JoinRefused, Conflict (the node belongs to another swarm) or LinkBroken with what each address said. A key
    that was made for it is then on disk only where a certificate may have been issued, whose answer was lost: the token
    lets this key in once more, and no other one under its name.
    """
    identity.check_swarm(token.ca_hash)
    made, reasons, doubtful = not identity.kept, list[str](), False
    for text in token.addresses:
        try:
            with trio.fail_after(JOIN_S):
                issued = await _join_at(parse_place(text), token, identity, about, clock)
            doubtful = True  # whatever keeps it from being kept here: it is this key's
            identity.join(*issued)
            return
        except trio.TooSlowError:
            reasons.append(f"{text}: no answer within {JOIN_S:g} s")
            doubtful = identity.kept
        except (LinkBroken, ProtocolError) as error:
            reasons.append(f"{text}: {error.message}")
            doubtful = identity.kept
        except SwarmError:
            if made and not doubtful:
                identity.discard()
            raise
    raise LinkBroken("cannot join the swarm; " + "; ".join(reasons))


@asynccontextmanager
async def _stream_to(place: Place, identity: NodeIdentity) -> AsyncIterator[trio.abc.Stream]:
    if isinstance(place, Address):
        yield await connect(place)
        return
    async with polled_stream(PollingAccess(place.text, identity.node, identity.key)) as stream:
        yield stream


async def _join_at(
    place: Place, token: JoinToken, identity: NodeIdentity, about: Identity, clock: Callable[[], float]
) -> tuple[x509.Certificate, x509.Certificate, tuple[Place, ...]]:
    """As `_ask_to_join`, and this place where it names none."""
    async with _stream_to(place, identity) as stream:
        secured, listener = await secure_unverified(stream)
        async with dial_over(secured, JOIN_KIND, about) as channel:
            ca, certificate, coordinators = await _ask_to_join(channel, listener, token, identity, clock)
    return ca, certificate, coordinators or (place,)


async def _ask_to_join(
    channel: Channel, listener: bytes, token: JoinToken, identity: NodeIdentity, clock: Callable[[], float]
) -> tuple[x509.Certificate, x509.Certificate, tuple[Place, ...]]:
    """The CA, this node's certificate, and where coordinators answer."""
    ca = certs.load_certificate(bytes_of(await next_body(channel, "ca"), "ca"))
    _check_listener(ca, listener, token, clock())
    identity.keep()
    body = {"id": token.id, "secret": token.secret, "request": certs.new_request(identity.key)}
    await channel.send(Frame("join", {}, pack_body(body)))
    certificate, coordinators = _read_issued(await next_body(channel, "issued"), ca, clock())
    return ca, certificate, coordinators


def _check_listener(ca: x509.Certificate, listener: bytes, token: JoinToken, now: float) -> None:
    """Before the secret is sent: the CA is the token's, and whoever holds this connection is its coordinator."""
    if certs.fingerprint(ca) != token.ca_hash:
        raise JoinRefused("the machine that answered belongs to another swarm than the token; was the token's copied?")
    answered = certs.check_issued(certs.load_certificate(listener), ca, now)
    if "coordinator" not in answered.roles:
        raise JoinRefused("the machine that answered is not a coordinator of the token's swarm")


class PeerMembership:
    """A connected peer's part: it asks for the next certificate in time, and drops who was removed."""

    def __init__(
        self,
        identity: NodeIdentity,
        tls: SwarmTls,
        *,
        renews: bool = True,
        clock: Callable[[], float] = time.time,
        voted: Callable[[], int] = lambda: 0,
    ) -> None:
        """`renews` False: this process is the coordinator, too, and certifies itself. `clock` gives Unix seconds,
        `voted` the term that this node knows of as a voter."""
        self._identity = identity
        self._tls = tls
        self._fence = Fence(identity.term(), voted)
        self.incarnation = identity.incarnation()
        self._renews = renews
        self._clock = clock

    @property
    def seated(self) -> bool:
        """Whether this node holds the swarm's key, and may coordinate."""
        return SwarmAuthority.kept(self._identity) is not None

    def stand(self, places: Sequence[str]) -> Frame:
        """The wish to be able to coordinate, from these places."""
        body = {"places": list(places), "request": certs.new_request(self._identity.key)}
        return Frame("stand", {}, pack_body(body))

    def take_seat(self, body: dict[str, Any]) -> None:
        """The swarm's key and the certificate to coordinate. Raises ProtocolError where they are not this swarm's."""
        certificate, _ = _read_issued(body, self._member().ca, self._clock())
        SwarmAuthority.take(self._identity, bytes_of(body, "key"))
        self._identity.renew(certificate)
        self._tls.use(self._identity.files, enrolment=True)

    async def admit_term(self, term: int) -> None:
        """A coordinator of `term` is there. Raises StaleTerm where a later one was heard; a new one is on disk before
        anything that it says is done: raises NoSpace, and until it can be kept nothing is."""
        self._fence.check(term)
        if term > self._fence.term:
            await trio.to_thread.run_sync(self._identity.keep_term, term)
            self._fence.admit(term)

    async def refute(self, above: int) -> None:
        """This node counts as dead at incarnation `above`: from now on it says a higher one. Where the disk does not
        take that, it lives on all the same; after its next start it may have to pass what it says now once more."""
        if above < self.incarnation:
            return
        try:
            self.incarnation = await trio.to_thread.run_sync(self._identity.next_incarnation, above)
        except NoSpace as error:
            _log.error("%s", error.message)
            self.incarnation = next_incarnation(self.incarnation, above)

    def check_term(self, term: int) -> None:
        """A coordinator of `term` says something. Raises StaleTerm."""
        self._fence.check(term)

    def take_places(self, body: dict[str, Any], here: Sequence[Place]) -> tuple[Place, ...]:
        """Where coordinators answer, kept for the next start, with those that answered here: nobody else may know of
        them. Raises ProtocolError."""
        named = places_of(body, MAX_ADDRESSES)
        found = (*named, *(place for place in here if place not in named))
        if found != self._identity.coordinators():
            with _logged_where_full():
                self._identity.remember(found)
        return found

    async def keep_certified(self, post: Callable[[Frame], None]) -> None:
        """Ask whenever two thirds of the certificate's life have passed, and again every hour until it came."""
        while self._renews:
            if self._clock() >= certs.renewal_s(self._member().about):
                post(Frame("renew", {}, pack_body({"request": certs.new_request(self._identity.key)})))
            await trio.sleep(RENEWAL_CHECK_S)

    def take_issued(self, body: dict[str, Any]) -> tuple[Place, ...]:
        """The certificate that was asked for: kept, and used from the next connection on. Raises ProtocolError.

        Returns where coordinators answer from now on; empty: as before.
        """
        certificate, coordinators = _read_issued(body, self._member().ca, self._clock())
        with _logged_where_full():  # and asked for again
            self._identity.renew(certificate)
            if coordinators:
                self._identity.remember(coordinators)
            self._tls.use(self._identity.files)
        return coordinators

    def take_revoked(self, body: dict[str, Any]) -> None:
        """The list of removed nodes: links with them end. Raises ProtocolError."""
        nodes = body.get("nodes")
        if not isinstance(nodes, list) or not all(isinstance(node, str) for node in nodes):
            raise ProtocolError("the list of removed nodes is not a list of ids")
        self._tls.revoke(frozenset(NodeId(node) for node in nodes))

    def _member(self) -> Membership:
        member = self._identity.membership()
        if member is None:
            raise ProtocolError(f"{self._identity.folder} holds no certificate any more; join again with a token")
        return member


@contextmanager
def _logged_where_full() -> Iterator[None]:
    """A disk that takes nothing must not end a node that can go on without."""
    try:
        yield
    except NoSpace as error:
        _log.error("%s", error.message)


def address_towards(coordinator: Place) -> Address:
    """The address of this machine that packets to `coordinator` leave from, any port. Nothing is sent.

    Raises LinkBroken where there is no way to it.
    """
    there = coordinator if isinstance(coordinator, Address) else coordinator.address
    try:
        family, kind, _, _, target = socket.getaddrinfo(there.host, there.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return Address(probe.getsockname()[0], 0)
    except OSError as error:
        raise LinkBroken(f"this machine has no way to {coordinator}: {error}; give --swarm-listen HOST:PORT") from error


def _read_issued(body: dict[str, Any], ca: x509.Certificate, now: float) -> tuple[x509.Certificate, tuple[Place, ...]]:
    certificate = certs.load_certificate(bytes_of(body, "certificate"))
    certs.check_issued(certificate, ca, now)
    coordinators = body.get("coordinators", [])
    if not isinstance(coordinators, list):
        raise ProtocolError("the coordinators of an issued certificate are not a list")
    return certificate, tuple(parse_place(str(place)) for place in coordinators)
