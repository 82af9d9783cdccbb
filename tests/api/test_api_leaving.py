"""Clients that leave, clients that stop reading, and a server that ends in spite of them."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import trio

from swarmnode.api.replay import Replay

CHAT = "/v1/chat/completions"
PHASES = {"accept": "accept_s", "queue": "queue_s", "prefill": "prefill_s", "decode": "token_s"}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", PHASES)
async def test_a_client_that_leaves_cancels_its_request(
    gateway: Any, body: Any, until: Any, phase: str, stream: bool
) -> None:
    """Row 56 and G4: in the queue, in prefill and in decode, streaming or not."""
    gateway.backend.replay = replace(Replay(), **{PHASES[phase]: None})
    raw = await gateway.raw()
    await raw.post(CHAT, body(stream=stream))
    await until(lambda: gateway.backend.phase == phase)
    assert gateway.backend.open == 1
    await trio.aclose_forcefully(raw.stream)
    await until(lambda: gateway.backend.open == 0)
    assert (gateway.backend.cancelled, gateway.backend.finished, gateway.backend.failed) == (1, 0, 0)


async def test_leaving_between_tokens(gateway: Any, body: Any, until: Any) -> None:
    """Row 56: close after three chunks; the next request is served at once."""
    gateway.backend.replay = Replay(texts=("x",) * 100_000, token_s=0.001)
    raw = await gateway.raw()
    await raw.post(CHAT, body(stream=True))
    for _ in range(3):
        await raw.until(b'"content":"x"')
    await trio.aclose_forcefully(raw.stream)
    await until(lambda: gateway.backend.open == 0)
    assert gateway.backend.cancelled == 1
    gateway.backend.replay = Replay()
    assert (await gateway.chat()).status_code == 200


async def test_a_reset_is_leaving_too(gateway: Any, body: Any, until: Any) -> None:
    import socket
    import struct

    gateway.backend.replay = Replay(prefill_s=None)
    raw = await gateway.raw()
    await raw.post(CHAT, body(stream=True))
    await until(lambda: gateway.backend.phase == "prefill")
    raw.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await trio.aclose_forcefully(raw.stream)
    await until(lambda: gateway.backend.cancelled == 1)


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_behind_pipelined_bytes(gateway: Any, body: Any, until: Any, stream: bool) -> None:
    """The protocol does not take the next request before this one is over, but the end is seen all the same."""
    gateway.backend.replay = Replay(prefill_s=None)
    raw = await gateway.raw()
    await raw.post(CHAT, body(stream=stream))
    await raw.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    await until(lambda: gateway.backend.phase == "prefill")
    await trio.aclose_forcefully(raw.stream)
    await until(lambda: gateway.backend.open == 0)
    assert gateway.backend.cancelled == 1


async def test_leaving_during_the_body_opens_nothing(gateway: Any, until: Any) -> None:
    raw = await gateway.raw()
    await raw.send(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n".encode() + b"{")
    await trio.sleep(0.02)
    await trio.aclose_forcefully(raw.stream)
    assert (await gateway.client.get("/health")).status_code == 200
    assert gateway.backend.requests == []


async def test_others_go_on_when_one_leaves(gateway: Any, body: Any, until: Any) -> None:
    gateway.backend.replay = Replay(texts=("x",) * 20, token_s=0.01)
    replies: list[Any] = []

    async def stay() -> None:
        replies.append(await gateway.chat(stream=True))

    async with trio.open_nursery() as nursery:
        raws = [await gateway.raw() for _ in range(5)]
        for raw in raws:
            await raw.post(CHAT, body(stream=True))
            nursery.start_soon(stay)
        await until(lambda: gateway.backend.open == 10)
        for raw in raws:
            await trio.aclose_forcefully(raw.stream)
    assert [reply.text.count('"content":"x"') for reply in replies] == [20] * 5
    await until(lambda: gateway.backend.open == 0)
    assert (gateway.backend.cancelled, gateway.backend.finished) == (5, 5)


async def _stalled(gateway: Any, body: Any, until: Any) -> None:
    """A client that asked for megabytes and reads none of them."""
    gateway.backend.replay = Replay(texts=("x" * 4096,) * 20_000)
    raw = await gateway.raw()
    await raw.post(CHAT, body(stream=True))
    await until(lambda: gateway.backend.open == 1)
    await trio.sleep(0.2)
    assert gateway.backend.open == 1


async def test_a_client_that_stops_reading_is_dropped(gateway: Any, body: Any, until: Any) -> None:
    """Its buffer is bounded, and after write_s its request is cancelled."""
    await _stalled(gateway, body, until)
    await until(lambda: gateway.backend.open == 0)
    assert gateway.backend.cancelled == 1


@pytest.mark.parametrize("gateway", [{"write_s": 60.0}], indirect=True)
async def test_the_server_ends_with_a_stalled_client(gateway: Any, body: Any, until: Any) -> None:
    """DESIGN section 6: hypercorn's own serve would never return here."""
    await _stalled(gateway, body, until)
    gateway.scope.cancel()
    with trio.fail_after(2):
        await gateway.ended.wait()
    assert gateway.backend.open == 0


