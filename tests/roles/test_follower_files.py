"""A node that may coordinate gives its catalogue's files while another coordinates: over real sockets with real TLS."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
import trio.testing
from contexts import node_context
from credentials import Swarm
from load_specs import one_stage_load
from test_slice_transfer import LAYERS, SHARD, tensors_of, write_checkpoint

from swarmnode.catalog.importing import import_model
from swarmnode.catalog.registry import Registry
from swarmnode.catalog.store import ShardStore
from swarmnode.config import read_settings
from swarmnode.errors import InvalidModel, NodeRemoved, NotCoordinator
from swarmnode.node import _Node
from swarmnode.roles import file_client, slice_client
from swarmnode.roles.fetching import fetch_files
from swarmnode.roles.file_server import serve_files, serve_shares
from swarmnode.roles.office import Office
from swarmnode.roles.swarm_document import SwarmDocument
from swarmnode.wire.address import Address
from swarmnode.wire.direct import DirectTransport

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from credentials import Node

    from swarmnode.ids import NodeId
    from swarmnode.wire.link import Channel, Hello

ANYWHERE = Address("127.0.0.1", 0)
MODEL = "tiny"


class House:
    """The coordinator knows a model by the swarm's document alone; the one that it followed has the files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = import_model(str(write_checkpoint(folder / MODEL, blocks=False)), folder / "old", stages=1)
        self.document = SwarmDocument(models={self.model.id: self.model})
        swarm = Swarm(folder / "swarm")
        self.new, self.old, self.bare = (swarm.node(name, ("coordinator", "peer")) for name in ("new", "old", "bare"))
        self.attic, self.loft = swarm.node("attic"), swarm.node("loft")
        self.known: list[Address] = []
        self.store = ShardStore(folder / "store")
        self.transport = DirectTransport(self.attic.tls())
        self.context = node_context(self.attic.identity, self.transport, read_settings(folder, environ={}))

    async def start_coordinator(self, nursery: trio.Nursery) -> None:
        registry = Registry(self.folder / "new", lambda: self.document.models)
        at = await self.listen(nursery, self.new, lambda channel: serve_files(registry, channel))
        self.context.roads.places = (at,)

    async def listen(self, nursery: trio.Nursery, node: Node, serve: Callable[[Channel], Awaitable[None]]) -> Address:
        async def handler(kind: str, hello: Hello, channel: Channel) -> None:
            await serve(channel)

        transport = DirectTransport(node.tls())
        return self.know(await nursery.start(transport.listen, ANYWHERE, handler, node.identity))

    async def start_follower(self, nursery: trio.Nursery, node: Node, models: str) -> Address:
        """A node as it is run, of which only what another one's channels meet is there."""
        tls = node.tls()
        entry = SimpleNamespace(document=self.document.encode(), voters=(self.new.node, node.node))
        voting = SimpleNamespace(
            node=node.node,
            coordinates=False,
            coordinator=self.new.node,
            entry=entry,
            changed=trio.sleep_forever,
            term=1,
        )
        context = SimpleNamespace(settings=SimpleNamespace(models_root=self.folder / models))
        office = Office(cast("Any", SimpleNamespace(voting=voting, follow=None, tls=tls, context=context)))
        nursery.start_soon(office.run)
        await trio.testing.wait_all_tasks_blocked()
        machine = _Node(cast("Any", None), cast("Any", None), lambda *_: None)
        machine._office, machine._voting = office, cast("Any", voting)
        handler, standing = machine._serve_channel, machine._standing
        listen = partial(DirectTransport(tls).listen, ANYWHERE, handler, node.identity, standing=standing)
        return self.know(await nursery.start(listen))

    def know(self, address: Address) -> Address:
        self.known.append(address)
        self.context.roads.known = tuple(self.known)
        return address

    async def fetch(self, *sources: tuple[NodeId, str]) -> None:
        """Everything that a stage of all layers reads; raises as `fetch_files`, or AssertionError for a wrong byte."""
        spec = replace(one_stage_load(self.model.files, "attic"), model=self.model.model_id, sources=sources)
        with trio.fail_after(20):
            sliced = await fetch_files(self.context, spec, self.store, lambda *_: None)
        placed = self.store.place(spec.model, spec.files, sliced) / SHARD
        assert tensors_of(placed, 0, LAYERS) == tensors_of(self.folder / "old" / MODEL / SHARD, 0, LAYERS)


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setattr(file_client, "PEER_SILENCE_S", 0.5)
    return House(tmp_path)


