"""Memory links under virtual time: latency is the queue's own, faults are explicit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from channel_handlers import echo

from swarmnode.errors import LinkBroken
from swarmnode.wire.address import Address
from swarmnode.wire.frames import Frame
from swarmnode.wire.memory import MemoryNetwork, memory_pair

if TYPE_CHECKING:
    from swarmnode.wire.link import Channel, Hello, Identity


def end(number: int) -> Frame:
    return Frame("end", {"session": number})


async def test_latency_delays_every_frame_and_holds_up_no_sender(autojump_clock: object) -> None:
    one, other = memory_pair(latency_s=0.03)
    started = trio.current_time()
    for number in range(100):
        await one.send(end(number))
    assert trio.current_time() == started
    for number in range(100):
        assert await other.receive() == end(number)
    assert trio.current_time() - started == pytest.approx(0.03)


async def test_a_round_trip_takes_twice_the_latency(
    autojump_clock: object, attic: Identity, cellar: Identity, nursery: trio.Nursery
) -> None:
    network = MemoryNetwork(latency_s=0.05)

    async def listen(*, task_status: trio.TaskStatus[Address]) -> None:
        await network.listen(Address("127.0.0.1", 0), echo, cellar, task_status=task_status)

    address = await nursery.start(listen)
    started = trio.current_time()
    async with network.dial(address, "steps", attic) as channel:
        assert trio.current_time() - started == pytest.approx(0.2)  # connect and hello: a round trip each
        for _ in range(3):
            started = trio.current_time()
            await channel.send(end(1))
            await channel.receive()
            assert trio.current_time() - started == pytest.approx(0.1)


async def test_a_broken_link_loses_what_is_under_way_at_both_ends(autojump_clock: object) -> None:
    one, other = memory_pair(latency_s=1)
    await one.send(end(1))
    one.break_link("cable cut")
    for channel in (one, other):
        with pytest.raises(LinkBroken, match="cable cut"):
            await channel.receive()
        with pytest.raises(LinkBroken, match="cable cut"):
            await channel.send(end(2))


async def test_what_was_sent_before_an_abort_still_arrives(autojump_clock: object) -> None:
    one, other = memory_pair(latency_s=0.5)
    await one.send(end(1))
    one.abort()
    assert await other.receive() == end(1)
    with pytest.raises(LinkBroken, match="reset"):
        await other.receive()


async def test_an_unknown_address_and_one_in_use(attic: Identity, nursery: trio.Nursery) -> None:
    network = MemoryNetwork()

    async def ignore(kind: str, hello: Hello, channel: Channel) -> None:
        pass

    async def listen(*, task_status: trio.TaskStatus[Address]) -> None:
        await network.listen(Address("127.0.0.1", 7), ignore, attic, task_status=task_status)

    with pytest.raises(LinkBroken, match=r"cannot connect to 127\.0\.0\.1:7"):
        async with network.dial(Address("127.0.0.1", 7), "steps", attic):
            pytest.fail("the link came up")
    await nursery.start(listen)
    with pytest.raises(LinkBroken, match="in use"):
        await network.listen(Address("127.0.0.1", 7), ignore, attic)
