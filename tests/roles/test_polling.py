"""Polled links through a real HTTP server: bytes both ways, proxies that buffer and cut, and what breaks a link."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import httpx
import pytest
import trio
import trio.testing
from buffering_proxy import IDLE_S, BufferingProxy
from channel_handlers import echo
from credentials import Node, Swarm
from polling_port import start_polling_port

from swarmnode.cluster.node_book import NodeBook
from swarmnode.errors import Gone, LinkBroken
from swarmnode.ids import NodeId
from swarmnode.roles import polling as polling_module
from swarmnode.roles import polling_routes
from swarmnode.roles.polling import Asker, PolledLinks
from swarmnode.roles.polling_client import PollingAccess, polled_stream
from swarmnode.wire import polled
from swarmnode.wire.address import Address
from swarmnode.wire.deadlines import PUSH_S
from swarmnode.wire.direct import DirectTransport
from swarmnode.wire.frames import Frame
from swarmnode.wire.poll_signature import Signer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from swarmnode.wire.link import Channel


FAR_S = 4e9
"""When no certificate here expires yet."""


class Coordinator:
    """Its swarm port is bound but nobody can reach it: only the API port is open to the world."""

    def __init__(self, folder: Path) -> None:
        swarm = Swarm(folder)
        self.node, self.peer, self.other = (
            swarm.node("coordinator", ("coordinator",)),
            swarm.node("attic"),
            swarm.node("cellar"),
        )
        self.transport = DirectTransport(self.node.tls(enrolment=True))
        self.links = PolledLinks(self.transport.accept)
        self.nodes = NodeBook()
        for name, node in (("attic", self.peer), ("cellar", self.other)):
            self.nodes.issued(node.node, name, FAR_S)
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[trio.Nursery]:
        async with trio.open_nursery() as nursery:
            await nursery.start(self.transport.listen, Address("127.0.0.1", 0), echo, self.node.identity)
            self.url = await start_polling_port(nursery, self.links, self.nodes)
            yield nursery
            nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def channel(self, url: str | None = None, node: Node | None = None) -> AsyncIterator[Channel]:
        """A requests channel of the peer, or of another node, carried by polling."""
        own = node or self.peer
        mine = DirectTransport(own.tls())
        async with (
            polled_stream(PollingAccess(url or self.url, own.node, own.key)) as stream,
            mine.connect_over(stream, own.identity) as link,
            link.open("requests") as channel,
        ):
            yield channel


@pytest.fixture
def coordinator(tmp_path: Path) -> Coordinator:
    return Coordinator(tmp_path)


async def test_a_link_in_requests_carries_frames_both_ways(coordinator: Coordinator) -> None:
    async with coordinator.running(), coordinator.channel() as channel:
        assert channel.certified is not None
        assert channel.certified.node == coordinator.node.node
        for size in (1, 100, 1 << 20):
            for _ in range(3):
                await channel.send(Frame("data", {"offset": size}, b"x" * size))
            for _ in range(3):
                assert len((await channel.receive()).body) == size


async def test_what_is_queued_travels_together(coordinator: Coordinator) -> None:
    pushes: list[int] = []
    push = coordinator.links.push

    async def counting(*args: object) -> None:
        pushes.append(int(args[3]))  # type: ignore[call-overload]
        await push(*args)  # type: ignore[arg-type]

    coordinator.links.push = counting  # type: ignore[method-assign, assignment]
    async with coordinator.running(), coordinator.channel() as channel:
        del pushes[:]
        for number in range(200):
            await channel.send(Frame("data", {"offset": number}, b"x"))
        for number in range(200):
            assert (await channel.receive()).header["offset"] == number
        assert sum(pushes) == 200
        assert len(pushes) < 60
        assert max(pushes) <= polled.MAX_BUNDLE_FRAMES + 1


async def test_the_end_of_one_side_reaches_the_other_and_nothing_is_left(coordinator: Coordinator) -> None:
    async with coordinator.running():
        async with coordinator.channel() as channel:
            await channel.send(Frame("data", {"offset": 0}, b"x"))
            await channel.receive()
        await none_left(coordinator)  # at once: who has left fetches no last words


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.02, 0.05, None], ids=str)
async def test_whoever_is_cancelled_leaves_nothing_behind(coordinator: Coordinator, after_s: float | None) -> None:
    """A race's losers are cancelled wherever they are, also while they open."""
    async with coordinator.running():
        with trio.CancelScope() as scope:
            if after_s is not None:
                scope.deadline = trio.current_time() + after_s
            async with coordinator.channel():
                scope.cancel()
                await trio.sleep_forever()
        await none_left(coordinator)


