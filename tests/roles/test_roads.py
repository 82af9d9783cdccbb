"""Which road a node takes, over real sockets with real TLS: straight, through the relay, in requests, and both."""

from __future__ import annotations

import socket
import time
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
from channel_handlers import echo
from contexts import node_context
from credentials import Node, Swarm
from polling_port import start_polling_port
from test_peer_reconnecting import NoMembership
from toxics import toxic_proxy

from swarmnode.catalog.store import ShardStore
from swarmnode.cluster.node_book import NodeBook
from swarmnode.config import read_settings
from swarmnode.errors import LinkBroken, NodeRemoved
from swarmnode.ids import NodeId, RingId
from swarmnode.roles import polling_client
from swarmnode.roles.context import PeerResources
from swarmnode.roles.peer import Peer
from swarmnode.roles.polling import PolledLinks
from swarmnode.roles.relay import Relay
from swarmnode.roles.roads import Roads
from swarmnode.wire.address import Address, ApiUrl
from swarmnode.wire.direct import DirectTransport
from swarmnode.wire.frames import Frame
from swarmnode.wire.kept_http import Answer
from swarmnode.wire.link import LinkOptions, Parameters
from swarmnode.wire.routes import ROUTES
from swarmnode.wire.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from swarmnode.wire.link import Channel, Hello

ANYWHERE = Address("127.0.0.1", 0)


class Neighbourhood:
    """A coordinator with swarm port, API port and relay, and two peers; what reaches what is up to their roads."""

    def __init__(self, folder: Path) -> None:
        swarm = Swarm(folder)
        self.coordinator = swarm.node("coordinator", ("coordinator",))
        self.attic, self.cellar = swarm.node("attic"), swarm.node("cellar")
        self.transport = DirectTransport(self.coordinator.tls())
        self.links = PolledLinks(self.transport.accept)
        self.nodes = NodeBook()
        self.nodes.issued(self.attic.node, "attic", time.time() + 1000)
        self.relay = Relay(self._tell, Traffic())
        self.routes: list[str] = []
        self._cellar_roads: Roads | None = None
        self._nursery: trio.Nursery | None = None

    @asynccontextmanager
    async def running(self, *, cellar_routes: Sequence[str] = ROUTES) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            self.address = await nursery.start(self.transport.listen, ANYWHERE, self._serve, self.coordinator.identity)
            self.url = ApiUrl(await start_polling_port(nursery, self.links, self.nodes))
            transport = DirectTransport(self.cellar.tls())
            self.cellar_address = await nursery.start(transport.listen, ANYWHERE, self._hear, self.cellar.identity)
            self._cellar_roads = self.roads(self.cellar, cellar_routes, transport=transport)
            yield
            nursery.cancel_scope.cancel()

    def roads(self, node: Node, routes: Sequence[str], transport: DirectTransport | None = None) -> Roads:
        own = transport or DirectTransport(node.tls())
        return Roads(own, node.identity, node.key, routes, (self.address, self.url))

    async def _serve(self, kind: str, hello: Hello, channel: Channel) -> None:
        if kind == "relay":
            await self.relay.serve(hello, channel)
        else:
            await echo(kind, hello, channel)

    async def _hear(self, kind: str, hello: Hello, channel: Channel) -> None:
        """At the cellar."""
        self.routes.append(channel.route)
        await echo(kind, hello, channel)

    def remove_attic(self) -> None:
        """As the coordinator does: its book says so, and so does its transport."""
        self.nodes.remove("attic", time.time())
        assert self.transport.tls is not None
        self.transport.tls.revoke(self.nodes.revoked())

    def _tell(self, node: NodeId, frame: Frame) -> bool:
        if node != self.cellar.node or self._nursery is None or self._cellar_roads is None:
            return False
        self._nursery.start_soon(self._cellar_roads.answer_relay, frame.header["call"])
        return True


@pytest.fixture
def home(tmp_path: Path) -> Neighbourhood:
    return Neighbourhood(tmp_path)


@pytest.fixture
def nowhere() -> Address:
    """Nobody listens there."""
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return Address(*server.getsockname())


