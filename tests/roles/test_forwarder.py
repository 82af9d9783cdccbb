"""A peer's API port: calls reach the coordinator's gateway unchanged, part by part, and end when either side does."""

from __future__ import annotations

import json
import time
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import trio
from contexts import node_context
from credentials import Swarm

from swarmnode.api.app import create_app
from swarmnode.api.auth import REQUIRE_TOKEN_HEADER, Credentials
from swarmnode.api.hosts import host_rules
from swarmnode.api.middleware import REQUEST_ID_KEY
from swarmnode.api.replay import Replay, ReplayBackend
from swarmnode.api.server import ApiServer, open_api_listeners, serve_api
from swarmnode.cluster.member_table import Heading, Row, Update
from swarmnode.cluster.membership import NodeState
from swarmnode.cluster.token_book import Scope
from swarmnode.config import read_settings
from swarmnode.errors import LinkBroken
from swarmnode.ids import NodeId
from swarmnode.roles import coordinator_links
from swarmnode.roles.api_port import serve_linked
from swarmnode.roles.coordinator_links import CoordinatorLinks
from swarmnode.roles.forwarder import Forwarder, _answer, _response_headers
from swarmnode.roles.token_store import TokenStore
from swarmnode.wire import limits
from swarmnode.wire.address import Address
from swarmnode.wire.direct import DirectTransport
from swarmnode.wire.frames import Frame
from swarmnode.wire.memory import MemoryNetwork

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping
    from pathlib import Path

    from credentials import Node

    from swarmnode.roles.roads import Roads
    from swarmnode.wire.link import Channel, Hello

CHAT = "/v1/chat/completions"
RULES = host_rules("127.0.0.1")
LOCAL_SECRET = "the coordinator's own command line"


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "replay-1", "messages": [{"role": "user", "content": "hi"}], **fields}


async def serve(app: Any, nursery: trio.Nursery) -> str:
    [(host, port)] = await nursery.start(serve_api, app, await open_api_listeners("127.0.0.1", 0))
    return f"http://{host}:{port}"


@dataclass
class World:
    """A coordinator's API and swarm port, a node that forwards to it over mutual TLS, and a client of that node."""

    backend: ReplayBackend
    store: TokenStore
    forwarder: Forwarder
    roads: Roads
    upstream: str
    url: str
    swarm_port: Address
    den: Node
    client: httpx.AsyncClient
    connected: trio.CancelScope
    links: list[object]
    """Of every call that reached the swarm port: which connection brought it."""

    async def until(self, count: int) -> None:
        with trio.fail_after(5):
            while self.backend.open != count:  # noqa: ASYNC110 - what is awaited counts without events
                await trio.sleep(0.002)

    async def lose_coordinator(self) -> None:
        self.connected.cancel()
        await trio.testing.wait_all_tasks_blocked(0.01)

    async def raw_chat(self, **fields: Any) -> trio.SocketStream:
        """A chat whose reply nobody reads yet."""
        data = json.dumps(chat(**fields)).encode()
        raw = await trio.open_tcp_stream("127.0.0.1", int(self.url.rsplit(":", 1)[1]))
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        await raw.send_all(head.encode() + data)
        return raw


@asynccontextmanager
async def world(tmp_path: Path, *, closed: bool = False) -> AsyncIterator[World]:
    backend, store = ReplayBackend(), TokenStore(tmp_path / "tokens.json", required=False)
    swarm = Swarm(tmp_path / "swarm")
    house, den = swarm.node("house", ("coordinator",)), swarm.node("den")
    transport = DirectTransport(den.tls())
    context = node_context(den.identity, transport, read_settings(tmp_path, environ={}))
    server = ApiServer(create_app(backend, hosts=RULES, credentials=Credentials(store, LOCAL_SECRET)))
    links: list[object] = []

    async def serve_channel(kind: str, hello: Hello, channel: Channel) -> None:
        assert kind == "api"
        links.append(channel._connection)  # type: ignore[attr-defined]
        await serve_linked(server, hello.identity.name, channel)

    forwarder, connected = Forwarder(context, closed=closed), trio.CancelScope()

    async def follow() -> None:
        with connected:
            await forwarder.follow()

    async with trio.open_nursery() as nursery:
        listen = partial(DirectTransport(house.tls()).listen, Address("127.0.0.1", 0), serve_channel, house.identity)
        swarm_port = await nursery.start(listen)
        [(host, port)] = await nursery.start(server.listen, await open_api_listeners("127.0.0.1", 0))
        url = await serve(forwarder.app(RULES), nursery)
        context.roads.places = (swarm_port,)
        nursery.start_soon(follow)
        async with httpx.AsyncClient(base_url=url, trust_env=False, verify=False, timeout=10) as client:
            upstream, roads = f"http://{host}:{port}", context.roads
            yield World(backend, store, forwarder, roads, upstream, url, swarm_port, den, client, connected, links)
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
        raw = await swarm.raw_chat(stream=stream)
        await swarm.until(1)
        await trio.aclose_forcefully(raw)
        await swarm.until(0)
        assert swarm.backend.cancelled == 1


