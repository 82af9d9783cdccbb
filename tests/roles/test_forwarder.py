"""A peer's API port: calls reach the coordinator's gateway unchanged, part by part, and end when either side does."""

from __future__ import annotations

import json
from contextlib import aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import trio

from swarmnode.api.app import create_app
from swarmnode.api.auth import Credentials
from swarmnode.api.hosts import host_rules
from swarmnode.api.replay import Replay, ReplayBackend
from swarmnode.api.server import open_api_listeners, serve_api
from swarmnode.cluster.token_book import Scope
from swarmnode.roles.forwarder import Forwarder
from swarmnode.roles.token_store import TokenStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CHAT = "/v1/chat/completions"
RULES = host_rules("127.0.0.1")


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "replay-1", "messages": [{"role": "user", "content": "hi"}], **fields}


async def serve(app: Any, nursery: trio.Nursery) -> str:
    [(host, port)] = await nursery.start(serve_api, app, await open_api_listeners("127.0.0.1", 0))
    return f"http://{host}:{port}"


class World:
    """A gateway, a forwarder in front of it, and a client of the forwarder."""

    def __init__(self, backend: ReplayBackend, store: TokenStore, forwarder: Forwarder, urls: tuple[str, str]) -> None:
        self.backend, self.store, self.forwarder = backend, store, forwarder
        self.upstream, self.url = urls
        self.client = httpx.AsyncClient(base_url=self.url, trust_env=False, verify=False, timeout=10)

    async def until(self, count: int) -> None:
        with trio.fail_after(5):
            while self.backend.open != count:  # noqa: ASYNC110 - what is awaited counts without events
                await trio.sleep(0.002)


@asynccontextmanager
async def world(tmp_path: Path, *, closed: bool = False) -> AsyncIterator[World]:
    backend, store = ReplayBackend(), TokenStore(tmp_path / "tokens.json", required=False)
    forwarder = Forwarder(closed=closed)
    async with trio.open_nursery() as nursery:
        app = create_app(backend, hosts=RULES, credentials=Credentials(store, "local"))
        urls = await serve(app, nursery), await serve(forwarder.app(RULES), nursery)
        found = World(backend, store, forwarder, urls)
        forwarder.connect(urls[0], None)
        await nursery.start(forwarder.run)
        async with found.client:
            yield found
        nursery.cancel_scope.cancel()


async def test_calls_and_errors_come_back_unchanged(tmp_path: Path) -> None:
    async with world(tmp_path) as swarm, httpx.AsyncClient(base_url=swarm.upstream, trust_env=False) as direct:
        for method, path, body in (
            ("GET", "/v1/models", None),
            ("GET", "/v1/models/none?x=%2F&y=é", None),
            ("HEAD", "/v1/models", None),
            ("PUT", "/v1/models", None),
            ("POST", CHAT, {"model": "replay-1"}),
            ("POST", "/api/v1/models/replay-1/load", {}),
            ("DELETE", "/api/v1/api-tokens/x", None),
            ("GET", "/api/v1/models/replay-1/archive", None),
        ):
            there = await direct.request(method, path, json=body)
            here = await swarm.client.request(method, path, json=body)
            assert (here.status_code, here.content) == (there.status_code, there.content)
            for header in ("content-type", "content-length", "allow", "www-authenticate", "content-disposition"):
                assert here.headers.get(header) == there.headers.get(header)
        reply = await swarm.client.post(CHAT, json=chat(), headers={"x-request-id": "mine"})
        assert reply.json()["choices"][0]["message"]["content"] == "Hello, world!"
        assert reply.headers.get_list("x-request-id") == ["mine"]


async def test_a_reply_streams_as_it_comes(tmp_path: Path) -> None:
    """The first text is here while the coordinator still waits for the second."""
    async with world(tmp_path) as swarm:
        swarm.backend.replay = Replay(texts=("first", "second"), token_s=0.2)
        async with swarm.client.stream("POST", CHAT, json=chat(stream=True)) as reply:
            async for line in reply.aiter_lines():  # to its end
                if "first" in line:
                    assert swarm.backend.open == 1
        assert swarm.backend.finished == 1