async def said(channel: Channel) -> bool:
    for size in (3, 300_000):
        await channel.send(Frame("data", {"offset": 1}, b"x" * size))
        assert len((await channel.receive()).body) == size
    return True


@pytest.mark.parametrize(("routes", "route"), [(ROUTES, "direct"), (("polled",), "polled"), (("direct",), "direct")])
async def test_the_coordinator_is_reached_by_the_best_road_allowed(
    home: Neighbourhood, routes: Sequence[str], route: str
) -> None:
    async with home.running(), home.roads(home.attic, routes).to_coordinator("control") as dialed:
        assert dialed.way.route == route
        assert await said(dialed.up)


async def test_without_its_swarm_port_the_coordinator_is_polled(home: Neighbourhood, nowhere: Address) -> None:
    async with home.running():
        roads = home.roads(home.attic, ROUTES)
        roads.places = (nowhere, home.url)
        async with roads.to_coordinator("requests") as dialed:
            assert dialed.way.route == "polled"
            assert await said(dialed.up)


LANE = Parameters(RingId("r1"), (1, 0), "act", 0)


@pytest.mark.parametrize(
    ("reachable", "routes", "cellar_routes", "route"),
    [
        pytest.param(True, ROUTES, ROUTES, "direct", id="straight"),
        pytest.param(False, ROUTES, ROUTES, "relayed", id="its port is closed"),
        pytest.param(True, ("relayed", "direct"), ROUTES, "direct", id="straight although the relay is named first"),
        pytest.param(False, ("relayed", "polled"), ("relayed", "polled"), "relayed", id="relayed in requests"),
    ],
)
async def test_a_peer_is_reached_by_the_best_road_there_is(
    home: Neighbourhood,
    nowhere: Address,
    reachable: bool,
    routes: Sequence[str],
    cellar_routes: Sequence[str],
    route: str,
) -> None:
    async with home.running(cellar_routes=cellar_routes):
        addresses = [home.cellar_address if reachable else nowhere]
        options = LinkOptions(LANE, node=home.cellar.node)
        async with home.roads(home.attic, routes).to_peer(home.cellar.node, addresses, "steps", options) as dialed:
            assert dialed.way.route == route
            assert dialed.up.certified is not None
            assert dialed.up.certified.node == home.cellar.node
            assert await said(dialed.up)


async def test_another_node_at_the_address_is_not_taken_for_the_peer(home: Neighbourhood) -> None:
    async with home.running():
        roads = home.roads(home.attic, ("direct",))
        options = LinkOptions(LANE, node=home.attic.node)
        with pytest.raises(LinkBroken, match="answered where"):
            async with roads.to_peer(home.attic.node, [home.cellar_address], "steps", options):
                pass


async def test_every_road_that_failed_is_named(home: Neighbourhood, nowhere: Address) -> None:
    async with home.running():
        roads = home.roads(home.attic, ROUTES)
        stranger = NodeId("0" * 32)
        with pytest.raises(LinkBroken, match=r"direct .* cannot connect .*; relayed .* is not connected"):
            async with roads.to_peer(stranger, [nowhere], "steps", LinkOptions(LANE)):
                pass


# -- better roads, while a worse one is in use


@pytest.mark.parametrize(
    ("reachable", "routes", "now", "better"),
    [
        pytest.param(True, ROUTES, "relayed", True, id="its port is open again"),
        pytest.param(False, ROUTES, "relayed", False, id="it is not"),
        pytest.param(True, ROUTES, "direct", False, id="nothing is better"),
        pytest.param(False, ROUTES, "polled", True, id="the coordinator's port is open again"),
        pytest.param(False, ("relayed", "polled"), "polled", False, id="relayed, but in requests"),
    ],
)
async def test_a_better_road_to_a_peer_is_seen(
    home: Neighbourhood, nowhere: Address, reachable: bool, routes: Sequence[str], now: str, better: bool
) -> None:
    async with home.running():
        addresses = [home.cellar_address if reachable else nowhere]
        assert await home.roads(home.attic, routes).better_to_peer(home.cellar.node, addresses, "steps", now) is better