async def test_many_calls_and_cancels_are_no_flood(tmp_path: Path) -> None:
    """Far more than the resets a connection may have; all share one."""
    async with world(tmp_path) as swarm:
        for _ in range(150):
            assert (await swarm.client.get("/v1/models")).status_code == 200
        swarm.backend.replay = Replay(prefill_s=None)
        for _ in range(8):
            raws = [await swarm.raw_chat(stream=True) for _ in range(16)]
            await swarm.until(16)
            for raw in raws:
                await trio.aclose_forcefully(raw)
            await swarm.until(0)
        assert (await swarm.client.get("/v1/models")).status_code == 200
        assert len(set(swarm.links)) == 1


class Counted(tuple[str, ...]):
    """Texts that count how many were asked for."""

    taken = 0

    def __iter__(self) -> Iterator[str]:
        for text in super().__iter__():
            self.taken += 1
            yield text


async def test_a_client_that_does_not_read_stops_the_coordinator(tmp_path: Path) -> None:
    """Its reply is not made: what waits on the way is bounded. Leaving ends it, and others go on meanwhile."""
    async with world(tmp_path) as swarm:
        texts = Counted(("x" * 65_536,) * 1000)
        swarm.backend.replay = Replay(texts=texts)
        raw = await swarm.raw_chat(stream=True)
        await swarm.until(1)
        await trio.sleep(0.5)
        assert swarm.backend.open == 1
        on_the_way = texts.taken * 65_536
        assert on_the_way < limits.API_WINDOW_BYTES + (16 << 20), "the kernel's own socket buffers hold a few MiB"
        swarm.backend.replay = Replay()
        assert (await swarm.client.post(CHAT, json=chat())).status_code == 200
        await trio.aclose_forcefully(raw)
        await swarm.until(0)
        assert swarm.backend.cancelled == 1
        assert texts.taken * 65_536 < on_the_way + (1 << 20)


async def test_a_slow_reader_gets_all_of_it(tmp_path: Path) -> None:
    async with world(tmp_path) as swarm:
        swarm.backend.replay = Replay(texts=("x" * 65_536,) * 60)
        size = 0
        async with (
            swarm.client.stream("POST", CHAT, json=chat(stream=True)) as reply,
            aclosing(reply.aiter_raw()) as parts,
        ):
            async for part in parts:
                size += len(part)
                await trio.sleep(0.001)
        assert size > 60 * 65_536


async def test_more_calls_than_one_connection_takes_share_a_few(tmp_path: Path) -> None:
    async with world(tmp_path) as swarm:
        swarm.backend.replay = Replay(prefill_s=None)
        most = coordinator_links.MAX_LINKS * limits.MAX_CHANNELS
        raws = [await swarm.raw_chat(stream=True) for _ in range(most)]
        await swarm.until(most)
        assert len(set(swarm.links)) == coordinator_links.MAX_LINKS
        reply = await swarm.client.get("/v1/models")
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "overloaded")
        assert int(reply.headers["retry-after"]) > 0
        for raw in raws:
            await trio.aclose_forcefully(raw)
        await swarm.until(0)
        assert (await swarm.client.get("/v1/models")).status_code == 200


async def test_a_connection_that_nobody_uses_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_links, "IDLE_S", 0.05)
    async with world(tmp_path) as swarm:
        swarm.backend.replay = Replay(prefill_s=0.3)
        assert (await swarm.client.post(CHAT, json=chat())).status_code == 200, "a call in use keeps it"
        await trio.sleep(0.2)
        assert (await swarm.client.get("/v1/models")).status_code == 200
        assert len(set(swarm.links)) == 2


