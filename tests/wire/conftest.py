"""The three ways of joining two nodes that every link test runs over."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from swarmnode.ids import BootId, NodeId
from swarmnode.wire import direct
from swarmnode.wire.link import NO_OPTIONS, Channel, Identity, LinkOptions
from swarmnode.wire.memory import MemoryNetwork

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from swarmnode.wire.address import Address
    from swarmnode.wire.link import ChannelHandler, Transport
    from swarmnode.wire.traffic import Traffic


class StreamNetwork:
    """Real connections over trio's in-memory streams: HTTP/2 and all, but under virtual time."""

    def __init__(self) -> None:
        self._servers: dict[Address, tuple[direct.Server, trio.Nursery]] = {}

    def dial(
        self, address: Address, kind: str, identity: Identity, options: LinkOptions = NO_OPTIONS
    ) -> AbstractAsyncContextManager[Channel]:
        return self._dial(address, kind, identity, options)

    @asynccontextmanager
    async def _dial(
        self, address: Address, kind: str, identity: Identity, options: LinkOptions
    ) -> AsyncIterator[Channel]:
        near, far = trio.testing.memory_stream_pair()
        server, nursery = self._servers[address]
        nursery.start_soon(server.serve, far)
        async with direct.dial_over(near, kind, identity, options) as channel:
            yield channel

    async def listen(
        self,
        address: Address,
        handler: ChannelHandler,
        identity: Identity,
        *,
        traffic: Traffic | None = None,
        task_status: trio.TaskStatus[Address] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        async with trio.open_nursery() as nursery:
            self._servers[address] = direct.Server(handler, identity, traffic), nursery
            task_status.started(address)
            await trio.sleep_forever()


@pytest.fixture(params=["tcp", "streams", "memory"])
def transport(request: pytest.FixtureRequest) -> Transport:
    return {"tcp": direct.DirectTransport(None), "streams": StreamNetwork(), "memory": MemoryNetwork()}[request.param]


@pytest.fixture
def attic() -> Identity:
    return Identity(NodeId("node-a"), BootId("boot-a"), "attic", ("peer",), ("bfloat16",), 3, ("127.0.0.1:4001",))


@pytest.fixture
def cellar() -> Identity:
    return Identity(NodeId("node-c"), BootId("boot-c"), "cellar", capabilities=("float32",), term=4)
