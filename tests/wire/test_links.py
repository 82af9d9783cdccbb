"""What every kind of link does: the same tests over TCP, over in-memory streams with HTTP/2, and over memory links."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from channel_handlers import echo

from swarmnode.errors import InternalError, LinkBroken, Overloaded, ProtocolError, StageLost
from swarmnode.ids import RingId
from swarmnode.wire.address import Address
from swarmnode.wire.connection import BUNDLE_FRAMES, DirectChannel
from swarmnode.wire.deadlines import FRAME_S
from swarmnode.wire.direct import DirectTransport
from swarmnode.wire.frames import Frame, encode_bytes
from swarmnode.wire.limits import STREAM_WINDOW_BYTES
from swarmnode.wire.link import PROTOCOL, Identity, LinkOptions, Parameters
from swarmnode.wire.traffic import Traffic

if TYPE_CHECKING:
    from swarmnode.wire.link import Channel, ChannelHandler, Hello, Transport

ANYWHERE = Address("127.0.0.1", 0)


def tensor(size: int, fill: bytes = b"t") -> Frame:
    rows = {"sessions": [1], "gens": [0], "poss": [0], "ns": [1]}
    shape = [size >> 20, 1 << 20] if size >> 20 << 20 == size else [1, size]
    return Frame("group", {**rows, "dtype": "uint8", "shape": shape, "bytes": size}, fill * size)


async def start(nursery: trio.Nursery, transport: Transport, handler: ChannelHandler, who: Identity) -> Address:
    async def listen(*, task_status: trio.TaskStatus[Address]) -> None:
        await transport.listen(ANYWHERE, handler, who, task_status=task_status)

    address = await nursery.start(listen)
    assert isinstance(address, Address)
    return address


async def test_both_sides_learn_who_is_there(
    transport: Transport, attic: Identity, cellar: Identity, nursery: trio.Nursery
) -> None:
    seen: list[tuple[str, Hello]] = []

    async def note(kind: str, hello: Hello, channel: Channel) -> None:
        seen.append((kind, hello))

    address = await start(nursery, transport, note, cellar)
    parameters = Parameters(RingId("r1"), (3, 1), "act", 2)
    async with transport.dial(address, "steps", attic, LinkOptions(parameters)) as channel:
        assert channel.welcome is not None
        assert channel.welcome.protocol == PROTOCOL[1]
        assert channel.welcome.identity == cellar
        with pytest.raises(trio.EndOfChannel):
            await channel.receive()
    ((kind, hello),) = seen
    assert (kind, hello.identity, hello.parameters) == ("steps", attic, parameters)


@pytest.mark.parametrize("name", ["", "a/../b", "evil\x1b[2J\nfake", "\u202eabc"])
@pytest.mark.parametrize("who", ["dialer", "listener"])
async def test_what_is_no_name_is_refused_on_either_side(
    transport: Transport, attic: Identity, cellar: Identity, nursery: trio.Nursery, who: str, name: str
) -> None:
    served: list[Hello] = []

    async def note(kind: str, hello: Hello, channel: Channel) -> None:
        served.append(hello)

    address = await start(nursery, transport, note, replace(cellar, name=name) if who == "listener" else cellar)
    dialer = replace(attic, name=name) if who == "dialer" else attic
    with pytest.raises(ProtocolError, match="node name"):
        async with transport.dial(address, "control", dialer):
            pytest.fail("it was taken")
    assert who == "listener" or served == []


async def test_frames_come_back_in_order_and_are_counted(
    transport: Transport, attic: Identity, cellar: Identity, nursery: trio.Nursery
) -> None:
    address = await start(nursery, transport, echo, cellar)
    traffic = Traffic()
    options = LinkOptions(Parameters(RingId("r1"), (1, 0), "act", 0), traffic)
    async with transport.dial(address, "steps", attic, options) as channel:
        for number in range(50):
            channel.send_nowait(Frame("end", {"session": number}))
        assert [(await channel.receive()).header["session"] for _ in range(50)] == list(range(50))
    (counted,) = traffic.snapshot()
    assert (counted["kind"], counted["peer"], counted["ring"], counted["lane"]) == ("steps", "node-c", "r1", "act")
    assert counted["frames_out"] == counted["frames_in"] == 51  # hello and welcome are frames, too
    assert int(counted["bytes_out"]) > 50 * len("session")
    traffic.forget_ring("r1")
    assert traffic.snapshot() == []


async def test_frames_sent_together_are_all_sent_or_none(
    transport: Transport, attic: Identity, cellar: Identity, nursery: trio.Nursery
) -> None:
    address = await start(nursery, transport, echo, cellar)
    async with transport.dial(address, "steps", attic) as channel:
        channel.send_nowait(*(Frame("end", {"session": number}) for number in range(5)))
        with pytest.raises(ProtocolError, match="session"):
            channel.send_nowait(Frame("end", {"session": 5}), Frame("end", {"session": -1}))
        channel.send_nowait(Frame("end", {"session": 6}))
        assert [(await channel.receive()).header["session"] for _ in range(6)] == [0, 1, 2, 3, 4, 6]
        assert channel.counts.frames_out == 7


@pytest.mark.parametrize("offered", [True, False])
@pytest.mark.parametrize("in_one_call", [True, False])
async def test_who_reads_many_frames_that_are_at_hand_lets_others_run(
    transport: Transport, attic: Identity, cellar: Identity, nursery: trio.Nursery, offered: bool, in_one_call: bool
) -> None:
    passes_at: list[int] = []
    passes, last = 0, 200

    def take(frame: Frame) -> bool:
        if frame.header["session"] == last:
            return False
        passes_at.append(passes)
        return True

    async def count() -> None:
        nonlocal passes
        while True:
            await trio.lowlevel.checkpoint()
            passes += 1

    async def send(kind: str, hello: Hello, channel: Channel) -> None:
        await channel.receive()
        frames = [Frame("end", {"session": number}) for number in range(last + 1)]
        for some in [frames] if in_one_call else [[frame] for frame in frames]:
            channel.send_nowait(*some)
        await channel.receive()

    address = await start(nursery, transport, send, cellar)
    async with transport.dial(address, "steps", attic) as channel:
        nursery.start_soon(count)
        if offered:
            channel.take_at_once(take)
        await channel.send(Frame("end", {"session": 0}))
        while take(await channel.receive()):
            pass
        assert len(passes_at) == last
        assert all(passes_at.count(one) <= 2 * (BUNDLE_FRAMES + 1) for one in set(passes_at))
        channel.send_nowait(Frame("end", {"session": 0}))


async def test_frames_offered_as_they_arrive_come_once_and_in_order(
    transport: Transport, attic: Identity, cellar: Identity, nursery: trio.Nursery
) -> None:
    got: list[int] = []

    def take(frame: Frame) -> bool:
        if frame.header["session"] % 5 == 0:
            return False
        got.append(frame.header["session"])
        return True

    address = await start(nursery, transport, echo, cellar)
    async with transport.dial(address, "steps", attic) as channel:
        channel.take_at_once(take)
        for number in range(51):
            channel.send_nowait(Frame("end", {"session": number}))
            if number % 7 == 0:
                await trio.testing.wait_all_tasks_blocked(0.001)
        while got[-1:] != [50]:
            got.append((await channel.receive()).header["session"])
    assert got == list(range(51))


async def test_no_frame_is_offered_while_one_that_was_given_out_is_dealt_with(
    transport: Transport, attic: Identity, cellar: Identity, nursery: trio.Nursery
) -> None:
    """It may be unpacked in a thread meanwhile."""
    got: list[int] = []

    def take(frame: Frame) -> bool:
        if frame.header["session"] == 1:
            return False
        got.append(frame.header["session"])
        return True

    address = await start(nursery, transport, echo, cellar)
    async with transport.dial(address, "steps", attic) as channel:
        channel.take_at_once(take)
        channel.send_nowait(Frame("end", {"session": 1}))
        while take(frame := await channel.receive()):
            pass
        for number in (2, 3):
            channel.send_nowait(Frame("end", {"session": number}))
            await trio.testing.wait_all_tasks_blocked(0.01)
        assert got == []
        got.append(frame.header["session"])
        while got[-1:] != [3]:
            got.append((await channel.receive()).header["session"])
    assert got == [1, 2, 3]


async def test_what_goes_wrong_with_an_offered_frame_is_raised_where_frames_are_received(
    attic: Identity, cellar: Identity, nursery: trio.Nursery
) -> None:
    transport = DirectTransport(None)
    address = await start(nursery, transport, echo, cellar)

    def take(frame: Frame) -> bool:
        raise KeyError("a bug")

    async with transport.connect(address, attic) as link, link.open("steps") as other, link.open("steps") as channel:
        channel.take_at_once(take)
        channel.send_nowait(Frame("end", {"session": 1}), Frame("end", {"session": 2}))
        with pytest.raises(KeyError, match="a bug"):
            await channel.receive()
        await other.send(Frame("end", {"session": 3}))
        assert (await other.receive()).header["session"] == 3, "the connection has no part in it"


@pytest.mark.parametrize("transport", ["streams"], indirect=True)
async def test_an_offered_frame_that_comes_in_parts_may_take_its_time_but_not_stop(
    transport: Transport, attic: Identity, cellar: Identity, nursery: trio.Nursery, autojump_clock: object
) -> None:
    got: list[int] = []

    def take(frame: Frame) -> bool:
        got.append(len(frame.body))
        return True

    async def dribble(kind: str, hello: Hello, channel: Channel) -> None:
        assert isinstance(channel, DirectChannel)
        encoded = encode_bytes(tensor(1000))
        for part in (encoded[:300], encoded[300:], encoded[:300]):
            channel._connection.session.send(channel._id, part)
            channel._connection.wake_writer()
            await trio.sleep(FRAME_S / 2)
        await trio.sleep(10 * FRAME_S)

    address = await start(nursery, transport, dribble, cellar)
    async with transport.dial(address, "steps", attic) as channel:
        channel.take_at_once(take)
        begun_s = trio.current_time()
        got.append(len((await channel.receive()).body))
        with pytest.raises(LinkBroken, match="a frame stopped coming"):
            await channel.receive()
        assert got == [1000]
        assert trio.current_time() - begun_s == pytest.approx(2 * FRAME_S)


async def test_a_frame_larger_than_all_windows_passes(
    transport: Transport, attic: Identity, cellar: Identity, nursery: trio.Nursery
) -> None:
    address = await start(nursery, transport, echo, cellar)
    async with transport.dial(address, "prompts", attic) as channel:
        await channel.send(tensor(20 << 20, b"\x07"))
        frame = await channel.receive()
    assert frame == tensor(20 << 20, b"\x07")


async def test_everything_sent_before_a_clean_end_arrives(
    transport: Transport, attic: Identity, cellar: Identity, nursery: trio.Nursery
) -> None:
    got: list[int] = []
    ended = trio.Event()

    async def collect(kind: str, hello: Hello, channel: Channel) -> None:
        got.extend([len(frame.body) async for frame in channel])
        ended.set()

    address = await start(nursery, transport, collect, cellar)
    async with transport.dial(address, "steps", attic) as channel:
        for size in (1, 3 << 20, 17):
            await channel.send(tensor(size))
    await ended.wait()
    assert got == [1, 3 << 20, 17]


async def test_everything_a_handler_sent_before_it_returned_arrives(
    transport: Transport, attic: Identity, cellar: Identity, nursery: trio.Nursery
) -> None:
    async def send_and_leave(kind: str, hello: Hello, channel: Channel) -> None:
        await channel.send(tensor(2 << 20))
        await channel.send(Frame("end", {"session": 1}))

    address = await start(nursery, transport, send_and_leave, cellar)
    async with transport.dial(address, "steps", attic) as channel:
        kinds = [frame.kind async for frame in channel]
        with pytest.raises(LinkBroken):
            await channel.send(Frame("end", {"session": 2}))
    assert kinds == ["group", "end"]


async def start_waiting(nursery: trio.Nursery, transport: Transport, cellar: Identity) -> tuple[trio.Event, Address]:
    """A listener whose channels wait until they break, which is said."""
    broken = trio.Event()

    async def wait_for_the_end(kind: str, hello: Hello, channel: Channel) -> None:
        with pytest.raises(LinkBroken):
            await channel.receive()
        broken.set()

    return broken, await start(nursery, transport, wait_for_the_end, cellar)


async def test_leaving_by_an_error_resets_the_channel_and_raises_that_error(
    transport: Transport, attic: Identity, cellar: Identity, nursery: trio.Nursery
) -> None:
    broken, address = await start_waiting(nursery, transport, cellar)
    with pytest.raises(KeyError, match="mine"):
        async with transport.dial(address, "steps", attic):
            raise KeyError("mine")
    await broken.wait()


async def test_a_cancelled_user_resets_the_channel(
    transport: Transport, attic: Identity, cellar: Identity, nursery: trio.Nursery
) -> None:
    broken, address = await start_waiting(nursery, transport, cellar)
    with trio.CancelScope() as scope:
        async with transport.dial(address, "steps", attic) as channel:
            scope.cancel()
            await channel.receive()
    await broken.wait()


async def test_a_handlers_error_is_raised_at_the_other_side_and_the_listener_goes_on(
    transport: Transport, attic: Identity, cellar: Identity, nursery: trio.Nursery
) -> None:
    async def fail_first(kind: str, hello: Hello, channel: Channel) -> None:
        if kind == "steps":
            raise StageLost("no such ring here")
        if kind == "prompts":
            raise KeyError("a bug")
        await echo(kind, hello, channel)

    address = await start(nursery, transport, fail_first, cellar)
    async with transport.dial(address, "steps", attic) as channel:
        with pytest.raises(StageLost, match="no such ring here"):
            await channel.receive()
    async with transport.dial(address, "prompts", attic) as channel:
        with pytest.raises(InternalError, match="handler failed"):
            await channel.receive()
    async with transport.dial(address, "files", attic) as channel:
        await channel.send(Frame("end", {"session": 1}))
        assert (await channel.receive()).kind == "end"


async def test_a_reader_that_stalls_makes_the_sender_wait(
    transport: Transport, attic: Identity, cellar: Identity, nursery: trio.Nursery
) -> None:
    go = trio.Event()
    got = 0

    async def lazy(kind: str, hello: Hello, channel: Channel) -> None:
        nonlocal got
        await go.wait()
        async for frame in channel:
            got += len(frame.body)

    address = await start(nursery, transport, lazy, cellar)
    async with transport.dial(address, "prompts", attic) as channel:
        sent = 0
        with trio.move_on_after(0.5) as scope:
            while True:
                await channel.send(tensor(1 << 20))
                sent += 1
        assert scope.cancelled_caught
        assert 16 <= sent <= 24  # both queues, and what the kernel holds
        with pytest.raises(Overloaded):
            channel.send_nowait(tensor(1))
        go.set()
        await channel.send(tensor(5))
    await trio.testing.wait_all_tasks_blocked(0.01)
    assert got == (sent << 20) + 5


async def test_a_frame_that_breaks_the_table_is_refused_at_its_sender(
    transport: Transport, attic: Identity, cellar: Identity, nursery: trio.Nursery
) -> None:
    address = await start(nursery, transport, echo, cellar)
    async with transport.dial(address, "steps", attic) as channel:
        with pytest.raises(ProtocolError, match="session=-1"):
            await channel.send(Frame("end", {"session": -1}))
        await channel.send(Frame("end", {"session": 1}))
        assert (await channel.receive()).header == {"session": 1}


@pytest.mark.parametrize(("ours", "theirs"), [((2, 3), (1, 1)), ((1, 1), (2, 2)), ((3, 2), (1, 3))])
async def test_no_common_protocol_is_refused_naming_both(
    transport: Transport,
    attic: Identity,
    cellar: Identity,
    nursery: trio.Nursery,
    ours: tuple[int, int],
    theirs: tuple[int, int],
) -> None:
    old = Identity(cellar.node, cellar.boot, cellar.name, protocol=theirs)
    new = Identity(attic.node, attic.boot, attic.name, protocol=ours)
    address = await start(nursery, transport, echo, old)
    with pytest.raises(ProtocolError, match="no common protocol") as caught:
        async with transport.dial(address, "steps", new):
            pytest.fail("the link came up")
    assert f"the listener speaks {theirs[0]}" in caught.value.message
    assert f"the dialer {ours[0]}" in caught.value.message


async def test_the_newest_common_protocol_is_chosen(
    transport: Transport, attic: Identity, cellar: Identity, nursery: trio.Nursery
) -> None:
    address = await start(nursery, transport, echo, Identity(cellar.node, cellar.boot, "c", protocol=(1, 4)))
    async with transport.dial(address, "steps", Identity(attic.node, attic.boot, "a", protocol=(2, 7))) as channel:
        assert channel.welcome is not None
        assert channel.welcome.protocol == 4


async def test_a_channel_of_an_unknown_kind_is_refused(
    transport: Transport, attic: Identity, cellar: Identity, nursery: trio.Nursery
) -> None:
    address = await start(nursery, transport, echo, cellar)
    with pytest.raises(LinkBroken, match=r"refused a teleport channel with status 404|nobody serves teleport"):
        async with transport.dial(address, "teleport", attic):
            pytest.fail("the link came up")


async def test_who_only_reads_is_heard_by_its_sender(attic: Identity, cellar: Identity, nursery: trio.Nursery) -> None:
    """By the credit that it gives."""
    heard: list[int] = []

    async def give(kind: str, hello: Hello, channel: Channel) -> None:
        for _ in range(4 * STREAM_WINDOW_BYTES >> 20):
            await channel.send(tensor(1 << 20))
            heard.append(channel.heard_bytes)

    transport = DirectTransport(None)
    address = await start(nursery, transport, give, cellar)
    async with transport.dial(address, "steps", attic) as channel:
        async for _ in channel:
            pass
    assert heard[-1] > heard[0]