async def test_a_better_road_to_the_coordinator_is_seen(home: Neighbourhood, nowhere: Address) -> None:
    async with home.running():
        roads = home.roads(home.attic, ROUTES)
        roads.places = (home.url,)  # it came by this one
        assert not await roads.better_to_coordinator([nowhere, home.url], "polled")
        assert await roads.better_to_coordinator([home.address, home.url], "polled")
        assert not await roads.better_to_coordinator([home.address, home.url], "direct")


async def test_of_several_addresses_the_fastest_is_taken(home: Neighbourhood) -> None:
    """Whatever their order."""
    async with home.running():
        with toxic_proxy((home.cellar_address.host, home.cellar_address.port)) as slow:
            slow.there.latency_s = slow.back.latency_s = 0.05
            far, options = Address(*slow.address), LinkOptions(LANE, node=home.cellar.node)
            for addresses in ([far, home.cellar_address], [home.cellar_address, far]):
                roads = home.roads(home.attic, ROUTES)
                async with roads.to_peer(home.cellar.node, addresses, "steps", options) as dialed:
                    assert dialed.way.name == str(home.cellar_address)
        assert slow.there.effects.delayed_chunks


async def test_each_end_knows_the_route_of_its_own_leg(home: Neighbourhood, nowhere: Address) -> None:
    async with home.running(cellar_routes=("relayed", "polled")):
        roads, options = home.roads(home.attic, ROUTES), LinkOptions(LANE, node=home.cellar.node)
        async with roads.to_peer(home.cellar.node, [nowhere], "steps", options) as dialed:
            assert dialed.up.route == "relayed"
            assert home.routes[-1] == "polled"
        async with roads.to_peer(home.cellar.node, [home.cellar_address], "steps", options) as dialed:
            assert (dialed.up.route, home.routes[-1]) == ("direct", "direct")


# -- removal


@pytest.mark.parametrize("route", ["direct", "polled"])
async def test_who_was_removed_hears_that_on_every_road_to_the_coordinator(home: Neighbourhood, route: str) -> None:
    async with home.running():
        home.remove_attic()
        with pytest.raises(NodeRemoved, match="was removed from th"):
            async with home.roads(home.attic, (route,)).to_coordinator("control"):
                pytest.fail("it was let in")


@pytest.mark.parametrize("route", ["direct", "polled"])
async def test_a_peer_that_was_removed_gives_its_memory_back_at_once(
    home: Neighbourhood, tmp_path: Path, route: str
) -> None:
    """No coordinator will take its stages over: they wait for none."""
    settings = read_settings(tmp_path, environ={})
    unloaded = trio.Event()
    async with home.running(), trio.open_nursery() as nursery:
        home.remove_attic()
        context = node_context(home.attic.identity, home.transport, settings)
        told: list[tuple[str, object]] = []
        context = replace(
            context, roads=home.roads(home.attic, (route,)), emit=lambda event, values: told.append((event, *values))
        )
        member = cast("Any", NoMembership())
        resources = PeerResources(memory_bytes=1 << 30, device="cpu", threads=1)
        peer = Peer(context, [home.address, home.url], resources, ShardStore(tmp_path / "store"), member)
        peer._hosts[RingId("r1")] = cast("Any", SimpleNamespace(unload=lambda: unloaded.set()))
        nursery.start_soon(peer.run)
        for _ in range(2):
            with trio.fail_after(10):
                await unloaded.wait()
            unloaded = trio.Event()
        nursery.cancel_scope.cancel()
    assert told == [("removed", "reason")], "people hear of it once, whatever often it tries"


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": []}', b'{"error": {"code": 1}}', b"[" * 100_000])
def test_a_403_that_says_nothing_of_a_removal_is_a_broken_link(body: bytes) -> None:
    """A tunnel's own, whatever it holds."""
    with pytest.raises(LinkBroken, match="answered 403"):
        polling_client._check(Answer(403, body), (204,))
