"""How a node reaches others: straight, through the coordinator's relay, or in plain requests to its API port."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from swarmnode.errors import LinkBroken, SwarmError
from swarmnode.roles.polling_client import PollingAccess, polled_stream
from swarmnode.wire.address import Address, ApiUrl, parse_place
from swarmnode.wire.dialing import Dialed, Way, dial_best
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import NO_OPTIONS, Channel, Link, LinkOptions
from swarmnode.wire.routes import DIRECT, POLLED, RELAYED, better, worst
from swarmnode.wire.tunnel import TunnelStream

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from swarmnode.ids import NodeId
    from swarmnode.wire.address import Place
    from swarmnode.wire.certificates import PrivateKey
    from swarmnode.wire.link import CarriedTransport, Identity


class Roads:
    """`places`: where the coordinator answers; while one is connected, where that one is. `known`: where all nodes that
    may coordinate answer, as far as this one was told."""

    def __init__(
        self,
        transport: CarriedTransport,
        identity: Identity,
        key: PrivateKey,
        routes: Sequence[str],
        places: Sequence[Place] = (),
    ) -> None:
        self.places = tuple(places)
        self.known: tuple[Place, ...] = ()
        self.removed = False
        """Whether one of them said that this node is out of the swarm."""
        self._transport = transport
        self._identity = identity
        self._key = key
        self._routes = tuple(routes)

    def declare(self, capabilities: Sequence[str]) -> None:
        """What this node's stages can do: said in every HELLO from now on."""
        self._identity = replace(self._identity, capabilities=tuple(capabilities))

    @asynccontextmanager
    async def to_coordinator(self, kind: str, options: LinkOptions = NO_OPTIONS) -> AsyncIterator[Dialed[Channel]]:
        """A channel of `kind` on a connection of its own. Raises LinkBroken that tells of every place tried."""
        ways = [
            Way(route, partial(self._channel_at, place, kind, options), str(place)) for route, place in self._ways()
        ]
        async with dial_best(ways) as dialed:
            yield dialed

    @asynccontextmanager
    async def link_to_coordinator(self, options: LinkOptions = NO_OPTIONS) -> AsyncIterator[Link]:
        """A connection for several channels."""
        ways = [Way(route, partial(self._link_at, place, options), str(place)) for route, place in self._ways()]
        async with dial_best(ways) as dialed:
            yield dialed.up

    @asynccontextmanager
    async def to_peer(
        self, node: NodeId, addresses: Sequence[Address], kind: str, options: LinkOptions
    ) -> AsyncIterator[Dialed[Channel]]:
        """A channel to another peer: straight to one of its addresses, else through the coordinator."""
        ways = self._to_peer(node, addresses, kind, options)
        if not ways:
            raise LinkBroken(f"of the routes {', '.join(self._routes)} none leads from one peer to another")
        async with dial_best(ways) as dialed:
            yield dialed

    def to_voter(self, node: NodeId, places: Sequence[str]) -> Sequence[Way[Channel]]:
        """The ways to another node that may coordinate: straight ones only, as it was dialled back before it could."""
        options = LinkOptions(node=node)
        addresses = [place for place in map(parse_place, places) if isinstance(place, Address)]
        dial = self._transport.dial
        return [Way(DIRECT, partial(dial, at, "votes", self._identity, options), str(at)) for at in addresses]

    def to_followers(self, kind: str, options: LinkOptions) -> Sequence[Way[Channel]]:
        """The ways to where the coordinator does not answer and others that may coordinate do: straight ones only."""
        places = [place for place in self.known if place not in self.places] if DIRECT in self._routes else []
        addresses = [place for place in places if isinstance(place, Address)]
        return [Way(DIRECT, partial(self._channel_at, at, kind, options), str(at)) for at in addresses]

    async def better_to_peer(self, node: NodeId, addresses: Sequence[Address], kind: str, route: str) -> bool:
        """Whether another peer answers by a better route now. The channel that finds out names no ring: the peer says
        WELCOME, and then that it holds nothing of the kind."""
        ways = [way for way in self._to_peer(node, addresses, kind, LinkOptions(node=node)) if better(way.route, route)]
        return await _answers(ways, route)

    async def better_to_coordinator(self, places: Sequence[Place], route: str) -> bool:
        """Whether the coordinator answers by a better route now; of what only it serves, `relay` changes nothing."""
        ways = [
            Way(way, partial(self._channel_at, place, "relay", NO_OPTIONS), str(place))
            for way, place in self._ways(places)
            if better(way, route)
        ]
        return await _answers(ways, route)

    def _to_peer(
        self, node: NodeId, addresses: Sequence[Address], kind: str, options: LinkOptions
    ) -> list[Way[Channel]]:
        ways: list[Way[Channel]] = []
        if DIRECT in self._routes:
            dial = self._transport.dial
            ways += [Way(DIRECT, partial(dial, at, kind, self._identity, options), str(at)) for at in addresses]
        if RELAYED in self._routes:
            ways.append(Way(RELAYED, partial(self._through_relay, node, kind, options), "through the coordinator"))
        return ways

    def _ways(self, places: Sequence[Place] | None = None) -> list[tuple[str, Place]]:
        """Addresses before URLs."""
        places = self.places if places is None else places
        direct = [(DIRECT, place) for place in places if isinstance(place, Address) and DIRECT in self._routes]
        polled = [(POLLED, place) for place in places if isinstance(place, ApiUrl) and POLLED in self._routes]
        if not direct and not polled:
            raise LinkBroken(f"no place of the coordinator can be reached by {', '.join(self._routes)}")
        return [*direct, *polled]

    @asynccontextmanager
    async def _channel_at(self, place: Place, kind: str, options: LinkOptions) -> AsyncIterator[Channel]:
        async with self._link_at(place, options) as link, link.open(kind) as channel:
            yield channel

    @asynccontextmanager
    async def _link_at(self, place: Place, options: LinkOptions) -> AsyncIterator[Link]:
        if isinstance(place, Address):
            async with self._transport.connect(place, self._identity, options) as link:
                yield link
            return
        access = PollingAccess(place.text, self._identity.node, self._key)
        async with (
            polled_stream(access) as stream,
            self._transport.connect_over(stream, self._identity, options) as link,
        ):
            yield link

    @asynccontextmanager
    async def _through_relay(self, node: NodeId, kind: str, options: LinkOptions) -> AsyncIterator[Channel]:
        outer = LinkOptions(parameters=options.parameters)
        async with self.to_coordinator("relay", outer) as dialed:
            await dialed.up.send(Frame("relay_call", {"to": node}))
            tunnel = TunnelStream(dialed.up)
            async with (
                self._transport.connect_over(tunnel, self._identity, options) as link,
                link.open(kind) as channel,
            ):
                yield channel

    async def answer_relay(self, call: str) -> None:
        """Another peer calls through the coordinator: take the call, and serve it as a connection to this node's
        swarm port, to its end."""
        async with self.to_coordinator("relay") as dialed:
            await dialed.up.send(Frame("relay_answer", {"call": call}))
            await self._transport.accept(TunnelStream(dialed.up), "relay")


async def _answers(ways: Sequence[Way[Channel]], route: str) -> bool:
    """Whether one of `ways` comes up, and is better than `route` on all its legs."""
    if not ways:
        return False
    try:
        async with dial_best(ways) as dialed:
            return better(worst((dialed.way.route, dialed.up.route)), route)
    except SwarmError:
        return False
