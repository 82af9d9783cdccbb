"""A node's end of polled links: the coordinator's API port is all it can reach, so its links travel in requests."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
import trio

from swarmnode.errors import LinkBroken
from swarmnode.wire.deadlines import CHANNEL_CLOSE_S, CONNECT_S, POLL_ANSWER_S, PUSH_S
from swarmnode.wire.nursery import open_flat_nursery
from swarmnode.wire.poll_signature import sign
from swarmnode.wire.polled import BUNDLE_HEADER, PolledStream

if TYPE_CHECKING:
    import ssl

    from swarmnode.ids import NodeId
    from swarmnode.wire.certificates import PrivateKey


@dataclass(frozen=True, slots=True)
class PollingAccess:
    """Where and as whom to poll. `tls` is for an https URL; a tunnel's certificate is the public web's.

    What the requests carry proves its own ends, so a wrong certificate here gives away no more than traffic."""

    url: str
    node: NodeId
    key: PrivateKey
    tls: ssl.SSLContext | bool = True


@asynccontextmanager
async def polled_stream(access: PollingAccess) -> AsyncIterator[PolledStream]:
    """A stream to the coordinator behind `access`; it breaks with the first request that fails."""
    stream = PolledStream()
    async with _client(access) as pushing, _client(access) as popping, open_flat_nursery() as nursery:
        link = _Link(access, secrets.token_hex(16), stream)
        nursery.start_soon(link.push_all, pushing)
        nursery.start_soon(link.pop_all, popping)
        try:
            yield stream
        finally:
            stream.outward.end()
            with trio.move_on_after(CHANNEL_CLOSE_S, shield=True):
                await link.pushed_all.wait()
            link.pushing.cancel()
            nursery.cancel_scope.cancel()


def _client(access: PollingAccess) -> httpx.AsyncClient:
    """One connection each way: a held GET must not stand before a push."""
    return httpx.AsyncClient(
        base_url=access.url, verify=access.tls, trust_env=False, timeout=httpx.Timeout(PUSH_S, connect=CONNECT_S)
    )


class _Link:
    def __init__(self, access: PollingAccess, name: str, stream: PolledStream) -> None:
        self.pushed_all = trio.Event()
        self.pushing = trio.CancelScope(shield=True)
        """Outlives a cancel until the other end has heard of it, which would else hold the link for a minute."""
        self._access = access
        self._name = name
        self._stream = stream
        self._opened = trio.Event()

    async def push_all(self, client: httpx.AsyncClient) -> None:
        """Push what is queued, to its end."""
        try:
            with self.pushing:
                await self._push_until_ended(client)
        except (httpx.HTTPError, LinkBroken) as error:
            self._fail("push", error)
        finally:
            self.pushed_all.set()

    async def _push_until_ended(self, client: httpx.AsyncClient) -> None:
        """One request after the other; the next one takes all that came meanwhile."""
        number, data = 0, b"."
        while data:
            data, frames = await self._stream.outward.take()
            target = f"/api/v1/infer/responses/{self._name}?n={number}"
            headers = {**self._signed("POST", target, data), BUNDLE_HEADER: str(frames)}
            request = client.build_request("POST", target, content=data, headers=headers)
            request.stream = _Body(data)
            answer = await client.send(request)
            _check(answer, (204,))
            self._opened.set()
            number += 1

    async def pop_all(self, client: httpx.AsyncClient) -> None:
        """Always hold a request open for what comes next."""
        await self._opened.wait()
        number = 0
        try:
            while True:
                target = f"/api/v1/infer/requests/{self._access.node}?link={self._name}&n={number}"
                answer = await client.get(target, headers=self._signed("GET", target, b""), timeout=POLL_ANSWER_S)
                _check(answer, (200, 204))
                if answer.status_code == 204:
                    continue
                number += 1
                if not answer.content:
                    self._stream.inward.end()
                    return
                await self._stream.inward.put(answer.content, 0)
        except (httpx.HTTPError, LinkBroken) as error:
            self._fail("poll", error)

    def _signed(self, method: str, target: str, body: bytes) -> dict[str, str]:
        return sign(self._access.key, method, target, body, time.time())

    def _fail(self, what: str, error: Exception) -> None:
        self._opened.set()
        self._stream.fail(f"a {what} to {self._access.url} failed: {error or type(error).__name__}")


class _Body(httpx.AsyncByteStream, AsyncIterator[bytes]):
    """A push's bytes. httpx's own stream is an async generator, which a cancelled push would leave unfinished."""

    def __init__(self, data: bytes) -> None:
        self._parts = [data]

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if not self._parts:
            raise StopAsyncIteration
        return self._parts.pop()


def _check(answer: httpx.Response, allowed: tuple[int, ...]) -> None:
    if answer.status_code not in allowed:
        raise LinkBroken(f"it was answered {answer.status_code}: {answer.text[:300]}")