async def test_a_coordinator_that_goes_away_breaks_the_link(coordinator: Coordinator) -> None:
    async with trio.open_nursery() as nursery:
        broke = trio.Event()

        async def hold() -> None:
            async with coordinator.channel() as channel:
                await channel.send(Frame("data", {"offset": 0}, b"x"))
                await channel.receive()
                up.set()
                await channel.receive()

        async def breaks() -> None:
            with pytest.raises(LinkBroken):
                await hold()
            broke.set()

        up = trio.Event()
        async with coordinator.running():
            nursery.start_soon(breaks)
            await up.wait()
        with trio.fail_after(5):
            await broke.wait()


async def none_left(coordinator: Coordinator) -> None:
    with trio.fail_after(5):
        while coordinator.links.count:  # noqa: ASYNC110 - the coordinator's side ends by itself
            await trio.sleep(0.01)


async def request(coordinator: Coordinator, method: str, target: str, node: Node, body: bytes = b"") -> httpx.Response:
    """One request as a node would sign it."""
    async with httpx.AsyncClient(base_url=coordinator.url, trust_env=False) as client:
        headers = Signer(node.key).sign(method, target, body, time.time())
        return await client.request(method, target, content=body, headers=headers)


NAME = "0123456789abcdef" * 2
HELLO = b"\x16\x03\x01"


async def opened(coordinator: Coordinator, name: str = NAME) -> int:
    """The status of a first push, which holds the beginning of a TLS handshake."""
    target = f"/api/v1/infer/responses/{name}?n=0"
    return (await request(coordinator, "POST", target, coordinator.peer, HELLO)).status_code


async def test_what_is_sent_again_is_refused_and_changes_nothing(coordinator: Coordinator) -> None:
    """Whoever saw a request on its way may send it again within its minutes; the link goes on."""
    async with coordinator.running():
        assert await opened(coordinator) == 204
        assert await opened(coordinator) == 401
        poll = f"/api/v1/infer/requests/{coordinator.peer.node}?link={NAME}&n=0"
        await coordinator.links._links[NAME].stream.outward.put(b"answer", 1)
        assert (await request(coordinator, "GET", poll, coordinator.peer)).content == b"answer"
        again = await request(coordinator, "GET", poll, coordinator.peer)
        assert (again.status_code, again.content.count(b"poll 0")) == (401, 1)
        assert await pushed(coordinator, 1) == 204


async def pushed(coordinator: Coordinator, number: int) -> int:
    target = f"/api/v1/infer/responses/{NAME}?n={number}"
    return (await request(coordinator, "POST", target, coordinator.peer, b"x")).status_code


async def test_a_poll_that_waits_cannot_be_sent_again_to_take_what_comes(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling_module, "POLL_S", 0.1)
    async with coordinator.running():
        assert await opened(coordinator) == 204
        poll = f"/api/v1/infer/requests/{coordinator.peer.node}?link={NAME}&n=0"
        statuses = [(await request(coordinator, "GET", poll, coordinator.peer)).status_code for _ in range(2)]
        assert statuses == [204, 401]


async def test_what_opened_a_link_cannot_open_it_again(coordinator: Coordinator) -> None:
    async with coordinator.running():
        assert await opened(coordinator) == 204
        coordinator.links._links[NAME].stream.fail("over")
        await none_left(coordinator)
        assert await opened(coordinator) == 401
        assert coordinator.links.count == 0


async def test_a_push_behind_a_lost_one_ends_the_link(coordinator: Coordinator) -> None:
    async with coordinator.running():
        assert await opened(coordinator) == 204
        assert (await pushed(coordinator, 7), await pushed(coordinator, 1)) == (410, 410)


