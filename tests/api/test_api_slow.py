"""Clients that open a connection and then take their time: headers, TLS handshakes, idle sockets."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import trio

from swarmnode.api.limits import DEFAULT_LIMITS


async def drip(raw: Any, data: bytes) -> None:
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        for byte in data:
            await raw.send(bytes([byte]))
            await trio.sleep(0.02)


SHORT = pytest.mark.parametrize("gateway", [{"header_s": 0.3}], indirect=True)


@SHORT
@pytest.mark.parametrize("start", [b"G", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nX: "])
async def test_headers_have_a_deadline(gateway: Any, start: bytes) -> None:
    """Slowloris: a byte now and then does not buy time."""
    raw = await gateway.raw()
    await raw.send(start)
    began_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(drip, raw, b"y" * 1000)
        with trio.fail_after(5), suppress(trio.BrokenResourceError):
            assert await raw.until(b"never") == b""
        nursery.cancel_scope.cancel()
    assert trio.current_time() - began_s >= 0.25, "not before its deadline"


@SHORT
async def test_the_second_request_of_a_connection_has_it_too(gateway: Any) -> None:
    raw = await gateway.raw()
    await raw.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await raw.reply()).status == 200
    await raw.send(b"GET /health HTTP/1.1\r\n")
    with trio.fail_after(5), suppress(trio.BrokenResourceError):
        assert await raw.until(b"never") == b""


@SHORT
async def test_an_idle_connection_and_a_slow_reply_do_not_have_it(gateway: Any, body: Any) -> None:
    from swarmnode.api.replay import Replay

    gateway.backend.replay = Replay(prefill_s=0.5)
    raw = await gateway.raw()
    await trio.sleep(0.5)
    await raw.post("/v1/chat/completions", body())
    assert (await raw.reply()).status == 200
    await trio.sleep(0.5)
    await raw.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await raw.reply()).status == 200


def test_the_deadlines_that_nodes_run_with() -> None:
    assert (DEFAULT_LIMITS.header_s, DEFAULT_LIMITS.handshake_s) == (10.0, 10.0)
    assert DEFAULT_LIMITS.cut_s < 4.0


FEW = pytest.mark.parametrize("gateway", [{"connections": 3}], indirect=True)


async def gone(raw: Any) -> bool:
    """Whether the server has ended a connection."""
    with trio.move_on_after(0.2), suppress(trio.BrokenResourceError):
        assert await raw.until(b"never") == b""
        return True
    return False


@FEW
async def test_beyond_the_limit_the_longest_idle_connection_makes_room(gateway: Any, body: Any) -> None:
    from swarmnode.api.replay import Replay

    gateway.backend.replay = Replay(prefill_s=0.5)
    busy = await gateway.raw()
    await busy.post("/v1/chat/completions", body())
    idle = [await gateway.raw() for _ in range(2)]
    await idle[1].send(b"GET /hea")
    await trio.sleep(0.1)
    fresh = await gateway.raw()
    await fresh.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await fresh.reply()).status == 200
    assert await gone(idle[0])
    assert not await gone(idle[1])
    another = await gateway.raw()
    await another.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await another.reply()).status == 200
    assert await gone(idle[1])
    assert (await busy.reply()).status == 200


@FEW
async def test_a_client_in_use_outlives_newer_connections_that_never_asked(gateway: Any) -> None:
    client = await gateway.raw()
    for _ in range(6):
        await gateway.raw()
        await trio.sleep(0.05)
        await client.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await client.reply()).status == 200


@FEW
async def test_busy_connections_are_never_ended_for_a_new_one(gateway: Any, body: Any) -> None:
    from swarmnode.api.replay import Replay

    gateway.backend.replay = Replay(prefill_s=0.6)
    busy = [await gateway.raw() for _ in range(3)]
    for raw in busy:
        await raw.post("/v1/chat/completions", body())
    await trio.sleep(0.1)
    assert await gone(await gateway.raw())
    for raw in busy:
        assert (await raw.reply()).status == 200
