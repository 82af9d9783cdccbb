"""Who gets the swarm's key: only a node that is reached where the other voters will look for it."""

from __future__ import annotations

import time
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from kept_alone import ALONE, state_at

from swarmnode.cluster.voter_book import Seated
from swarmnode.ids import BootId, NodeId
from swarmnode.roles.dialing_back import DialBacks
from swarmnode.roles.enrolment import Enrolment, certify_self
from swarmnode.roles.identity import NodeIdentity, SwarmAuthority
from swarmnode.roles.seats import Seats
from swarmnode.roles.voting import Caller
from swarmnode.wire import certificates as certs
from swarmnode.wire.address import Address
from swarmnode.wire.bodies import pack_body, unpack_body
from swarmnode.wire.direct import DirectTransport
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import Identity
from swarmnode.wire.tls import SwarmTls

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

HOME = "127.0.0.1"


class House:
    """A coordinator's seats, and an attic that listens where `at` says and asks for one."""

    def __init__(self, folder: Path) -> None:
        kept = NodeIdentity.open(folder / "house")
        authority = SwarmAuthority.open(kept, time.time())
        certify_self(authority, kept, ("coordinator", "peer"), time.time())
        tls, unused = SwarmTls(kept.files, enrolment=True), None
        self.state = state_at(folder / "swarm.json")
        enrolment = Enrolment(authority, self.state, tls, (f"{HOME}:1",))
        me, dials = Seated(ALONE, "house", (f"{HOME}:1",)), DialBacks(DirectTransport(tls))
        nothing: Any = unused
        self.seats = Seats(
            me, self.state, nothing, enrolment, dials, admits=True, emit=lambda *_: None, told=lambda: None
        )
        self.attic = NodeIdentity.open(folder / "attic")
        request = certs.new_request(self.attic.key)
        self.attic.join(authority.certificate, authority.issue(request, ("peer",), time.time()), [Address(HOME, 1)])
        self.at = Address(HOME, 0)

    async def listen(self, nursery: trio.Nursery) -> None:
        about = Identity(self.attic.node, BootId("b"), "attic", ("peer",))
        transport = DirectTransport(SwarmTls(self.attic.files))
        self.at = await nursery.start(partial(transport.listen, self.at, lambda *_: None, about))

    async def ask(self, places: Sequence[str], source: str = HOME) -> Frame | None:
        """From `places`; its HELLO says where it is reached indeed."""
        hello: Any = SimpleNamespace(
            identity=Identity(self.attic.node, BootId("b"), "attic", ("peer",), listen=(str(self.at),))
        )
        channel: Any = SimpleNamespace(direct_source=source, certified=None)
        body = {"places": list(places), "request": certs.new_request(self.attic.key)}
        return await self.seats.stand(hello, channel, Frame("stand", {}, pack_body(body)))


@pytest.fixture
async def house(tmp_path: Path, nursery: trio.Nursery) -> House:
    house = House(tmp_path)
    await house.listen(nursery)
    return house


async def test_a_node_that_is_reached_where_it_says_gets_the_key(house: House, nursery: trio.Nursery) -> None:
    places = (str(house.at), f"http://{HOME}:7701")
    answer = await house.ask(places)
    assert answer is not None
    assert answer.kind == "seat"
    assert "key" in unpack_body(answer.body)
    assert [seat.places for seat in house.state.seats.records()] == [places]
    nursery.cancel_scope.cancel()


async def test_what_is_dialled_is_what_is_seated(house: House, nursery: trio.Nursery) -> None:
    """Its HELLO's address answers; those that the other voters would look for it at do not, or are none for them."""
    async with trio.open_nursery() as ports:
        (closed,) = await trio.open_tcp_listeners(0, host=HOME)
        nobody = f"{HOME}:{closed.socket.getsockname()[1]}"
        await closed.aclose()
        ports.cancel_scope.cancel()
    refused = {
        (nobody,): "was not reached at",
        (nobody, str(house.at)): "was not reached at",
        (f"http://{house.at}",): "the first place of a voter is its swarm port",
        (str(house.at), "169.254.169.254:80"): "no address to dial from another machine",
        (str(house.at), "http://169.254.169.254"): "no address to dial from another machine",
    }
    for places, why in refused.items():
        answer = await house.ask(places)
        assert answer is not None
        assert answer.kind == "no_seat"
        assert why in answer.header["message"]
        assert house.state.seats.records() == ()
    elsewhere = await house.ask([str(house.at)], source="192.0.2.9")
    assert elsewhere is not None
    assert elsewhere.kind == "no_seat", "this machine's own port is nothing to dial for another one"
    nursery.cancel_scope.cancel()