NODES = "/api/v1/nodes"
LAST_KNOWN = f"{NODES}?last_known=1"


def told(swarm: World, *, lets_everybody_in: bool, version: int = 7, revocations: int = 0) -> None:
    """The coordinator's table of members has come."""
    row = Row(NodeId("n1"), "attic", "192.0.2.1:7700", NodeState.SUSPECT)
    heading = Heading("house", ("house", "den"), lets_everybody_in, revocations)
    swarm.forwarder._context.known.take(Update((3, version), 0, heading, (row,)), time.time() - 42)


async def test_last_known_nodes_are_shown_to_whom_the_coordinator_would_show_them(tmp_path: Path) -> None:
    async with world(tmp_path) as swarm:
        _, token = await swarm.store.issue("reader", Scope.READ, None)
        let_in, stranger = {"authorization": f"Bearer {token}"}, {"authorization": "Bearer sk-swarm-made-up"}
        told(swarm, lets_everybody_in=False)
        assert (await swarm.client.get(LAST_KNOWN, headers=let_in)).status_code == 200
        assert (await swarm.client.get(LAST_KNOWN, headers=stranger)).status_code == 401
        await swarm.lose_coordinator()
        for headers, path in ((stranger, LAST_KNOWN), ({}, LAST_KNOWN), (let_in, NODES)):
            assert (await swarm.client.get(path, headers=headers)).status_code == 503
        shown = (await swarm.client.get(LAST_KNOWN, headers=let_in)).json()
        assert 41 < shown.pop("age_s") < 60
        assert time.time() - 60 < shown.pop("as_of") < time.time() - 41
        attic = {"node": "n1", "name": "attic", "state": "suspect", "address": "192.0.2.1:7700"}
        assert shown == {
            "coordinator": None,
            "last_coordinator": "house",
            "term": 3,
            "voters": ["house", "den"],
            "peers": [attic],
            "rings": [],
        }


@pytest.mark.parametrize("let_in", ["authorization", "x-api-key"])
async def test_only_who_shows_the_token_that_was_let_in_sees_the_last_known_nodes(tmp_path: Path, let_in: str) -> None:
    """In either header; without one, nobody is let in by somebody else's."""
    async with world(tmp_path) as swarm:
        _, token = await swarm.store.issue("reader", Scope.READ, None)
        told(swarm, lets_everybody_in=False)
        both = {"authorization": f"Bearer {token}", "x-api-key": token}
        assert (await swarm.client.get(NODES, headers={let_in: both[let_in]})).status_code == 200
        await swarm.lose_coordinator()
        for shown, status in (
            ({}, 503),
            ({"x-api-key": ""}, 503),
            ({"x-api-key": "sk-swarm-made-up"}, 503),
            ({"authorization": "Basic eDp5"}, 503),
            ({**both, "x-api-key": "sk-swarm-made-up"}, 503),
            ({"x-api-key": token}, 200),
            ({"authorization": both["authorization"]}, 200),
        ):
            assert (await swarm.client.get(LAST_KNOWN, headers=shown)).status_code == status, shown


async def test_what_an_open_swarm_let_in_is_no_token_once_it_is_closed(tmp_path: Path) -> None:
    """Nor is what came before this node knew which of the two it is."""
    async with world(tmp_path) as swarm:
        any_key = {"x-api-key": "any"}
        assert (await swarm.client.get(NODES, headers=any_key)).status_code == 200
        told(swarm, lets_everybody_in=True)
        assert (await swarm.client.get(NODES, headers=any_key)).status_code == 200
        told(swarm, lets_everybody_in=False, version=8)
        await swarm.lose_coordinator()
        assert (await swarm.client.get(LAST_KNOWN, headers=any_key)).status_code == 503


async def test_a_token_that_is_refused_later_is_let_in_no_more(tmp_path: Path) -> None:
    async with world(tmp_path) as swarm:
        record, token = await swarm.store.issue("reader", Scope.READ, None)
        await swarm.store.issue("another", Scope.READ, None)
        let_in = {"authorization": f"Bearer {token}"}
        told(swarm, lets_everybody_in=False)
        assert (await swarm.client.get(LAST_KNOWN, headers=let_in)).status_code == 200
        await swarm.store.revoke(record.id)
        assert (await swarm.client.get("/v1/models", headers=let_in)).status_code == 401
        await swarm.lose_coordinator()
        assert (await swarm.client.get(LAST_KNOWN, headers=let_in)).status_code == 503