async def test_another_node_can_neither_push_into_a_link_nor_empty_it(coordinator: Coordinator) -> None:
    async with coordinator.running():
        opened = await request(
            coordinator, "POST", f"/api/v1/infer/responses/{NAME}?n=0", coordinator.peer, b"\x16\x03\x01"
        )
        assert opened.status_code == 204
        pushed = await request(coordinator, "POST", f"/api/v1/infer/responses/{NAME}?n=1", coordinator.other, b"x")
        assert pushed.status_code == 410
        own, theirs = coordinator.other.node, coordinator.peer.node
        for peer, status in ((own, 410), (theirs, 401)):
            target = f"/api/v1/infer/requests/{peer}?link={NAME}&n=0"
            assert (await request(coordinator, "GET", target, coordinator.other)).status_code == status


@pytest.mark.parametrize(
    "spoilt", ["x-swarm-key", "x-swarm-time", "x-swarm-signature", "x-swarm-digest", "body", "target", "clock"]
)
async def test_only_what_its_node_signed_is_taken(coordinator: Coordinator, spoilt: str) -> None:
    target, body = f"/api/v1/infer/responses/{NAME}?n=0", b"\x16\x03\x01"
    now = time.time() - (400 if spoilt == "clock" else 0)
    headers = Signer(coordinator.peer.key).sign("POST", target, body, now)
    headers.pop(spoilt, None)
    body = b"other" if spoilt == "body" else body
    target = target.replace("n=0", "n=1") if spoilt == "target" else target
    async with coordinator.running(), httpx.AsyncClient(base_url=coordinator.url, trust_env=False) as client:
        answer = await client.post(target, content=body, headers=headers)
        assert answer.status_code == 401
    assert coordinator.links.count == 0


async def test_a_silent_link_is_ended(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling_module, "POLL_S", 0.1)
    monkeypatch.setattr(polling_module, "SILENCE_S", 0.2)
    async with coordinator.running():
        target = f"/api/v1/infer/responses/{NAME}?n=0"
        assert (await request(coordinator, "POST", target, coordinator.peer, b"\x16\x03\x01")).status_code == 204
        await none_left(coordinator)