async def test_the_server_ends_with_idle_and_busy_clients(gateway: Any, body: Any, until: Any) -> None:
    gateway.backend.replay = Replay(token_s=None)
    idle, busy = await gateway.raw(), await gateway.raw()
    await idle.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    await idle.reply()
    await busy.post(CHAT, body(stream=True))
    await until(lambda: gateway.backend.phase == "decode")
    gateway.scope.cancel()
    with trio.fail_after(2):
        reply = await busy.reply()
        await gateway.ended.wait()
        assert await idle.until(b"never") == b""
    assert (reply.status, reply.complete) == (200, False)
    assert gateway.backend.cancelled == 1


async def test_a_running_reply_may_finish_when_the_server_ends(gateway: Any, body: Any, until: Any) -> None:
    gateway.backend.replay = Replay(texts=("x",) * 4, token_s=0.03)
    raw = await gateway.raw()
    await raw.post(CHAT, body(stream=True))
    await until(lambda: gateway.backend.open == 1)
    gateway.scope.cancel()
    with trio.fail_after(2):
        reply = await raw.reply()
    assert reply.complete
    assert reply.body.endswith(b"data: [DONE]\n\n")
    with pytest.raises(OSError):
        await trio.open_tcp_stream("127.0.0.1", gateway.port)


@pytest.mark.parametrize("seed", range(3))
async def test_any_mix_of_clients_leaves_nothing_behind(gateway: Any, body: Any, until: Any, seed: int) -> None:
    """Clients that stay, leave at any moment, reset, or never finish their request: afterwards nothing is open."""
    random = Random(seed)
    gateway.backend.replay = Replay(
        texts=("x",) * 10, accept_s=0.005, queue_s=0.005, prefill_s=0.01, token_s=0.003, error_after=8
    )

    async def visit(stays: bool, stream: bool, cut: int | None, leaves_s: float) -> None:
        raw = await gateway.raw()
        request = json.dumps(body(stream=stream)).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(request)}\r\n\r\n".encode()
        await raw.send((head + request)[:cut])
        if stays and cut is None:
            assert (await raw.reply()).complete
        else:
            await trio.sleep(leaves_s)
        await trio.aclose_forcefully(raw.stream)

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            for _ in range(80):
                cut = random.choice([None, None, None, random.randrange(1, 150)])
                nursery.start_soon(visit, random.random() < 0.4, random.random() < 0.7, cut, random.uniform(0, 0.1))
                await trio.sleep(random.uniform(0, 0.005))
    backend = gateway.backend
    await until(lambda: backend.open == 0)
    assert backend.finished + backend.cancelled == len(backend.requests) > 20
    assert backend.cancelled > 0
    assert backend.failed == 0
    backend.replay = Replay()
    assert (await gateway.chat()).status_code == 200