async def readers_headers(swarm: World) -> dict[str, str]:
    """Of a token of a swarm that is closed from now on."""
    _, token = await swarm.store.issue("reader", Scope.READ, None)
    told(swarm, lets_everybody_in=False)
    return {"authorization": f"Bearer {token}"}


async def test_what_was_let_in_before_the_last_revocation_counts_no_more(tmp_path: Path) -> None:
    """Whosesoever token it was: this node does not know which one. Who asks again is let in again."""
    async with world(tmp_path) as swarm:
        let_in = await readers_headers(swarm)
        assert (await swarm.client.get(NODES, headers=let_in)).status_code == 200
        told(swarm, lets_everybody_in=False, version=8, revocations=1)
        await swarm.lose_coordinator()
        assert (await swarm.client.get(LAST_KNOWN, headers=let_in)).status_code == 503


async def test_a_token_revoked_while_its_call_is_answered_is_not_let_in(tmp_path: Path) -> None:
    """The coordinator looked at it before, and its answer is overtaken by the news."""
    async with world(tmp_path) as swarm:
        let_in = await readers_headers(swarm)
        nodes = swarm.backend.nodes

        def overtaken() -> Mapping[str, object]:
            told(swarm, lets_everybody_in=False, version=8, revocations=1)
            return nodes()

        swarm.backend.nodes = overtaken  # type: ignore[method-assign]
        assert (await swarm.client.get(NODES, headers=let_in)).status_code == 200
        await swarm.lose_coordinator()
        assert (await swarm.client.get(LAST_KNOWN, headers=let_in)).status_code == 503


@pytest.mark.parametrize(("closed", "status"), [(False, 200), (True, 503)])
async def test_an_open_swarms_last_known_nodes_are_for_this_machine(tmp_path: Path, closed: bool, status: int) -> None:
    async with world(tmp_path, closed=closed) as swarm:
        told(swarm, lets_everybody_in=True)
        await swarm.lose_coordinator()
        assert (await swarm.client.get(LAST_KNOWN)).status_code == status


async def test_no_coordinator_is_503_with_retry_after(tmp_path: Path) -> None:
    async with world(tmp_path) as swarm:
        assert (await swarm.client.get("/v1/models")).status_code == 200
        await swarm.lose_coordinator()
        for path in ("/v1/models", "/api/v1/nodes"):
            reply = await swarm.client.get(path)
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_coordinator")
            assert int(reply.headers["retry-after"]) > 0
        assert (await swarm.client.get("/health")).status_code == 200
        async with trio.open_nursery() as nursery:
            swarm.roads.places = (Address("127.0.0.1", 9),)  # nobody listens
            nursery.start_soon(swarm.forwarder.follow)
            await trio.testing.wait_all_tasks_blocked(0.01)
            reply = await swarm.client.get("/v1/models")
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "2")
            assert "cannot connect" in reply.json()["error"]["message"]
            nursery.cancel_scope.cancel()
        async with trio.open_nursery() as nursery:
            swarm.roads.places = (swarm.swarm_port,)
            nursery.start_soon(swarm.forwarder.follow)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert (await swarm.client.get("/v1/models")).status_code == 200
            nursery.cancel_scope.cancel()


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
            swarm.connected.cancel()
        assert sorted(map(str, statuses)) == ["503", "cut"]
        await swarm.until(0)


async def test_a_stream_whose_coordinator_is_lost_ends_with_an_error_event(tmp_path: Path) -> None:
    """Else a client that does not mind a cut takes what came for the whole reply."""
    async with world(tmp_path) as swarm:
        swarm.backend.replay = Replay(texts=("x",) * 100_000, token_s=0.001)
        got = ""
        with suppress(httpx.RemoteProtocolError):  # cut: no clean end
            async with (
                swarm.client.stream("POST", CHAT, json=chat(stream=True)) as reply,
                aclosing(reply.aiter_text()) as source,
            ):
                async for text in source:
                    got += text
                    if got.count("data: ") == 10:
                        swarm.connected.cancel()
        *chunks, last = (json.loads(event.removeprefix("data: ")) for event in got.split("\n\n") if event)
        assert all("choices" in chunk for chunk in chunks), "the lost coordinator is said once, at the end"
        assert last["error"]["code"] == "no_coordinator"
        assert last["error"]["type"] == "unavailable_error"
        assert "lost in the middle of this reply" in last["error"]["message"]