async def test_a_body_streams_as_it_comes(tmp_path: Path) -> None:
    """Refused by the coordinator at 4 MiB, without this node holding any of it."""
    async with world(tmp_path) as swarm:

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(40):
                yield b" " * (1 << 17)

        reply = await swarm.client.post(CHAT, content=parts(), headers={"content-type": "application/json"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("phase", ["accept_s", "prefill_s", "token_s"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_at_the_coordinator(tmp_path: Path, phase: str, stream: bool) -> None:
    async with world(tmp_path) as swarm:
        swarm.backend.replay = Replay(**{phase: None})
        data = json.dumps(chat(stream=stream)).encode()
        raw = await trio.open_tcp_stream("127.0.0.1", int(swarm.url.rsplit(":", 1)[1]))
        await raw.send_all(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
        )
        await swarm.until(1)
        await trio.aclose_forcefully(raw)
        await swarm.until(0)
        assert swarm.backend.cancelled == 1


async def test_a_client_that_stops_reading_and_leaves(tmp_path: Path) -> None:
    """Its reply waits in this node's write, not in this node's memory; leaving ends it there."""
    async with world(tmp_path) as swarm:
        swarm.backend.replay = Replay(texts=("x" * 4096,) * 20_000)
        data = json.dumps(chat(stream=True)).encode()
        raw = await trio.open_tcp_stream("127.0.0.1", int(swarm.url.rsplit(":", 1)[1]))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        await raw.send_all(head.encode() + data)
        await swarm.until(1)
        await trio.sleep(0.3)
        assert swarm.backend.open == 1
        await trio.aclose_forcefully(raw)
        await swarm.until(0)
        assert swarm.backend.cancelled == 1


async def test_no_coordinator_is_503_with_retry_after(tmp_path: Path) -> None:
    async with world(tmp_path) as swarm:
        swarm.forwarder.disconnect()
        for path in ("/v1/models", "/api/v1/nodes"):
            reply = await swarm.client.get(path)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_coordinator")
            assert int(reply.headers["retry-after"]) > 0
        assert (await swarm.client.get("/health")).status_code == 200
        swarm.forwarder.connect("http://127.0.0.1:9", None)  # nobody listens
        reply = await swarm.client.get("/v1/models")
        assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")
        swarm.forwarder.connect(swarm.upstream, None)
        assert (await swarm.client.get("/v1/models")).status_code == 200


async def test_a_lost_coordinator_ends_what_runs(tmp_path: Path) -> None:
    async with world(tmp_path) as swarm:
        swarm.backend.replay = Replay(prefill_s=None)
        statuses: list[Any] = []

        async def ask(*, stream: bool) -> None:
            try:
                statuses.append((await swarm.client.post(CHAT, json=chat(stream=stream))).status_code)
            except httpx.RemoteProtocolError:
                statuses.append("cut")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: ask(stream=True))
            nursery.start_soon(lambda: ask(stream=False))
            await swarm.until(2)
            await trio.sleep(0.1)
            swarm.forwarder.disconnect()
        assert sorted(map(str, statuses)) == ["503", "cut"]
        await swarm.until(0)


async def test_only_the_api_is_forwarded(tmp_path: Path) -> None:
    async with world(tmp_path) as swarm:
        for path in ("/", "/openapi.json", "/v1x", "/api/v2/x", "/health/../v1x", "/api"):
            assert (await swarm.client.get(path)).json()["error"]["code"] == "unknown_url"


async def test_host_and_origin_are_checked_here(tmp_path: Path) -> None:
    async with world(tmp_path) as swarm:
        for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
            assert (await swarm.client.get("/v1/models", headers=headers)).status_code == 403
        own = {"origin": swarm.url}
        assert (await swarm.client.get("/v1/models", headers=own)).status_code == 200
        assert (await swarm.client.options("/v1/models", headers=own)).status_code == 204


async def test_tokens_are_checked_at_the_coordinator(tmp_path: Path) -> None:
    async with world(tmp_path) as swarm:
        record, token = await swarm.store.issue("mine", Scope.OPERATE, None)
        assert (await swarm.client.get("/v1/models")).status_code == 401
        headers = {"authorization": f"Bearer {token}"}
        assert (await swarm.client.get("/v1/models", headers=headers)).status_code == 200
        swarm.backend.replay = Replay(texts=("x",) * 100_000, token_s=0.001)
        lines: list[str] = []
        with suppress(httpx.RemoteProtocolError):  # cut: no clean end
            async with (
                swarm.client.stream("POST", CHAT, json=chat(stream=True), headers=headers) as reply,
                aclosing(reply.aiter_lines()) as source,
            ):
                async for line in source:
                    lines.append(line)
                    if len(lines) == 10:
                        await swarm.store.revoke(record.id)
        assert "token_revoked" in "".join(lines[-2:])
        assert "data: [DONE]" not in lines


async def test_open_mode_does_not_reach_beyond_loopback(tmp_path: Path) -> None:
    """A port that other machines reach forwards their calls as such, although they arrive from this machine."""
    async with world(tmp_path, closed=True) as swarm:
        for headers in ({}, {"authorization": "Bearer none"}, {"x-swarm-require-token": "0"}):
            assert (await swarm.client.get("/v1/models", headers=headers)).status_code == 401
        _, token = await swarm.store.issue("mine", Scope.READ, None)
        reply = await swarm.client.get("/v1/models", headers={"authorization": f"Bearer {token}"})
        assert reply.status_code == 200
