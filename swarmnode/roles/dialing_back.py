"""The coordinator dials a peer back, so that `swarmnode doctor` can say whether others reach this machine."""

from __future__ import annotations

import ipaddress
import time
from typing import TYPE_CHECKING

import trio

from swarmnode.errors import MAX_MESSAGE_CHARS, InvalidRequest, LinkBroken, SwarmError
from swarmnode.wire.address import Address, parse_address
from swarmnode.wire.deadlines import DIAL_BACK_S
from swarmnode.wire.direct import DirectTransport, connect
from swarmnode.wire.frames import Frame

if TYPE_CHECKING:
    from swarmnode.wire.link import Identity, Transport
    from swarmnode.wire.tls import SwarmTls


async def dial_back(transport: Transport, asked_by: Identity, source: str) -> Frame:
    """Try the address that a peer's HELLO tells others to dial; only this address, and only for a TLS handshake."""
    try:
        if not isinstance(transport, DirectTransport) or transport.tls is None:
            raise LinkBroken("this coordinator does not dial directly")
        address = _allowed(asked_by)
        await reach(transport.tls, address, asked_by.node)
        ok, text = True, f"{address} answers, seen from the coordinator"
    except SwarmError as error:
        came_from = f"; your packets come from {source}" if source else ""
        ok, text = False, f"{error.message}{came_from}"
    return Frame("dialed_back", {"ok": ok, "message": text[:MAX_MESSAGE_CHARS], "time_s": time.time()})


async def reach(tls: SwarmTls, address: Address, node: str) -> None:
    """Shake hands with `node` at `address` within DIAL_BACK_S; raises LinkBroken or ProtocolError that says why not."""
    try:
        with trio.fail_after(DIAL_BACK_S):
            secured = await tls.secure_dialed(await connect(address))
            await trio.aclose_forcefully(secured.stream)
    except trio.TooSlowError:
        raise LinkBroken(f"{address} did not answer within {DIAL_BACK_S:g} s") from None
    if secured.peer is None or secured.peer.node != node:
        raise LinkBroken(f"another node answers at {address}")


def _allowed(asked_by: Identity) -> Address:
    """A peer's own address, no metadata service of a cloud: members may not scan the coordinator's surroundings."""
    if not asked_by.listen:
        raise InvalidRequest("the peer did not say where it listens")
    address = parse_address(asked_by.listen[0])
    try:
        link_local = ipaddress.ip_address(address.host).is_link_local
    except ValueError:
        link_local = False
    if link_local or address.port == 0:
        raise InvalidRequest(f"{address} is no address to dial from another machine")
    return address
