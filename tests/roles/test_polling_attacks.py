"""What strangers, removed nodes and tampered requests get at the polled routes: an answer, early, and nothing held."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest
import trio
from credentials import Swarm
from test_polling import HELLO, NAME, Coordinator, none_left, opened, request

from swarmnode.roles import polling as polling_module
from swarmnode.roles import polling_routes
from swarmnode.wire.poll_signature import Signer
from swarmnode.wire.polled import BUNDLE_HEADER, MAX_BODY_BYTES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from credentials import Node

EARLY_S = 5.0
"""Long before the port gives up on a body that stands still."""
PUSH = f"/api/v1/infer/responses/{NAME}?n=0"


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    return Coordinator(tmp_path)


class Raw:
    """A socket at the port that speaks exactly the bytes a test gives it."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream

    async def answer(self) -> bytes:
        """One answer's head and body; what came if the other end hung up first."""
        data = b""
        with trio.fail_after(EARLY_S), suppress(trio.BrokenResourceError):
            while not _whole(data) and (part := await self.stream.receive_some()):
                data += part
        return data


def _whole(data: bytes) -> bool:
    head, mark, body = data.partition(b"\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
    return bool(mark) and len(body) >= int(length or 0)


@asynccontextmanager
async def raw(coordinator: Coordinator) -> AsyncIterator[Raw]:
    host, port = coordinator.url.removeprefix("http://").split(":")
    async with await trio.open_tcp_stream(host, int(port)) as stream:
        yield Raw(stream)


def head(node: Node | None, body: bytes, *lines: str, target: str = PUSH, age_s: float = 0.0) -> bytes:
    """The head of a push, signed where there is a node."""
    signed = {} if node is None else Signer(node.key).sign("POST", target, body, time.time() - age_s)
    headers = [f"{name}: {value}" for name, value in signed.items()]
    return "\r\n".join([f"POST {target} HTTP/1.1", "host: 127.0.0.1", *headers, *lines, "", ""]).encode()


@pytest.mark.parametrize(
    ("who", "status", "said"),
    [
        ("nobody", 401, b"x-swarm-signature"),
        ("another", 401, b"not that of its key"),
        ("late", 401, b"clocks"),
        ("again", 401, b"counts once"),
        ("removed", 403, b"was removed from this swarm"),
        ("of protocol 1", 401, b"it is of protocol 1; this node speaks 3 to 3; update the older program"),
    ],
)
async def test_who_may_not_push_hears_so_before_his_body_is_read(
    coordinator: Coordinator, who: str, status: int, said: bytes
) -> None:
    body = b"x" * 1000
    length = f"content-length: {len(body)}"
    async with coordinator.running():
        if who == "again":
            assert await opened(coordinator) == 204
        if who == "removed":
            coordinator.nodes.remove("attic", time.time())
        node = None if who == "nobody" else coordinator.peer
        data = head(node, body, length, age_s=400 if who == "late" else 0)
        if who == "another":
            key = Signer(coordinator.other.key).sign("POST", PUSH, body, 0.0)["x-swarm-key"]
            own = Signer(coordinator.peer.key).sign("POST", PUSH, body, 0.0)["x-swarm-key"]
            data = data.replace(own.encode(), key.encode())
        if who == "of protocol 1":
            data = data.replace(b"x-swarm-digest", b"x-unknown")
        async with raw(coordinator) as client:
            await client.stream.send_all(data)
            answer = await client.answer()
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert said in answer
        assert coordinator.links.count == (who == "again")


async def test_a_removed_node_fetches_nothing(coordinator: Coordinator) -> None:
    async with coordinator.running():
        assert await opened(coordinator) == 204
        coordinator.nodes.remove("attic", time.time())
        poll = f"/api/v1/infer/requests/{coordinator.peer.node}?link={NAME}&n=0"
        answer = await request(coordinator, "GET", poll, coordinator.peer)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "node_removed")


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_is_bounded(coordinator: Coordinator, declared: bool) -> None:
    body = b"x" * (MAX_BODY_BYTES + 1)
    lines = (f"content-length: {len(body)}",) if declared else ("transfer-encoding: chunked",)
    async with coordinator.running(), raw(coordinator) as client:
        await client.stream.send_all(head(coordinator.peer, body, *lines))
        if not declared:
            await client.stream.send_all(b"%x\r\n" % len(body) + body)  # and no end of it
        assert (await client.answer()).startswith(b"HTTP/1.1 413 ")
        assert coordinator.links.count == 0


async def test_a_body_that_drips_is_given_up(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling_routes, "PUSH_S", 0.3)
    async with coordinator.running(), raw(coordinator) as client, trio.open_nursery() as nursery:
        await client.stream.send_all(head(coordinator.peer, HELLO * 1000, "content-length: 3000"))
        nursery.start_soon(drip, client)
        assert (await client.answer()).startswith(b"HTTP/1.1 408 ")
        nursery.cancel_scope.cancel()
    assert coordinator.links.count == 0


