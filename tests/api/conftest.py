"""A real gateway on a loopback socket, over the replaying backend."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import trio

from swarmnode.api.app import create_app
from swarmnode.api.auth import Credentials
from swarmnode.api.hosts import HostRules, host_rules
from swarmnode.api.limits import ApiLimits
from swarmnode.api.replay import ReplayBackend
from swarmnode.api.server import open_api_listeners, serve_api
from swarmnode.cluster.token_book import parse_scope
from swarmnode.roles.token_store import TokenStore

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

LIMITS = ApiLimits(
    body_bytes=64 << 10,
    body_idle_s=0.3,
    body_total_s=1.0,
    linger_s=0.5,
    cut_s=0.5,
    sse_keep_alive_s=0.05,
    idle_connection_s=120.0,
    write_s=1.0,
    grace_s=0.3,
)
CHAT = "/v1/chat/completions"
ANY_HOST = HostRules(frozenset({"127.0.0.1", "x"}), origins=frozenset({"*"}))
LOCAL_SECRET = "the command line's own secret"


@dataclass
class RawReply:
    """A response read from a bare socket."""

    status: int
    headers: dict[str, str]
    body: bytes
    complete: bool
    """Whether the body came to its declared end."""

    def json(self) -> Any:
        return json.loads(self.body)


class RawClient:
    """A socket that speaks exactly the bytes a test gives it."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self._pending = b""

    async def send(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def post(self, path: str, body: object, *headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(data)}"]
        lines += ["Content-Type: application/json", *headers, "", ""]
        await self.send("\r\n".join(lines).encode() + data)

    async def until(self, mark: bytes) -> bytes:
        """Everything up to and with `mark`; shorter when the server ends the connection first."""
        while mark not in self._pending:
            data = await self.stream.receive_some(65536)
            if not data:
                found, self._pending = self._pending, b""
                return found
            self._pending += data
        end = self._pending.index(mark) + len(mark)
        found, self._pending = self._pending[:end], self._pending[end:]
        return found

    async def exactly(self, count: int) -> bytes:
        while len(self._pending) < count:
            data = await self.stream.receive_some(65536)
            if not data:
                break
            self._pending += data
        found, self._pending = self._pending[:count], self._pending[count:]
        return found

    async def reply(self) -> RawReply:
        head = (await self.until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
        status = int(head[0].split(" ")[1])
        if "content-length" in headers:
            length = int(headers["content-length"])
            body = await self.exactly(length)
            return RawReply(status, headers, body, len(body) == length)
        if headers.get("transfer-encoding") == "chunked":
            return RawReply(status, headers, *(await self._chunked()))
        return RawReply(status, headers, b"", True)

    async def _chunked(self) -> tuple[bytes, bool]:
        body = b""
        while True:
            size = (await self.until(b"\r\n")).strip()
            if not size:
                return body, False
            part = await self.exactly(int(size, 16))
            await self.exactly(2)
            if int(size, 16) == 0:
                return body, True
            body += part


@dataclass
class Gateway:
    """A running API port."""

    backend: ReplayBackend
    port: int
    client: httpx.AsyncClient
    scope: trio.CancelScope
    ended: trio.Event
    streams: list[trio.SocketStream] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def raw(self) -> RawClient:
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        self.streams.append(stream)
        return RawClient(stream)

    async def chat(self, **fields: Any) -> httpx.Response:
        return await self.client.post(CHAT, json=chat_body(**fields))


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "replay-1", "messages": [{"role": "user", "content": "hi"}], **fields}


@asynccontextmanager
async def running(
    backend: ReplayBackend,
    nursery: trio.Nursery,
    limits: ApiLimits,
    tls: ssl.SSLContext | None = None,
    **options: Any,
) -> AsyncIterator[Gateway]:
    """A gateway over `backend`; `options` go to `create_app`."""
    scope, ended = trio.CancelScope(), trio.Event()
    listeners = await open_api_listeners("127.0.0.1", 0)
    app = create_app(backend, limits=limits, **options)

    async def run(task_status: Any) -> None:
        with scope:
            await serve_api(app, listeners, tls, limits=limits, task_status=task_status)
        ended.set()

    [(_, port)] = await nursery.start(run)
    async with httpx.AsyncClient(
        base_url=f"{'http' if tls is None else 'https'}://127.0.0.1:{port}",
        timeout=10,
        verify=False,
        trust_env=False,  # loading CAs takes 30 ms a test
    ) as client:
        gateway = Gateway(backend, port, client, scope, ended)
        yield gateway
    for stream in gateway.streams:
        await trio.aclose_forcefully(stream)
    scope.cancel()
    with trio.fail_after(5):
        await ended.wait()


@pytest.fixture
async def gateway(request: pytest.FixtureRequest, nursery: trio.Nursery) -> AsyncIterator[Gateway]:
    """`parametrize("gateway", [{"write_s": 30.0}], indirect=True)` changes limits."""
    limits = replace(LIMITS, **getattr(request, "param", {}))
    async with running(ReplayBackend(), nursery, limits, hosts=ANY_HOST) as gateway:
        yield gateway


class Clock:
    """Unix time that a test moves."""

    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Guarded:
    """A gateway with tokens, and the store behind them."""

    gateway: Gateway
    store: TokenStore
    clock: Clock

    async def token(self, scope: str, expires_in_s: float | None = None) -> str:
        _, token = await self.store.issue(f"a {scope} token", parse_scope([scope]), expires_in_s)
        return token


@pytest.fixture
def run_gateway(nursery: trio.Nursery) -> Callable[..., Any]:
    """Run a gateway with options of a test's own; those of `limits` change LIMITS."""

    def run(limits: dict[str, float] | None = None, **options: Any) -> Any:
        return running(ReplayBackend(), nursery, replace(LIMITS, **(limits or {})), **options)

    return run


@pytest.fixture
async def guarded(request: pytest.FixtureRequest, tmp_path: Path, nursery: trio.Nursery) -> AsyncIterator[Guarded]:
    """Tokens and Host checked as on a node's port; `parametrize("guarded", [True], indirect=True)` requires tokens."""
    clock = Clock()
    store = TokenStore(tmp_path / "tokens.json", required=getattr(request, "param", False), clock=clock)
    options = {"hosts": host_rules("127.0.0.1", names=["x"]), "credentials": Credentials(store, LOCAL_SECRET)}
    async with running(ReplayBackend(), nursery, LIMITS, **options) as gateway:
        yield Guarded(gateway, store, clock)


@pytest.fixture
def raw_over() -> Callable[[Any], RawClient]:
    """Speak over a stream of a test's own."""
    return RawClient


@pytest.fixture
def body() -> Callable[..., dict[str, Any]]:
    return chat_body


@pytest.fixture
def until() -> Callable[..., Any]:
    """Wait until a condition holds; fails after five seconds."""

    async def wait(condition: Callable[[], bool]) -> None:
        with trio.fail_after(5):
            while not condition():  # noqa: ASYNC110 - what is awaited counts without events
                await trio.sleep(0.002)

    return wait
