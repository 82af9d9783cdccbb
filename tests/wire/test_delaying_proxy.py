"""The delaying proxy delays (a lower bound only: no speed is asserted) and passes every byte and every end on."""

from __future__ import annotations

import os

import pytest
import trio

from benchmarks import proxy
from benchmarks.proxy import ProxiedAddress, delaying_proxy, measure_rtt_ms
from swarmnode.wire.address import Address


async def echo(stream: trio.SocketStream) -> None:
    async with stream:
        async for data in stream:
            await stream.send_all(data)
        await stream.send_eof()


@pytest.mark.parametrize("most_queued", [1 << 30, 100_000])
async def test_every_byte_passes_delayed_and_counted(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, most_queued: int
) -> None:
    monkeypatch.setattr(proxy, "MAX_QUEUED_BYTES", most_queued)
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    await nursery.start(trio.serve_listeners, echo, [listener])
    target = Address(*listener.socket.getsockname()[:2])
    sent = os.urandom(5 << 20)
    got = bytearray()
    async with delaying_proxy(target, 20) as address:
        assert isinstance(address, ProxiedAddress)
        stream = await trio.open_tcp_stream(address.host, address.port)
        async with trio.open_nursery() as sending:

            async def send() -> None:
                await stream.send_all(sent)
                await stream.send_eof()

            sending.start_soon(send)
            async for data in stream:
                got += data
        await stream.aclose()
    assert bytes(got) == sent
    for held in address.held:
        assert held.bytes == len(sent)
        assert held.shortest_ms >= 20


async def test_the_measured_round_trip_is_never_shorter_than_both_delays() -> None:
    assert await measure_rtt_ms(5) >= 10


async def test_a_target_that_is_gone_closes_the_connection(nursery: trio.Nursery) -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    target = Address(*listener.socket.getsockname()[:2])
    await listener.aclose()
    async with (
        delaying_proxy(target, 1) as address,
        await trio.open_tcp_stream(address.host, address.port) as stream,
    ):
        assert await stream.receive_some() == b""
