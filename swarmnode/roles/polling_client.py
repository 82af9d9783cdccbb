"""A node's end of polled links: the coordinator's API port is all it can reach, so its links travel in requests."""

from __future__ import annotations

import json
import secrets
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio

from swarmnode.errors import LinkBroken, NodeRemoved, SwarmError
from swarmnode.wire.deadlines import CHANNEL_CLOSE_S, POLL_ANSWER_S, PUSH_S
from swarmnode.wire.kept_http import kept_connection
from swarmnode.wire.nursery import open_flat_nursery
from swarmnode.wire.poll_signature import Signer
from swarmnode.wire.polled import BUNDLE_HEADER, MAX_BODY_BYTES, PolledStream, let_on

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

    from swarmnode.ids import NodeId
    from swarmnode.wire.certificates import PrivateKey
    from swarmnode.wire.kept_http import Answer, KeptConnection


@dataclass(frozen=True, slots=True)
class PollingAccess:
    """Where and as whom to poll. `tls` is for an https URL; None: a tunnel's certificate is the public web's.

    What the requests carry proves its own ends, so a wrong certificate here gives away no more than traffic."""

    url: str
    node: NodeId
    key: PrivateKey
    tls: ssl.SSLContext | None = None


@asynccontextmanager
async def polled_stream(access: PollingAccess) -> AsyncIterator[PolledStream]:
    """A stream to the coordinator behind `access`; it breaks with the first request that fails.

    Raises NodeRemoved in place of what the block fails with, where that is why the stream broke. Whoever holds the way
    there can say so, too; he could as well cut it."""
    stream = PolledStream()
    async with _client(access) as pushing, _client(access) as popping, open_flat_nursery() as nursery:
        link = _Link(access, secrets.token_hex(16), stream)
        nursery.start_soon(link.push_all, pushing)
        nursery.start_soon(link.pop_all, popping)
        try:
            yield stream
        except SwarmError:
            if link.removed is not None:
                raise link.removed from None
            raise
        finally:
            stream.outward.end()
            with trio.move_on_after(CHANNEL_CLOSE_S, shield=True):
                await link.pushed_all.wait()
            link.pushing.cancel()
            nursery.cancel_scope.cancel()


def _client(access: PollingAccess) -> AbstractAsyncContextManager[KeptConnection]:
    """One connection each way: a held GET must not stand before a push."""
    return kept_connection(access.url, access.tls, MAX_BODY_BYTES)


class _Link:
    def __init__(self, access: PollingAccess, name: str, stream: PolledStream) -> None:
        self.removed: NodeRemoved | None = None
        """What the coordinator refused this node's requests with, if it was that."""
        self.pushed_all = trio.Event()
        self.pushing = trio.CancelScope(shield=True)
        """Outlives a cancel until the other end has heard of it, which would else hold the link for a minute."""
        self._access = access
        self._signer = Signer(access.key)
        self._name = name
        self._stream = stream
        self._opened = trio.Event()

    async def push_all(self, client: KeptConnection) -> None:
        """Push what is queued, to its end."""
        try:
            with self.pushing:
                await self._push_until_ended(client)
        except (trio.TooSlowError, LinkBroken, NodeRemoved) as error:
            self._fail("push", error)
        finally:
            self.pushed_all.set()

    async def _push_until_ended(self, client: KeptConnection) -> None:
        """One request after the other; the next one takes all that came meanwhile."""
        number, data = 0, b"."
        while data:
            data, frames = await self._stream.outward.take()
            target = f"/api/v1/infer/responses/{self._name}?n={number}"
            headers = {**self._signer.sign("POST", target, data, time.time()), BUNDLE_HEADER: str(frames)}
            with trio.fail_after(PUSH_S):
                await client.ask("POST", target, headers, data)
            with trio.fail_after(PUSH_S):
                _check(await client.answer(), (204,))
            self._opened.set()
            number += 1

    async def pop_all(self, client: KeptConnection) -> None:
        """Always hold a request open for what comes next."""
        await self._opened.wait()
        number = 0
        try:
            while True:
                answer = await self._pop(client, number)
                number += 1
                if answer.status == 204:
                    continue
                if not answer.body:
                    self._stream.inward.end()
                    return
                await self._stream.inward.put(answer.body, 0)
                await let_on()
        except (trio.TooSlowError, LinkBroken, NodeRemoved) as error:
            self._fail("poll", error)

    async def _pop(self, client: KeptConnection, number: int) -> Answer:
        target = f"/api/v1/infer/requests/{self._access.node}?link={self._name}&n={number}"
        with trio.fail_after(PUSH_S):
            await client.ask("GET", target, self._signer.sign("GET", target, b"", time.time()))
        with trio.fail_after(POLL_ANSWER_S):
            answer = await client.answer()
        _check(answer, (200, 204))
        return answer

    def _fail(self, what: str, error: Exception) -> None:
        if isinstance(error, NodeRemoved):
            self.removed = error
        self._opened.set()
        self._stream.fail(f"a {what} to {self._access.url} failed: {error or type(error).__name__}")


def _check(answer: Answer, allowed: tuple[int, ...]) -> None:
    if answer.status in allowed:
        return
    if answer.status == NodeRemoved.status and (message := _removal(answer.body)) is not None:
        raise NodeRemoved(message)
    raise LinkBroken(f"it was answered {answer.status}: {answer.body[:300].decode('utf-8', 'replace')}")


def _removal(body: bytes) -> str | None:
    """The message of an error body that says so. The server may be a tunnel's, and its body anything."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"]) if error["code"] == NodeRemoved.code else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
