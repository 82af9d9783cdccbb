"""The coordinator dials a peer back, so that `swarmnode doctor` can say whether others reach this machine.

It dials what a member asks for, so it must be of no use to one that looks around from here: never this machine's own
addresses, only a few times a minute, and an answer that does not tell a closed port from one that is no swarm port.
"""

from __future__ import annotations

import ipaddress
import time
from typing import TYPE_CHECKING

import trio

from swarmnode.errors import MAX_MESSAGE_CHARS, InvalidRequest, LinkBroken, Overloaded, ProtocolError, SwarmError
from swarmnode.wire.address import Address, is_loopback, parse_address
from swarmnode.wire.deadlines import DIAL_BACK_S
from swarmnode.wire.direct import DirectTransport, connect
from swarmnode.wire.flood import Budget
from swarmnode.wire.frames import Frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarmnode.ids import NodeId
    from swarmnode.wire.link import Identity, Transport
    from swarmnode.wire.tls import SwarmTls

BURST, PER_S = 5, 0.1
"""Dials for one member: a person who changes a setting and looks again, not a program that counts ports."""


class DialBacks:
    """Answers a coordinator's members, each one dial at a time."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._budgets: dict[NodeId, Budget] = {}
        """Only of members that asked: as many as there are certificates at most."""
        self._busy: set[NodeId] = set()

    async def answer(self, asked_by: Identity, source: str) -> Frame:
        """Try the address that a peer's HELLO tells others to dial; only this address, and only for a TLS handshake."""
        try:
            text = await self.dial(asked_by.node, _advertised(asked_by), source)
            ok = True
        except SwarmError as error:
            came_from = f"; your packets come from {source}" if source else ""
            ok, text = False, f"{error.message}{came_from}"
        return Frame("dialed_back", {"ok": ok, "message": text[:MAX_MESSAGE_CHARS], "time_s": time.time()})

    async def dial(self, node: NodeId, named: Address, source: str, others: Sequence[Address] = ()) -> str:
        """Try an address of `node`, which asks from `source`, once all `others` of it are known to be such as others
        may dial; raises what is wrong with one of them, or Overloaded where it asks too often: before any name is
        looked up."""
        if not isinstance(self._transport, DirectTransport) or self._transport.tls is None:
            raise LinkBroken("this coordinator does not dial directly")
        budget = self._budgets.setdefault(node, Budget(BURST, PER_S))
        if node in self._busy or not budget.spend(trio.current_time()):
            budget.left = max(budget.left, 0.0)
            raise Overloaded("the coordinator has dialled this node too often; ask again in a minute")
        self._busy.add(node)
        try:
            for place in others:
                await resolved(place, source)
            await _try(self._transport.tls, named, node, source)
        finally:
            self._busy.discard(node)
        return f"{named} answers, seen from the coordinator"


class AnotherAnswers(LinkBroken):
    """A member of this swarm, but not the one that was meant."""


async def _try(tls: SwarmTls, named: Address, node: NodeId, source: str) -> None:
    """Raises LinkBroken that says no more than that it is not there, or InvalidRequest."""
    try:
        await reach(tls, await resolved(named, source), node)
    except AnotherAnswers:
        raise LinkBroken(f"another node answers at {named}") from None
    except (LinkBroken, ProtocolError):
        raise LinkBroken(f"this node was not reached at {named}") from None


async def reach(tls: SwarmTls, address: Address, node: str) -> None:
    """Shake hands with `node` at `address` within DIAL_BACK_S; raises LinkBroken or ProtocolError that says why not."""
    try:
        with trio.fail_after(DIAL_BACK_S):
            secured = await tls.secure_dialed(await connect(address))
            await trio.aclose_forcefully(secured.stream)
    except trio.TooSlowError:
        raise LinkBroken(f"{address} did not answer within {DIAL_BACK_S:g} s") from None
    if secured.peer is None or secured.peer.node != node:
        raise AnotherAnswers(f"another node answers at {address}")


def _advertised(asked_by: Identity) -> Address:
    if not asked_by.listen:
        raise InvalidRequest("the peer did not say where it listens")
    return parse_address(asked_by.listen[0])


async def resolved(address: Address, source: str) -> Address:
    """What an address stands for, to be dialled as it is: a name could stand for something else a moment later, and
    the C library reads more spellings of 127.0.0.1 than anybody would list.

    Raises InvalidRequest for one that may not be dialled for a node at `source`, LinkBroken for an unknown name.
    """
    refusal = InvalidRequest(f"{address} is no address to dial from another machine")
    if address.port == 0:
        raise refusal
    try:
        with trio.fail_after(DIAL_BACK_S):
            found = await trio.socket.getaddrinfo(address.host, address.port, type=trio.socket.SOCK_STREAM)
    except (OSError, UnicodeError, trio.TooSlowError):
        raise LinkBroken(f"{address} is unknown here") from None
    hosts = [str(target[0]) for *_, target in found]
    if not hosts or not all(may_dial(host, source) for host in hosts):
        raise refusal
    return Address(hosts[0], address.port)


def may_dial(host: str, source: str) -> bool:
    """Whether a numeric address may be dialled for whoever connected from `source`: no address of this machine alone
    (unless it asks from here), no metadata service of a cloud, nobody in particular, no second spelling."""
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and (ip.ipv4_mapped or ip.sixtofour or ip.teredo):
        return False
    if ip.is_loopback:
        return is_loopback(source)
    return not (ip.is_link_local or ip.is_unspecified or ip.is_multicast or ip.is_reserved)