class BrokenCall:
    """A call whose answer breaks off behind `parts`."""

    def __init__(self, content_type: bytes, *parts: bytes) -> None:
        self._headers, self._parts = [(b"Content-Type", content_type)], [*parts]

    async def answer(self) -> tuple[int, list[tuple[bytes, bytes]]]:
        return 200, self._headers

    async def next_part(self) -> bytes:
        if not self._parts:
            raise LinkBroken("its machine is off")
        return self._parts.pop(0)


EVENTS = b"text/event-stream; charset=utf-8"


@pytest.mark.parametrize(
    ("content_type", "last", "told"),
    [
        (EVENTS, b'data: {"choices":[]}\n\n', True),
        (EVENTS, b'data: {"cho', True),  # the error must not become part of this event
        (EVENTS, b'data: {"text":"data: {\\"error\\":"}\n\n', True),  # a reply that speaks of errors
        (EVENTS, b'data: {"error":{"code":"token_revoked"}}\n\n', False),
        (EVENTS, b"data: [DONE]\n\n", False),
        (b"application/json", b'{"id"', False),
    ],
)
async def test_an_answer_that_breaks_off_says_so_once_where_it_is_events(
    content_type: bytes, last: bytes, told: bool
) -> None:
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    with pytest.raises(LinkBroken):
        await _answer(BrokenCall(content_type, last), send, lambda _: None)  # type: ignore[arg-type]
    _, part, *more = sent
    assert (part, len(more)) == (last, int(told))
    if told:
        before, event = (part + more[0]).strip().rsplit(b"\n\n", 1)
        assert before.strip() == last.strip()
        assert "its machine is off" in json.loads(event.removeprefix(b"data: "))["error"]["message"]


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


# -- what another machine may do without a token


ADMIN = [("POST", "/api/v1/api-tokens"), ("POST", "/api/v1/join-tokens"), ("DELETE", "/api/v1/nodes/den")]


async def test_a_peers_machine_administers_nothing_without_a_token(tmp_path: Path) -> None:
    """Open mode gives it what everybody has here: chats and loads. The coordinator knows by the link who asks."""
    async with world(tmp_path) as swarm:
        assert (await swarm.client.post(CHAT, json=chat())).status_code == 200
        for method, path in ADMIN:
            for headers in ({}, {"authorization": f"Bearer {LOCAL_SECRET}"}):
                reply = await swarm.client.request(method, path, json={}, headers=headers)
                assert reply.status_code == 401
                assert "came through den" in reply.json()["error"]["message"]
        async with httpx.AsyncClient(base_url=swarm.upstream, trust_env=False) as direct:
            own = await direct.post("/api/v1/api-tokens", json={}, headers={"authorization": f"Bearer {LOCAL_SECRET}"})
        assert own.status_code != 401, "the coordinator's own command line"


async def test_a_peers_machine_with_an_admin_token_does(tmp_path: Path) -> None:
    async with world(tmp_path) as swarm:
        _, token = await swarm.store.issue("mine", Scope.ADMIN, None)
        _, lesser = await swarm.store.issue("lesser", Scope.OPERATE, None)
        body = {"label": "another", "scopes": ["read"]}
        made = await swarm.client.post("/api/v1/api-tokens", json=body, headers={"authorization": f"Bearer {token}"})
        assert made.status_code < 300
        refused = await swarm.client.post(
            "/api/v1/api-tokens", json=body, headers={"authorization": f"Bearer {lesser}"}
        )
        assert refused.status_code == 403


@asynccontextmanager
async def bare_channel(swarm: World) -> AsyncIterator[Channel]:
    """A channel that a member made by hand: it writes what it likes."""
    transport = DirectTransport(swarm.den.tls())
    async with transport.dial(swarm.swarm_port, "api", swarm.den.identity) as channel:
        yield channel


async def answered(channel: Channel, request: bytes) -> bytes:
    """All that comes back; the server hangs up behind it, or is hung up on."""
    await channel.send(Frame("http", {}, request))
    got = b""
    with trio.move_on_after(1), suppress(LinkBroken):
        async for frame in channel:
            got += bytes(frame.body)
    return got


