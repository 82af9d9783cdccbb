"""Writing without waiting: every byte in order whatever the socket takes at once, and the same errors as trio's."""

from __future__ import annotations

import random
import socket

import pytest
import trio
import trio.testing

from swarmnode.wire.prompt import PromptStream


def pair() -> tuple[trio.SocketStream, trio.SocketStream]:
    near, far = trio.socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return trio.SocketStream(near), trio.SocketStream(far)


async def collect(stream: PromptStream, size: int) -> bytes:
    got = bytearray()
    while len(got) < size:
        got += await stream.receive_some(10_000)
    return bytes(got)


@pytest.mark.parametrize("sizes", [[1, 2, 3], [100_000], [10, 100_000, 10], [50_000] * 4])
async def test_what_the_socket_does_not_take_at_once_comes_later_and_in_order(sizes: list[int]) -> None:
    near, far = pair()
    data = [random.Random(n).randbytes(size) for n, size in enumerate(sizes)]
    async with near, far, trio.open_nursery() as nursery:
        stream = PromptStream(near)
        whole = [stream.send_now(part) for part in data]
        assert whole == sorted(whole, reverse=True), "nothing overtakes what is left"
        nursery.start_soon(stream.send_all, b"last")
        assert await collect(PromptStream(far), sum(sizes) + 4) == b"".join(data) + b"last"


async def test_other_streams_leave_it_all_to_the_sender() -> None:
    near, far = trio.testing.memory_stream_pair()
    stream = PromptStream(near)
    assert not stream.send_now(b"one")
    assert not stream.send_now(b"two")
    await stream.send_all(b"three")
    assert await PromptStream(far).receive_some(100) == b"onetwothree"


async def test_a_reader_wakes_for_bytes_for_the_end_and_for_its_own_close() -> None:
    near, far = pair()
    stream = PromptStream(near)
    async with trio.open_nursery() as nursery:
        for data in (b"a", b"bb", b"ccc"):
            nursery.start_soon(far.send_all, data)
            with trio.fail_after(2):
                assert await stream.receive_some(100) == data
        await far.aclose()
        with trio.fail_after(2):
            assert await stream.receive_some(100) == b""
            assert await stream.receive_some(100) == b""
    await near.aclose()
    near, far = pair()
    stream = PromptStream(near)
    async with far, trio.open_nursery() as nursery:

        async def read() -> None:
            with pytest.raises(trio.ClosedResourceError):
                await stream.receive_some(100)

        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        await near.aclose()


async def test_a_stream_that_ended_takes_nothing() -> None:
    near, far = pair()
    stream = PromptStream(near)
    await far.aclose()
    with pytest.raises(trio.BrokenResourceError):
        stream.send_now(b"x")
    await near.aclose()
    with pytest.raises(trio.ClosedResourceError):
        stream.send_now(b"x")
    with pytest.raises(trio.ClosedResourceError):
        await stream.receive_some(100)


async def test_a_full_read_does_not_wait_and_still_lets_others_run() -> None:
    near, far = pair()
    async with near, far, trio.open_nursery() as nursery:
        nursery.start_soon(near.send_all, bytes(50_000))
        stream = PromptStream(far)
        ran = 0

        async def other() -> None:
            nonlocal ran
            while True:
                ran += 1
                await trio.lowlevel.checkpoint()

        nursery.start_soon(other)
        for _ in range(50):
            assert await stream.receive_some(1000)
        assert ran > 20
        nursery.cancel_scope.cancel()
