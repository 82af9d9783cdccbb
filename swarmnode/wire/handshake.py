"""HELLO and WELCOME: who is there, and which protocol both speak. A link is up only after them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from swarmnode.errors import LinkBroken, ProtocolError
from swarmnode.ids import BootId, NodeId, RingId, parse_node_name
from swarmnode.wire.deadlines import HELLO_S
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import (
    DIALED_BY,
    NO_OPTIONS,
    SERVED_BY,
    Channel,
    Hello,
    Identity,
    LinkOptions,
    Parameters,
    Welcome,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


async def greet(channel: Channel, identity: Identity, options: LinkOptions = NO_OPTIONS) -> Welcome:
    """The dialer's part. Raises LinkBroken when no answer came in time, or the error it was refused with."""
    await channel.send(_hello_frame(identity, options.parameters))
    answer = await _first_frame(channel, "WELCOME")
    if answer.kind != "welcome":
        raise ProtocolError(f"the peer answered hello with {answer.kind}")
    header = answer.header
    if not identity.protocol[0] <= header["protocol"] <= identity.protocol[1]:
        raise ProtocolError(f"the peer chose protocol {header['protocol']}; offered were {_range(identity.protocol)}")
    _check_answerer(channel, header["node"], options.node)
    return Welcome(header["protocol"], _identity(header, protocol=(header["protocol"],) * 2))


async def answer(channel: Channel, identity: Identity) -> Hello:
    """The listener's part. Raises ProtocolError for a hello that cannot be met, LinkBroken where none came in time."""
    first = await _first_frame(channel, "HELLO")
    if first.kind != "hello":
        raise ProtocolError(f"the first frame of a channel is {first.kind}; it must be hello")
    _check_dialer(channel, first.header)
    theirs = _range_of(first.header)
    chosen = choose_protocol(identity.protocol, theirs)
    hello = Hello(_identity(first.header, protocol=theirs), _parameters(first.header))
    about = {"caps": list(identity.capabilities), "term": identity.term}
    header = {"protocol": chosen, "node": identity.node, "boot": identity.boot, "name": identity.name, **about}
    await channel.send(Frame("welcome", header))
    return hello


def choose_protocol(ours: tuple[int, int], theirs: tuple[int, int]) -> int:
    """The newest protocol both speak; raises ProtocolError that names both ranges."""
    chosen = min(ours[1], theirs[1])
    if chosen < max(ours[0], theirs[0]) or theirs[0] > theirs[1]:
        raise ProtocolError(
            f"no common protocol: the listener speaks {_range(ours)}, the dialer {_range(theirs)}; "
            "update the older program"
        )
    return chosen


def _check_dialer(channel: Channel, hello: Mapping[str, Any]) -> None:
    """HELLO may only say what the certificate says, too."""
    certified = channel.certified
    if certified is None:
        return
    if hello["node"] != certified.node:
        raise ProtocolError(f"hello names node {hello['node']:.40}, but the certificate is that of {certified.node}")
    if DIALED_BY not in certified.roles or not set(hello["roles"]) <= set(certified.roles):
        raise ProtocolError(f"node {certified.node:.8} is certified as {', '.join(certified.roles) or 'nothing'} only")


def _check_answerer(channel: Channel, node: str, expected: NodeId | None) -> None:
    certified = channel.certified
    if certified is not None:
        if node != certified.node:
            raise ProtocolError(f"welcome names node {node:.40}, but the certificate is that of {certified.node}")
        if SERVED_BY[channel.kind] not in certified.roles:
            raise ProtocolError(f"node {node:.8} serves {channel.kind} channels without the certificate for it")
    if expected is not None and node != expected:
        raise LinkBroken(f"node {node:.8} answered where {expected:.8} was expected")


async def _first_frame(channel: Channel, what: str) -> Frame:
    try:
        with trio.fail_after(HELLO_S):
            return await channel.receive()
    except trio.TooSlowError:
        raise LinkBroken(f"no {what} within {HELLO_S:g} s") from None
    except trio.EndOfChannel:
        raise LinkBroken(f"the peer ended the channel before {what}") from None


def _range(protocol: tuple[int, int]) -> str:
    low, high = protocol
    return str(low) if low == high else f"{low} to {high}"


def _range_of(header: Mapping[str, Any]) -> tuple[int, int]:
    low, high = header["protocol"]
    return low, high


def _hello_frame(identity: Identity, parameters: Parameters) -> Frame:
    header: dict[str, Any] = {
        "protocol": list(identity.protocol),
        "node": identity.node,
        "boot": identity.boot,
        "name": identity.name,
        "roles": list(identity.roles),
        "caps": list(identity.capabilities),
        "term": identity.term,
        "listen": list(identity.listen),
        "incarnation": identity.incarnation,
    }
    optional = {"ring": parameters.ring, "lane": parameters.lane, "stage": parameters.stage}
    header |= {name: value for name, value in optional.items() if value is not None}
    if parameters.epoch is not None:
        header["epoch"] = list(parameters.epoch)
    return Frame("hello", header)


def _identity(header: Mapping[str, Any], protocol: tuple[int, int]) -> Identity:
    """Raises ProtocolError for a name that is none: people read it in lists and logs."""
    try:
        name = parse_node_name(header["name"])
    except ValueError as error:
        raise ProtocolError(f"{error}; give --name") from None
    return Identity(
        NodeId(header["node"]),
        BootId(header["boot"]),
        name,
        roles=tuple(header.get("roles", ())),
        capabilities=tuple(header["caps"]),
        term=header["term"],
        listen=tuple(header.get("listen", ())),
        incarnation=header.get("incarnation", 0),
        protocol=protocol,
    )


def _parameters(header: Mapping[str, Any]) -> Parameters:
    ring = header.get("ring")
    epoch = header.get("epoch")
    return Parameters(
        ring=None if ring is None else RingId(ring),
        epoch=None if epoch is None else (epoch[0], epoch[1]),
        lane=header.get("lane"),
        stage=header.get("stage"),
    )