CLOSE = b"Connection: close\r\n"
TRICKS = {
    "another host": (b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\n" + CLOSE + b"\r\n", b"403"),
    "two hosts": (b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n" + CLOSE + b"\r\n", b"40"),
    "no host": (b"GET /v1/models HTTP/1.1\r\n" + CLOSE + b"\r\n", b"40"),
    "a foreign page": (
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil\r\n" + CLOSE + b"\r\n",
        b"403",
    ),
    "marks of its own": (
        b"POST /api/v1/api-tokens HTTP/1.1\r\nHost: localhost\r\nX-Swarm-Require-Token: 0\r\nswarmnode.via: none\r\n"
        b"X-Forwarded-For: 127.0.0.1\r\nContent-Length: 2\r\n" + CLOSE + b"\r\n{}",
        b"401",
    ),
    "no HTTP": (b"\x00\x01\x02\r\n\r\n", b"400"),
}


@pytest.mark.parametrize(("request_bytes", "status"), TRICKS.values(), ids=TRICKS)
async def test_tricks_on_a_bare_channel(tmp_path: Path, request_bytes: bytes, status: bytes) -> None:
    async with world(tmp_path) as swarm, bare_channel(swarm) as channel:
        reply = await answered(channel, request_bytes)
        assert reply.startswith(b"HTTP/1.1 " + status)
        assert (await swarm.client.get("/v1/models")).status_code == 200


async def test_frames_that_are_no_call_end_their_channel(tmp_path: Path) -> None:
    async with world(tmp_path) as swarm, bare_channel(swarm) as channel:
        await channel.send(Frame("end", {"session": 1}))
        with trio.fail_after(5), pytest.raises((LinkBroken, trio.EndOfChannel)):
            await channel.receive()
        assert (await swarm.client.get("/v1/models")).status_code == 200


# -- headers, by themselves


def test_headers_about_a_connection_stay_on_it(tmp_path: Path) -> None:
    """Those that Connection names, too, however often and in whatever case."""
    identity = Swarm(tmp_path).node("den").identity
    forwarder = Forwarder(node_context(identity, MemoryNetwork()), closed=True)
    given = [
        (b"Connection", b"close, X-One"),
        (b"connection", b" x-two ,"),
        (b"X-One", b"1"),
        (b"x-two", b"2"),
        (b"te", b"trailers"),
        (b"Origin", b"http://x"),
        (b"authorization", b"Bearer t"),
        (b"x-three", b"3"),
    ]
    kept = forwarder._headers({"headers": given, REQUEST_ID_KEY: "id"})
    assert dict(kept) == {
        b"authorization": b"Bearer t",
        b"x-three": b"3",
        b"host": b"localhost",
        b"connection": b"close",
        b"x-request-id": b"id",
        REQUIRE_TOKEN_HEADER.encode(): b"1",
    }
    assert len(kept) == 6


def test_what_a_browser_may_do_is_said_here_and_not_by_the_coordinator() -> None:
    answered = [
        (b"Access-Control-Allow-Origin", b"*"),
        (b"access-control-expose-headers", b"x"),
        (b"Content-Type", b"application/json"),
        (b"connection", b"close"),
        (b"x-request-id", b"theirs"),
    ]
    assert list(_response_headers(answered)) == [(b"content-type", b"application/json")]


async def test_a_websocket_is_refused_as_at_the_coordinator(tmp_path: Path) -> None:
    head = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    head += b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    async with world(tmp_path) as swarm:
        for url in (swarm.url, swarm.upstream):
            raw = await trio.open_tcp_stream("127.0.0.1", int(url.rsplit(":", 1)[1]))
            await raw.send_all(head)
            with trio.fail_after(5):
                assert (await raw.receive_some(12)) == b"HTTP/1.1 403"
            await trio.aclose_forcefully(raw)


async def test_a_link_that_is_over_takes_no_call(tmp_path: Path) -> None:
    """It is still in the list until its own task has noticed."""

    class Over:
        channels, over = 0, True

    links = CoordinatorLinks(node_context(Swarm(tmp_path).node("den").identity, MemoryNetwork()))
    links._links.append(Over())  # type: ignore[arg-type]
    with pytest.raises(LinkBroken, match="not connected"):
        await links._with_room()