class SlowDials:
    """Dial-backs that take a while, of which some hang."""

    def __init__(self) -> None:
        self.tried: list[str] = []

    async def dial(self, node: str, *_: object) -> str:
        self.tried.append(node)
        await trio.sleep(4)
        return "it answers"


class Table:
    """A coordinator's seats of nodes that say that they moved."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.dials, self.told = SlowDials(), list[str]()
        self.state = state_at(folder / "swarm.json")
        nodes = [Identity(NodeId(name), BootId("b"), name, listen=("10.0.0.9:1",)) for name in names]
        self.voting = VotingOf({identity.node: Caller(identity, "") for identity in nodes})
        parts: Any = (self.voting, None, self.dials)
        me = Seated(ALONE, "house", (f"{HOME}:1",))
        self.seats = Seats(
            me, self.state, *parts, admits=True, emit=lambda event, _: self.told.append(event), told=lambda: None
        )

    def places(self, name: str) -> tuple[str, ...] | None:
        seat = self.state.seats.get(NodeId(name))
        return None if seat is None else seat.places

    async def seat(self, name: str) -> None:
        await self.state.change_seats(lambda seats, _: seats.seat(Seated(NodeId(name), name, ("10.0.0.2:1",))))


class VotingOf:
    """Of callers alone; `rounds` counts how often the voters were looked at."""

    blank: frozenset[NodeId] = frozenset()
    up_to_date: frozenset[NodeId] = frozenset()

    def __init__(self, callers: dict[NodeId, Caller]) -> None:
        self.callers = callers
        self.rounds = 0

    async def seat(self, _: object) -> None:
        self.rounds += 1


async def test_who_is_removed_while_it_is_dialled_back_stays_removed(
    tmp_path: Path, writes_in_place: None, autojump_clock: object, nursery: trio.Nursery
) -> None:
    table = Table(tmp_path, "cellar")
    await table.seat("cellar")
    nursery.start_soon(table.seats.run)
    await trio.sleep(1)
    assert table.dials.tried == ["cellar"]
    await table.state.change_seats(lambda seats, _: seats.remove(NodeId("cellar")))
    await trio.sleep(5)
    assert (table.places("cellar"), "seated" in table.told) == (None, False)
    nursery.cancel_scope.cancel()


async def test_the_voters_are_put_right_while_nodes_that_moved_are_dialled(
    tmp_path: Path, writes_in_place: None, autojump_clock: object, nursery: trio.Nursery
) -> None:
    table = Table(tmp_path, "cellar", "den")
    await table.seat("cellar")
    await table.seat("den")
    nursery.start_soon(table.seats.run)
    await trio.sleep(3)
    assert sorted(table.dials.tried) == ["cellar", "den"]
    assert table.voting.rounds >= 5
    await trio.sleep(2)
    assert table.places("cellar") == table.places("den") == ("10.0.0.9:1",)
    assert table.told.count("seated") == 2
    nursery.cancel_scope.cancel()


async def test_names_are_looked_up_for_one_wish_at_a_time_of_a_member(
    house: House, monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    """A lookup takes one of the threads that writes to the disk take, too."""
    asked, never = list[str](), trio.Event()

    async def look_up(host: str, *_: object, **__: object) -> None:
        asked.append(host)
        await never.wait()

    monkeypatch.setattr(trio.socket, "getaddrinfo", look_up)
    answers = list[Frame | None]()

    async def ask() -> None:
        answers.append(await house.ask([str(house.at), *(f"n{i}.example:1" for i in range(7))]))

    for _ in range(100):
        nursery.start_soon(ask)
    await trio.testing.wait_all_tasks_blocked()
    assert (asked, len(answers)) == (["n0.example"], 99)
    assert all(answer is not None and "too often" in answer.header["message"] for answer in answers)
    nursery.cancel_scope.cancel()