async def test_a_node_opens_so_many_links_and_no_more(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(polling_module, "MAX_LINKS_PER_NODE", 2)
    async with coordinator.running():
        statuses = []
        for number in range(3):
            target = f"/api/v1/infer/responses/{number:032x}?n=0"
            statuses.append((await request(coordinator, "POST", target, coordinator.peer, b"\x16\x03\x01")).status_code)
        assert statuses == [204, 204, 503]


async def test_through_a_proxy_that_buffers_whole_bodies(coordinator: Coordinator) -> None:
    """A request is read to its end before it goes on, an answer before it comes back."""
    async with coordinator.running() as nursery:
        proxy = BufferingProxy(coordinator.url)
        async with coordinator.channel(await nursery.start(proxy.run)) as channel:
            for number in range(20):
                await channel.send(Frame("data", {"offset": number}, b"x" * 20_000))
                assert (await channel.receive()).header["offset"] == number
        assert proxy.whole > 40


async def test_no_request_is_idle_for_as_long_as_proxies_cut_them(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 2 * polled.POLL_S < IDLE_S
    monkeypatch.setattr(polling_module, "POLL_S", 0.2)
    async with coordinator.running() as nursery:
        proxy = BufferingProxy(coordinator.url, idle_s=0.5)
        async with coordinator.channel(await nursery.start(proxy.run)) as channel:
            await trio.sleep(1.5)
            await channel.send(Frame("data", {"offset": 1}, b"x"))
            assert (await channel.receive()).header["offset"] == 1
        assert (proxy.cut, proxy.whole > 6) == (0, True)


async def test_a_request_that_is_cut_breaks_the_link_at_once(coordinator: Coordinator) -> None:
    """It may have taken something out of the queue: asking again could lose it unseen."""
    async with coordinator.running() as nursery:
        proxy = BufferingProxy(coordinator.url, idle_s=0.3)
        async with coordinator.channel(await nursery.start(proxy.run)) as channel:
            with trio.fail_after(5), pytest.raises(LinkBroken):
                await channel.receive()
        assert proxy.cut == 1


async def test_two_nodes_behind_one_tunnel_are_told_apart(coordinator: Coordinator) -> None:
    """Both come from the tunnel's address."""
    async with coordinator.running() as nursery:
        url = await nursery.start(BufferingProxy(coordinator.url).run)
        async with coordinator.channel(url) as first, coordinator.channel(url, coordinator.other) as second:
            assert coordinator.links.count == 2
            for number in range(5):
                await first.send(Frame("data", {"offset": number}, b"first"))
                await second.send(Frame("data", {"offset": number}, b"second"))
                assert bytes((await second.receive()).body) == b"second"
                assert bytes((await first.receive()).body) == b"first"


async def test_what_a_push_brought_is_answered_before_the_push(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody waits for the frame, nobody for the 204."""
    statuses: list[int] = []
    answer = polling_routes._answer

    async def noting(send: object, status: int, *rest: object) -> None:
        statuses.append(status)
        await answer(send, status, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(polling_routes, "_answer", noting)
    monkeypatch.setattr(polled, "LET_ON_S", 10.0)  # the machine may be slow, but it comes to rest
    async with coordinator.running(), coordinator.channel() as channel:
        await exchanged(channel)
        del statuses[:]
        for _ in range(10):
            await exchanged(channel)
        assert statuses[:19] == [200, 204] * 9 + [200]


async def exchanged(channel: Channel) -> None:
    await channel.send(Frame("data", {"offset": 0}, b"x"))
    await channel.receive()
    await trio.testing.wait_all_tasks_blocked(0.01)


# -- on virtual time: what ends a link that nobody reads, or that the node gives up

ASKER = Asker(NodeId("n" * 32), member=True, source="")
FULL = polled.MAX_QUEUED_BYTES // polled.MAX_BODY_BYTES


@asynccontextmanager
async def unread(*, full: bool) -> AsyncIterator[tuple[PolledLinks, trio.CancelScope]]:
    """Links whose streams nobody reads; NAME is open, and `full` of all that may be queued."""

    async def serve(*_: object) -> None:
        await trio.sleep_forever()

    links = PolledLinks(serve)
    async with trio.open_nursery() as nursery:
        await nursery.start(links.run)
        for number in range(FULL if full else 1):
            await links.push(ASKER, NAME, number, 1, bytes(polled.MAX_BODY_BYTES))
        yield links, nursery.cancel_scope
        nursery.cancel_scope.cancel()


async def test_links_that_end_with_their_node_keep_no_request_waiting(autojump_clock: object) -> None:
    async with unread(full=False) as (links, scope), trio.open_nursery() as nursery:
        began_s = trio.current_time()
        nursery.start_soon(gone, lambda: links.pop(ASKER.node, NAME, 0), "has ended")
        await trio.testing.wait_all_tasks_blocked()
        scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.testing.wait_all_tasks_blocked()
            assert (links.count, trio.current_time()) == (0, began_s)
            with pytest.raises(LinkBroken, match="takes no polled links now"):
                await links.push(ASKER, NAME[::-1], 0, 1, HELLO)


async def gone(ask: Callable[[], Awaitable[object]], why: str) -> None:
    with trio.CancelScope(shield=True), pytest.raises(Gone, match=why):
        await ask()


async def test_a_second_push_while_one_waits_for_room_ends_the_link(autojump_clock: object) -> None:
    """Each would hold its body beside the full queue, and they would get in in any order."""
    async with unread(full=True) as (links, _), trio.open_nursery() as nursery:
        began_s = trio.current_time()
        nursery.start_soon(gone, lambda: links.push(ASKER, NAME, FULL, 1, b"x"), "twice at once")
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(Gone, match="another push waits"):
            links.expect_push(ASKER, NAME, FULL + 1)
    assert trio.current_time() == began_s


async def test_a_push_that_finds_no_room_ends_the_link_in_time(autojump_clock: object) -> None:
    async with unread(full=True) as (links, _):
        began_s = trio.current_time()
        await gone(lambda: links.push(ASKER, NAME, FULL, 1, b"x"), "nothing was read for")
        assert trio.current_time() - began_s == pytest.approx(PUSH_S)