async def silent(_: Channel) -> None:
    await trio.sleep_forever()


async def test_what_only_a_follower_has_comes_from_it_whatever_is_wrong_with_the_others(house: House) -> None:
    """One that nobody answers at, one that says nothing, and one that has not got it are passed over."""
    async with trio.open_nursery() as nursery:
        await house.start_coordinator(nursery)
        house.know(Address("127.0.0.1", 9))
        await house.listen(nursery, house.bare, silent)
        await house.start_follower(nursery, house.bare, "no models")
        await house.start_follower(nursery, house.old, "old")
        await house.fetch()
        nursery.cancel_scope.cancel()


async def test_a_follower_is_asked_while_a_peer_that_loads_too_has_nothing_yet(house: House) -> None:
    """That peer is asked again and again, and would have been waited for until it is given up."""
    async with trio.open_nursery() as nursery:
        await house.start_coordinator(nursery)
        await house.start_follower(nursery, house.old, "old")
        store = ShardStore(house.folder / "empty")
        loading = await house.listen(nursery, house.loft, lambda channel: serve_shares(store, channel))
        house.context.roads.known = tuple(at for at in house.known if at != loading)
        began_s = trio.current_time()
        await house.fetch((house.loft.node, str(loading)))
        assert trio.current_time() - began_s < slice_client.PEER_SILENCE_S / 2
        nursery.cancel_scope.cancel()


async def test_a_follower_gives_nothing_of_a_model_that_was_removed_from_the_swarm(house: House) -> None:
    async with trio.open_nursery() as nursery:
        await house.start_coordinator(nursery)
        coordinators = house.document
        house.document = SwarmDocument(removed={house.model.digest: time.time()})
        await house.start_follower(nursery, house.old, "old")
        house.document = coordinators
        with pytest.raises(InvalidModel, match="nor a peer or voter that is connected has"):
            await house.fetch()
        nursery.cancel_scope.cancel()


async def test_a_peer_does_not_pass_for_a_node_that_may_coordinate(house: House) -> None:
    registry = Registry(house.folder / "old")
    async with trio.open_nursery() as nursery:
        await house.start_coordinator(nursery)
        await house.listen(nursery, house.loft, lambda channel: serve_files(registry, channel))
        with pytest.raises(InvalidModel, match="nor a peer or voter that is connected has"):
            await house.fetch()
        nursery.cancel_scope.cancel()


async def test_a_removed_node_gets_nothing_from_a_follower(house: House) -> None:
    house.document.nodes.issued(house.attic.node, "attic", time.time() + 1000)
    house.document.nodes.remove("attic", time.time())
    async with trio.open_nursery() as nursery:
        address = await house.start_follower(nursery, house.old, "old")
        with pytest.raises(NodeRemoved):
            async with house.transport.dial(address, "files", house.attic.identity) as channel:
                await channel.receive()
        nursery.cancel_scope.cancel()


async def test_a_follower_passes_for_the_coordinator_in_nothing_else(house: House) -> None:
    async with trio.open_nursery() as nursery:
        address = await house.start_follower(nursery, house.old, "old")
        for kind in ("control", "requests", "api", "relay"):
            with pytest.raises(NotCoordinator):
                async with house.transport.dial(address, kind, house.attic.identity):
                    pass
        assert not await house.context.roads.better_to_coordinator([address], "polled")
        nursery.cancel_scope.cancel()
