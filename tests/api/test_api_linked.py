"""Clients that come over another node's link: the same API on any stream, and a node's share of it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
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


class Links:
    """A server without a port, and what clients of nodes see of it."""

    def __init__(self, nursery: trio.Nursery, raw_over: Callable[[Any], Any]) -> None:
        self.backend = ReplayBackend()
        self._raw_over = raw_over
        self._nursery = nursery
        self._server = ApiServer(create_app(self.backend), replace(DEFAULT_LIMITS, node_connections=SHARE))

    def client(self, via: str | None) -> Any:
        near, far = trio.testing.memory_stream_pair()

        def abort() -> None:
            far.send_stream.close()
            far.receive_stream.close()

        self._nursery.start_soon(self._server.serve, Client(far, abort, via=via))
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
