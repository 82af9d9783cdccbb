"""Clients that come over another node's link: the same API on any stream, and a node's share of it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from swarmnode.api.app import create_app
from swarmnode.api.connection import Client
from swarmnode.api.limits import DEFAULT_LIMITS
from swarmnode.api.replay import Replay, ReplayBackend
from swarmnode.api.server import ApiServer

if TYPE_CHECKING:
    from collections.abc import Callable

CHAT = "/v1/chat/completions"
SHARE = 3


class OneAtATime(trio.abc.HalfCloseableStream):
    """A stream that takes a moment for everything it sends and, like a socket, minds two senders at once."""

    def __init__(self, stream: trio.StapledStream[Any, Any]) -> None:
        self._stream = stream
        self._sending = False

    async def _alone(self, send: Callable[[], Any]) -> None:
        if self._sending:
            raise trio.BusyResourceError("another task is sending")
        self._sending = True
        try:
            await trio.sleep(0.1)
            await send()
        finally:
            self._sending = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._alone(partial(self._stream.send_all, data))

    async def send_eof(self) -> None:
        await self._alone(self._stream.send_eof)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        await self._stream.aclose()


class Links:
    """A server without a port, and what clients of nodes see of it."""

    def __init__(self, nursery: trio.Nursery, raw_over: Callable[[Any], Any]) -> None:
        self.backend = ReplayBackend()
        self._raw_over = raw_over
        self._nursery = nursery
        limits = replace(DEFAULT_LIMITS, node_connections=SHARE, link_connections=4, connections=8, local_connections=2)
        self._server = ApiServer(create_app(self.backend), limits)

    def client(self, via: str | None, host: str = "192.168.1.9", *, slow: bool = False) -> Any:
        near, far = trio.testing.memory_stream_pair()

        def abort() -> None:
            far.send_stream.close()
            far.receive_stream.close()

        stream = OneAtATime(far) if slow else far
        self._nursery.start_soon(self._server.serve, Client(stream, abort, (host, 40_000), via=via))
        return self._raw_over(near)


@pytest.fixture
def links(nursery: trio.Nursery, raw_over: Callable[[Any], Any]) -> Links:
    return Links(nursery, raw_over)


async def test_a_call_over_a_link_is_answered_as_on_the_port(links: Links) -> None:
    raw = links.client("den")
    await raw.send(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    reply = await raw.reply()
    assert (reply.status, reply.complete) == (200, True)
    with trio.fail_after(5):
        assert await raw.until(b"never") == b""


async def test_one_node_has_its_share_and_no_more(links: Links, body: Any, until: Any) -> None:
    """Not even by calls that are answered never; the next goes as soon as one of its own has ended."""
    links.backend.replay = Replay(prefill_s=None)
    busy = [links.client("den") for _ in range(SHARE)]
    for raw in busy:
        await raw.post(CHAT, body())
    await until(lambda: links.backend.open == SHARE)
    with trio.fail_after(5), suppress(trio.BrokenResourceError):
        assert await links.client("den").until(b"never") == b""
    for other in ("attic", None):
        raw = links.client(other)
        await raw.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert (await raw.reply()).status == 200
    await trio.aclose_forcefully(busy[0].stream)
    await until(lambda: links.backend.open == SHARE - 1)
    await trio.testing.wait_all_tasks_blocked()
    raw = links.client("den")
    await raw.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await raw.reply()).status == 200


SLOW = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 400\r\n\r\n{"
)
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


async def answers(raw: Any) -> bool:
    """Whether a client has a place."""
    with trio.move_on_after(5), suppress(trio.BrokenResourceError):
        await raw.send(HEALTH)
        return (await raw.until(b"\r\n")).startswith(b"HTTP/1.1 200")
    return False


async def ended(raw: Any) -> bool:
    await trio.testing.wait_all_tasks_blocked()
    with trio.move_on_after(0.1), suppress(trio.BrokenResourceError):
        return await raw.until(b"never") == b""
    return False


async def test_nodes_together_leave_the_port_as_many_places_as_they_have(links: Links, body: Any, until: Any) -> None:
    links.backend.replay = Replay(prefill_s=None)
    for node in ("den", "den", "attic", "attic"):
        await links.client(node).post(CHAT, body())
    await until(lambda: links.backend.open == 4)
    assert not await answers(links.client("cellar"))
    assert await answers(links.client(None))


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "127.3.2.1"])
async def test_places_are_kept_for_callers_on_this_machine(links: Links, body: Any, until: Any, host: str) -> None:
    """Others, busy for ever, take all the rest and no more."""
    links.backend.replay = Replay(prefill_s=None)
    for _ in range(6):
        await links.client(None).post(CHAT, body())
    await until(lambda: links.backend.open == 6)
    assert not await answers(links.client(None))
    assert not await answers(links.client("den"))
    assert await answers(links.client(None, host))


@pytest.mark.parametrize("via", [None, "den"])
async def test_a_slow_body_gives_way_to_whoever_comes(links: Links, autojump_clock: object, via: str | None) -> None:
    """A member, or a token's owner, that fills its places with bodies that drip keeps nobody out."""
    dripping = [links.client(via) for _ in range(6 if via is None else SHARE)]
    for raw in dripping:
        await raw.send(SLOW)
        await trio.sleep(0.01)
    await trio.testing.wait_all_tasks_blocked()
    await dripping[0].send(b" ")
    await trio.testing.wait_all_tasks_blocked()
    assert await answers(links.client(via))
    assert await ended(dripping[1])
    assert not await ended(dripping[0])


async def test_a_client_that_leaves_an_oversized_body_is_no_error(
    links: Links, caplog: pytest.LogCaptureFixture, autojump_clock: object
) -> None:
    """Its end comes while the refusal is being finished: two tasks must not write at once."""
    raw = links.client(None, slow=True)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    await raw.send(head + b"Content-Length: 100000000\r\n\r\n" + b"x" * 1000)
    assert (await raw.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 413")
    await raw.stream.send_eof()
    await raw.until(b"never")
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