async def drip(client: Raw) -> None:
    with suppress(trio.BrokenResourceError):
        while True:
            await client.stream.send_all(b"x")
            await trio.sleep(0.05)


async def test_strangers_take_no_members_place(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Anybody can make a key; only so many of them are let in to join at once."""
    monkeypatch.setattr(polling_module, "MAX_STRANGER_LINKS", 2)
    swarm = Swarm(tmp_path / "elsewhere")
    async with coordinator.running():
        statuses = []
        for number in range(3):
            target = f"/api/v1/infer/responses/{number:032x}?n=0"
            statuses.append((await request(coordinator, "POST", target, swarm.node(f"n{number}"), HELLO)).status_code)
        assert statuses == [204, 204, 503]
        assert await opened(coordinator) == 204


async def test_connections_that_come_to_nothing_do_not_lock_out_members_behind_the_same_tunnel(
    coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnode.wire.crowd.BURST", 1)
    stranger = Swarm(tmp_path / "elsewhere").node("stranger")
    async with coordinator.running():
        for number in range(4):
            target = f"/api/v1/infer/responses/{number:032x}?n=0"
            await request(coordinator, "POST", target, stranger, b"no handshake")
        async with coordinator.channel() as channel:
            assert channel.certified is not None


async def test_names_of_old_links_are_kept_in_bounds(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling_module, "MAX_KEPT_NAMES", 2)
    async with coordinator.running():
        for number in range(4):
            name = f"{number:032x}"
            assert await opened(coordinator, name) == 204
            coordinator.links._links[name].stream.fail("over")
            await none_left(coordinator)
        assert len(coordinator.links._over) == 2


async def test_a_second_request_in_one_write_is_checked_like_the_first(coordinator: Coordinator) -> None:
    """Whatever a proxy was made to send along on a connection that it keeps."""
    first = head(coordinator.peer, HELLO, "content-length: 3") + HELLO
    second = head(None, HELLO, "content-length: 3", target=PUSH.replace("n=0", "n=1")) + HELLO
    async with coordinator.running(), raw(coordinator) as client:
        await client.stream.send_all(first + second)
        assert (await client.answer()).startswith(b"HTTP/1.1 204 ")
        assert (await client.answer()).startswith(b"HTTP/1.1 401 ")
        assert coordinator.links._links[NAME].pushes == 1


@pytest.mark.parametrize(
    "lines",
    [
        ("content-length: 3", "transfer-encoding: chunked"),
        ("transfer-encoding: chunked", "content-length: 3"),
        ("content-length: 3", "content-length: 4"),
        ("transfer-encoding: xchunked",),
        ("content-length: +3",),
        ("content-length : 3",),
        ("x-swarm-signature: " + "a" * 200_000,),
    ],
    ids=["both", "both, swapped", "two", "unknown", "signed", "space", "huge"],
)
async def test_a_request_of_unclear_length_ends_the_connection(
    coordinator: Coordinator, lines: tuple[str, ...]
) -> None:
    smuggled = b"0\r\n\r\n" + head(None, b"", target="/health").replace(b"POST", b"GET")
    async with coordinator.running(), raw(coordinator) as client:
        with suppress(trio.BrokenResourceError):
            await client.stream.send_all(head(coordinator.peer, HELLO, *lines) + smuggled)
        answer = await client.answer()
        assert answer == b"" or answer.split(b" ")[1] in (b"400", b"431", b"501")
        assert await client.answer() == b"", "and nothing behind it was taken for a request"
        assert coordinator.links.count == 0


@pytest.mark.parametrize(
    ("line", "code"),
    [("host: evil.example", "host_not_allowed"), ("origin: http://evil.example", "origin_not_allowed")],
)
async def test_names_and_pages_that_may_not_use_the_port_may_not_poll(
    coordinator: Coordinator, line: str, code: str
) -> None:
    data = head(coordinator.peer, HELLO, "content-length: 3", line)
    if line.startswith("host"):
        data = data.replace(b"host: 127.0.0.1\r\n", b"")
    async with coordinator.running(), raw(coordinator) as client:
        await client.stream.send_all(data)
        answer = await client.answer()
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert code.encode() in answer
        assert coordinator.links.count == 0


@pytest.mark.parametrize(
    ("frames", "status"),
    [("0", 204), ("65536", 204), ("65537", 400), ("-1", 400), ("many", 400), ("9" * 5000, 400)],
    ids=["none", "most", "too many", "negative", "words", "long"],
)
async def test_a_bundle_says_how_many_frames_it_holds_within_bounds(
    coordinator: Coordinator, frames: str, status: int
) -> None:
    async with coordinator.running(), raw(coordinator) as client:
        lines = ("content-length: 3", f"{BUNDLE_HEADER}: {frames}")
        await client.stream.send_all(head(coordinator.peer, HELLO, *lines) + HELLO)
        answer = await client.answer()
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert (b"at most 65536" in answer) == (status == 400)
        assert coordinator.links.count == (status == 204)
