"""Joining, renewal and removal between the two sides, over memory links and under virtual time."""

from __future__ import annotations

import math
import os
import stat
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from kept_alone import state_at

from swarmnode.cluster.join_book import ATTEMPT_INTERVAL_S, BURST_ATTEMPTS, REFUSED
from swarmnode.cluster.join_token import JoinToken, parse_join_token
from swarmnode.cluster.node_book import NodeRecord
from swarmnode.cluster.voter_book import Seated
from swarmnode.errors import (
    Conflict,
    InvalidRequest,
    JoinRefused,
    LinkBroken,
    NoSpace,
    Overloaded,
    ProtocolError,
    SwarmError,
    TokenNotFound,
)
from swarmnode.ids import BootId, NodeId
from swarmnode.roles.enrolment import RENEWAL_CHECK_S, RENEWAL_PAUSE_S, Enrolment, certify_self, keep_certified
from swarmnode.roles.identity import NodeIdentity, SwarmAuthority
from swarmnode.roles.joining import PeerMembership, address_towards, join_swarm
from swarmnode.wire import certificates as certs
from swarmnode.wire.address import Address
from swarmnode.wire.bodies import pack_body, unpack_body
from swarmnode.wire.direct import DirectTransport
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import Hello, Identity
from swarmnode.wire.memory import memory_pair
from swarmnode.wire.tls import SwarmTls

if TYPE_CHECKING:
    from pathlib import Path

    from swarmnode.wire.link import Channel

BEGAN_S = 1_800_000_000.0
DAY_S = 86_400.0
BOTH = ("coordinator", "peer")


class Clock:
    """Wall clock of a test: moves with trio's, from a date of its own; somebody may set it back."""

    back_s = 0.0

    def __call__(self) -> float:
        return BEGAN_S + trio.current_time() - self.back_s


class House:
    """A coordinator's side of enrolment, and what a machine that wants in would have."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder, self.clock = folder, clock
        self.kept = NodeIdentity.open(folder / "coordinator")
        self.authority = SwarmAuthority.open(self.kept, clock())
        certify_self(self.authority, self.kept, BOTH, clock())
        self.tls = SwarmTls(self.kept.files, enrolment=True)
        self.state = state_at(folder / "coordinator" / "swarm.json")
        me = NodeRecord(self.kept.node, "house", math.inf)
        self.enrolment = Enrolment(self.authority, self.state, self.tls, ("127.0.0.1:7700",), clock, me)

    def machine(self, name: str) -> NodeIdentity:
        kept = NodeIdentity.open(self.folder / name)
        kept.keep()
        return kept

    async def token(self, *, ttl_s: float = 3600, uses: int = 1) -> JoinToken:
        line, _ = await self.enrolment.new_token(ttl_s, uses)
        return parse_join_token(line)

    async def ask(self, token: JoinToken, machine: NodeIdentity, name: str, **changes: Any) -> bytes:
        """The exchange of a `join` channel without the listener's part; returns the certificate."""
        near, far = memory_pair("join")
        far.source = "192.0.2.9"
        body = {"id": token.id, "secret": token.secret, "request": certs.new_request(machine.key), **changes}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._serve, far, name)
            assert (await near.receive()).kind == "ca"
            await near.send(Frame("join", {}, pack_body(body)))
            issued = unpack_body((await near.receive()).body)
            near.abort()
        certificate: bytes = issued["certificate"]
        return certificate

    async def _serve(self, channel: Channel, name: str) -> None:
        hello = Hello(Identity(NodeId("anyone"), BootId("b"), name))
        try:
            await self.enrolment.serve(hello, channel)
        except SwarmError as error:
            await channel.send(Frame("refuse", {"code": error.code, "message": error.message}))

    async def refusal(self, token: JoinToken, name: str = "new", **changes: Any) -> SwarmError:
        with pytest.raises(BaseExceptionGroup) as raised:
            await self.ask(token, self.machine(name), name, **changes)
        (error,) = raised.value.exceptions
        assert isinstance(error, SwarmError)
        return error


@pytest.fixture
def clock(writes_in_place: None) -> Clock:
    return Clock()


@pytest.fixture
async def house(tmp_path: Path, clock: Clock) -> House:
    return House(tmp_path, clock)


def who(machine: NodeIdentity, name: str) -> Identity:
    return Identity(machine.node, BootId("boot"), name, ("peer",))


# -- joining


async def test_a_secret_buys_a_peers_certificate_for_thirty_days(house: House) -> None:
    attic = house.machine("attic")
    certificate = certs.load_certificate(await house.ask(await house.token(), attic, "attic"))
    about = certs.check_issued(certificate, house.authority.certificate, house.clock())
    assert (about.node, about.roles) == (attic.node, ("peer",))
    assert about.ends_s - house.clock() == pytest.approx(30 * DAY_S, abs=2)
    (record,) = house.enrolment.nodes
    assert (record.node, record.name, record.expires_s) == (attic.node, "attic", about.ends_s)


async def test_replay_wrong_secrets_and_expiry_are_refused_in_the_same_words(
    house: House, autojump_clock: object
) -> None:
    token = await house.token(ttl_s=60)
    wrong = await house.refusal(token, secret=bytes(32))
    unknown = await house.refusal(token, id=bytes(8))
    await house.ask(token, house.machine("attic"), "attic")
    replayed = await house.refusal(token)
    late = await house.token(ttl_s=60)
    await trio.sleep(61)
    expired = await house.refusal(late)
    assert [type(error) for error in (wrong, unknown, replayed, expired)] == [JoinRefused] * 4
    assert {error.message for error in (wrong, unknown, replayed, expired)} == {REFUSED}
    assert [record.name for record in house.enrolment.nodes] == ["attic"]


async def test_open_tokens_are_listed_without_their_secrets_and_can_be_withdrawn(house: House) -> None:
    token, used = await house.token(), await house.token()
    await house.ask(used, house.machine("attic"), "attic")
    (listed,) = house.enrolment.open_tokens
    assert (listed.id, listed.uses_left) == (token.id.hex(), 1)
    assert token.secret.hex() not in str(listed)
    await house.enrolment.withdraw(listed.id)
    assert list(house.enrolment.open_tokens) == []
    assert isinstance(await house.refusal(token, "den"), JoinRefused)
    with pytest.raises(TokenNotFound, match="join-tokens"):
        await house.enrolment.withdraw(listed.id)


async def test_guesses_of_one_source_are_bounded(house: House) -> None:
    token = await house.token()
    for _ in range(BURST_ATTEMPTS):
        assert isinstance(await house.refusal(token, secret=bytes(32)), JoinRefused)
    near, far = memory_pair("join")
    far.source = "192.0.2.9"
    with pytest.raises(Overloaded, match=r"192\.0\.2\.9"):
        await house.enrolment.serve(Hello(who(house.machine("new"), "new")), far)
    far.source = "192.0.2.10"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(house._serve, far, "new")
        assert (await near.receive()).kind == "ca", "another source is served"
        nursery.cancel_scope.cancel()


async def test_a_clock_that_is_set_back_locks_nobody_out(house: House, autojump_clock: object) -> None:
    token = await house.token()
    for _ in range(BURST_ATTEMPTS):
        await house.refusal(token, secret=bytes(32))
    house.clock.back_s = DAY_S
    await trio.sleep(ATTEMPT_INTERVAL_S + 0.1)
    assert isinstance(await house.refusal(token, secret=bytes(32)), JoinRefused), "it may try again, and once"
    assert isinstance(await house.refusal(token, secret=bytes(32)), Overloaded)


async def test_a_clock_that_is_set_back_delays_no_renewal(house: House, autojump_clock: object) -> None:
    attic = house.machine("attic")
    await house.ask(await house.token(), attic, "attic")
    body = {"request": certs.new_request(attic.key)}
    assert await house.enrolment.renew(attic.node, "attic", body) is not None
    house.clock.back_s = DAY_S
    assert await house.enrolment.renew(attic.node, "attic", body) is None, "right after another"
    await trio.sleep(RENEWAL_PAUSE_S)
    assert await house.enrolment.renew(attic.node, "attic", body) is not None


BAD = {
    "no request": {"request": b""},
    "not bytes": {"request": "text"},
    "huge": {"request": bytes(5000)},
    "noise": {"request": bytes(300)},
    "a number for a secret": {"secret": 7},
    "no id": {"id": None},
}


@pytest.mark.parametrize("changes", BAD.values(), ids=BAD)
async def test_bad_fields_are_refused_and_use_no_token_up(house: House, changes: dict[str, object]) -> None:
    token = await house.token()
    assert isinstance(await house.refusal(token, **changes), ProtocolError)
    await house.ask(token, house.machine("attic"), "attic")


async def test_a_refused_name_uses_no_token_up_and_is_told_only_to_who_knows_the_secret(house: House) -> None:
    await house.ask(await house.token(), house.machine("attic"), "attic")
    token = await house.token()
    other = house.machine("other")
    with pytest.raises(BaseExceptionGroup) as raised:
        await house.ask(token, other, "attic")
    assert isinstance(raised.value.exceptions[0], Conflict)
    with pytest.raises(BaseExceptionGroup) as raised:
        await house.ask(token, other, "attic", secret=bytes(32))
    assert isinstance(raised.value.exceptions[0], JoinRefused)
    await house.ask(token, other, "den")


async def test_a_name_that_could_fool_a_terminal_is_refused(house: House) -> None:
    assert isinstance(await house.refusal(await house.token(), "x\x1b[2J"), InvalidRequest)


async def test_a_member_keeps_to_the_rule_for_names_after_it_joined(house: House) -> None:
    attic = house.machine("attic")
    await house.ask(await house.token(), attic, "attic")
    for name, error in (("evil\x1b[2J", InvalidRequest), ("", InvalidRequest), ("house", Conflict)):
        with pytest.raises(error):
            await house.enrolment.note_name(attic.node, name)
    await house.enrolment.note_name(attic.node, "loft")
    assert house.enrolment.name_of(attic.node) == "loft"
    assert state_at(house.folder / "coordinator" / "swarm.json").nodes.records()[0].name == "loft"


async def test_of_two_nodes_that_want_a_name_at_once_one_gets_it(house: House) -> None:
    attic, den = house.machine("attic"), house.machine("den")
    for machine, name in ((attic, "attic"), (den, "den")):
        await house.ask(await house.token(), machine, name)
    refused: list[NodeId] = []

    async def ask(node: NodeId) -> None:
        try:
            await house.enrolment.note_name(node, "same")
        except Conflict:
            refused.append(node)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask, attic.node)
        nursery.start_soon(ask, den.node)
    assert len(refused) == 1
    assert sorted(record.name == "same" for record in house.enrolment.nodes) == [False, True]


async def test_a_lost_answer_costs_no_token(house: House) -> None:
    token, attic = await house.token(), house.machine("attic")
    for _ in range(2):
        certificate = certs.load_certificate(await house.ask(token, attic, "attic"))
    assert certs.read_certificate(certificate).node == attic.node
    assert isinstance(await house.refusal(token, "other"), JoinRefused)


async def test_what_was_decided_is_on_disk_and_holds_after_a_restart(house: House, tmp_path: Path) -> None:
    token = await house.token(uses=2)
    await house.ask(token, house.machine("attic"), "attic")
    await house.enrolment.remove("attic")
    path = tmp_path / "coordinator" / "swarm.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert token.secret.hex() not in path.read_text()
    again = House(tmp_path, house.clock)
    assert again.kept.node == house.kept.node
    assert again.tls.is_revoked(house.machine("attic").node)
    assert isinstance(await again.refusal(token, "attic"), JoinRefused), "a removed key stays out"
    await again.ask(token, house.machine("den"), "den")
    assert isinstance(await again.refusal(token, "late"), JoinRefused)


async def test_the_swarms_founder_is_removed_by_who_follows_it(house: House) -> None:
    founder = house.machine("founder")
    seat = Seated(founder.node, "founder", ("127.0.0.1:1",))
    await house.state.change_seats(lambda seats, _: seats.seat(seat))
    assert list(house.enrolment.founders) == [seat]
    assert (await house.enrolment.remove("founder")).node == founder.node
    assert list(house.enrolment.founders) == []
    assert house.tls.is_revoked(founder.node)
    assert house.state.seats.get(founder.node) is None


@pytest.mark.parametrize("listed", [False, True])
async def test_who_coordinates_does_not_remove_itself(house: House, *, listed: bool) -> None:
    """The first coordinator is in no list of members; a peer that follows one is."""
    if listed:
        await house.state.change(lambda _, nodes: nodes.issued(house.kept.node, "house", BEGAN_S + DAY_S))
    for name in ("house", house.kept.node, *([house.kept.node[:12]] if listed else [])):
        with pytest.raises(Conflict, match="stop it first"):
            await house.enrolment.remove(name)
    assert not house.enrolment.removed(house.kept.node)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"format": 2}', '{"format": 1, "version": 1, "joins": [], "nodes": [{}]}']
)
def test_a_damaged_document_stops_the_start(tmp_path: Path, text: str) -> None:
    path = tmp_path / "swarm.json"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        state_at(path)


async def test_a_change_that_fails_changes_nothing(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    token = await house.token()
    before = (house.state.version, house.state.joins.records())

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("swarmnode.roles.ballot.write_private", full)
    with pytest.raises(OSError, match="space"):
        await house.state.change(lambda joins, _: joins.redeem(token.id, token.secret, "x", house.clock()))
    assert (house.state.version, house.state.joins.records()) == before


# -- both sides over TCP and TLS


async def serve_joins(house: House, *, task_status: trio.TaskStatus[Address] = trio.TASK_STATUS_IGNORED) -> None:
    async def handle(kind: str, hello: Hello, channel: Channel) -> None:
        await house.enrolment.serve(hello, channel)

    about = who(house.kept, "coordinator")
    await DirectTransport(house.tls).listen(Address("127.0.0.1", 0), handle, about, task_status=task_status)


@pytest.fixture
def real(tmp_path: Path) -> House:
    """Real sockets need real time."""
    return House(tmp_path, time.time)  # type: ignore[arg-type]


async def test_a_machine_joins_and_remembers_its_swarm(real: House, nursery: trio.Nursery) -> None:
    address = await nursery.start(serve_joins, real)
    token = replace(await real.token(), addresses=("127.0.0.1:1", str(address)))
    attic = real.machine("attic")
    await join_swarm(token, attic, who(attic, "attic"))
    again = NodeIdentity.open(real.folder / "attic")
    assert again.node == attic.node
    assert again.certified(real.clock())
    assert again.coordinators() == (Address("127.0.0.1", 7700),)
    nursery.cancel_scope.cancel()


async def test_a_machine_that_may_not_join_keeps_nothing_of_it(real: House, nursery: trio.Nursery) -> None:
    """Neither where nobody answers, nor where the token is refused; what was there before stays."""
    address = await nursery.start(serve_joins, real)
    token = await real.token()
    await real.enrolment.withdraw(token.id.hex())
    attic, den = NodeIdentity.open(real.folder / "attic"), real.machine("den")
    with pytest.raises(LinkBroken, match="cannot join the swarm"):
        await join_swarm(replace(token, addresses=("127.0.0.1:1",)), attic, who(attic, "attic"))
    assert not attic.folder.exists()
    for machine, name in ((attic, "attic"), (den, "den")):
        with pytest.raises(JoinRefused):
            await join_swarm(replace(token, addresses=("127.0.0.1:1", str(address))), machine, who(machine, name))
    assert not attic.folder.exists()
    assert real.machine("den").node == den.node
    good = replace(await real.token(), addresses=(str(address),))
    await join_swarm(good, attic, who(attic, "attic"))
    assert real.machine("attic").certified(real.clock())
    nursery.cancel_scope.cancel()


async def token_of_a_listener(real: House, nursery: trio.Nursery) -> JoinToken:
    """A token that names where joins are served from now on."""
    address = await nursery.start(serve_joins, real)
    return replace(await real.token(), addresses=(str(address),))


async def test_a_machine_whose_certificate_was_lost_on_the_way_is_let_in_once_more(
    real: House, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same token, which is used up, and under the same name: so the key that was asked for has to be kept."""
    token = await token_of_a_listener(real, nursery)

    def lose(*_: object) -> None:
        raise LinkBroken("lost on the way")

    with monkeypatch.context() as patch:
        patch.setattr(real.enrolment, "_issued", lose)
        attic = real.machine("attic")
        with pytest.raises(LinkBroken):
            await join_swarm(token, attic, who(attic, "attic"))
    assert [record.name for record in real.enrolment.nodes] == ["attic"]
    again = real.machine("attic")
    assert again.node == attic.node
    await join_swarm(token, again, who(again, "attic"))
    assert real.machine("attic").certified(real.clock())
    nursery.cancel_scope.cancel()


async def test_a_machine_whose_disk_does_not_take_the_certificate_is_let_in_once_more(
    real: House, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = await token_of_a_listener(real, nursery)
    attic = real.machine("attic")

    def full(*_: object) -> None:
        raise NoSpace("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(attic, "renew", full)
        with pytest.raises(NoSpace):
            await join_swarm(token, attic, who(attic, "attic"))
    again = real.machine("attic")
    assert (again.node, again.membership()) == (attic.node, None)
    await join_swarm(token, again, who(again, "attic"))
    assert real.machine("attic").certified(real.clock())
    nursery.cancel_scope.cancel()


async def test_the_secret_is_not_sent_to_a_machine_of_another_swarm(
    real: House, tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    false = House(tmp_path / "false", real.clock)
    heard: list[str] = []
    monkeypatch.setattr(false.enrolment, "_admit", partial(heard.append))
    address = await nursery.start(serve_joins, false)
    token = replace(await real.token(), addresses=(str(address),))
    attic = real.machine("attic")
    with pytest.raises(JoinRefused, match="another swarm"):
        await join_swarm(token, attic, who(attic, "attic"))
    assert heard == []
    assert attic.membership() is None
    nursery.cancel_scope.cancel()


async def test_a_machine_in_the_middle_with_the_real_ca_certificate_learns_nothing(
    real: House, tmp_path: Path, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows the right CA, which is public, but its own connection's certificate is another CA's, or a peer's."""
    heard: list[str] = []
    for number, roles in enumerate((BOTH, ("peer",))):
        false = House(tmp_path / f"false{number}", real.clock)
        if roles == ("peer",):
            request = certs.new_request(false.kept.key)
            false.kept.renew(real.authority.issue(request, roles, real.clock()))
            false.tls.use(false.kept.files)
        monkeypatch.setattr(false.enrolment, "authority", real.authority)
        monkeypatch.setattr(false.enrolment, "_admit", partial(heard.append))
        address = await nursery.start(serve_joins, false)
        token = replace(await real.token(), addresses=(str(address),))
        attic = real.machine("attic")
        with pytest.raises(SwarmError, match=r"not issued by this swarm|not a coordinator"):
            await join_swarm(token, attic, who(attic, "attic"))
        assert attic.membership() is None
    assert heard == []
    nursery.cancel_scope.cancel()


async def test_a_member_of_another_swarm_does_not_change_sides(real: House, tmp_path: Path) -> None:
    other = House(tmp_path / "other", real.clock)
    attic = real.machine("attic")
    certificate = certs.load_certificate(await other_join(other, attic))
    attic.join(other.authority.certificate, certificate, [Address("127.0.0.1", 1)])
    with pytest.raises(Conflict, match="another swarm"):
        await join_swarm(await real.token(), attic, who(attic, "attic"))


async def other_join(other: House, machine: NodeIdentity) -> bytes:
    return await other.ask(await other.token(), machine, "attic")


async def test_a_node_keeps_to_its_swarm_whoever_asks_it_to_join(house: House, tmp_path: Path, clock: Clock) -> None:
    attic, other = house.machine("attic"), House(tmp_path / "other", clock)
    mine = certs.load_certificate(await house.ask(await house.token(), attic, "attic"))
    attic.join(house.authority.certificate, mine, [Address("127.0.0.1", 7700)])
    theirs = certs.load_certificate(await other.ask(await other.token(), attic, "attic"))
    with pytest.raises(Conflict, match="another swarm"):
        attic.join(other.authority.certificate, theirs, [Address("127.0.0.1", 7800)])
    kept = attic.membership()
    assert kept is not None
    assert (kept.ca, kept.certificate) == (house.authority.certificate, mine)
    assert attic.coordinators() == (Address("127.0.0.1", 7700),)


async def test_no_address_answers(real: House) -> None:
    token = replace(await real.token(), addresses=("127.0.0.1:1", "127.0.0.1:2"))
    attic = real.machine("attic")
    with pytest.raises(LinkBroken, match=r"127\.0\.0\.1:1.*127\.0\.0\.1:2"):
        await join_swarm(token, attic, who(attic, "attic"))


# -- renewal


async def test_a_peer_asks_when_two_thirds_have_passed_and_hourly_until_it_came(
    house: House, autojump_clock: object
) -> None:
    attic = house.machine("attic")
    certificate = certs.load_certificate(await house.ask(await house.token(), attic, "attic"))
    attic.join(house.authority.certificate, certificate, [Address("127.0.0.1", 7700)])
    tls = SwarmTls(attic.files)
    member = PeerMembership(attic, tls, clock=house.clock)
    asked: list[tuple[float, Frame]] = []
    joined_s = house.clock()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(member.keep_certified, lambda frame: asked.append((house.clock() - joined_s, frame)))
        await trio.sleep(19.9 * DAY_S)
        assert asked == []
        await trio.sleep(0.2 * DAY_S)
        assert 19.9 * DAY_S < asked[0][0] < 20 * DAY_S + RENEWAL_CHECK_S
        assert len(asked) > 1, "it asks again while nothing comes"
        assert asked[1][0] - asked[0][0] == pytest.approx(RENEWAL_CHECK_S)
        body = unpack_body(asked[0][1].body)
        shown = certs.read_certificate(certificate)
        issued = await house.enrolment.renew(attic.node, "attic", body, shown)
        assert issued is not None
        assert await house.enrolment.renew(attic.node, "attic", body, shown) is None, "one at a time"
        assert member.take_issued(unpack_body(issued.body)) == (Address("127.0.0.1", 7700),)
        asked.clear()
        await trio.sleep(19 * DAY_S)
        assert asked == [], "the next one is due in another 20 days"
        nursery.cancel_scope.cancel()
    kept = attic.membership()
    assert kept is not None
    assert kept.about.serial != certificate.serial_number
    (record,) = house.enrolment.nodes
    assert record.expires_s == kept.about.ends_s


async def test_a_peer_of_its_own_coordinator_never_asks(house: House) -> None:
    asked: list[Frame] = []
    member = PeerMembership(house.kept, house.tls, renews=False, clock=house.clock)
    await member.keep_certified(asked.append)
    assert asked == []


async def test_a_young_certificate_is_not_renewed(house: House) -> None:
    """Each costs a signature and a write: a member that asks without end gets none."""
    attic = house.machine("attic")
    certificate = certs.load_certificate(await house.ask(await house.token(), attic, "attic"))
    body = {"request": certs.new_request(attic.key)}
    version = house.state.version
    for _ in range(3):
        assert await house.enrolment.renew(attic.node, "attic", body, certs.read_certificate(certificate)) is None
    assert house.state.version == version


async def test_renewal_is_for_ones_own_key_and_not_for_the_removed(house: House) -> None:
    attic, den = house.machine("attic"), house.machine("den")
    for machine, name in ((attic, "attic"), (den, "den")):
        await house.ask(await house.token(), machine, name)
    with pytest.raises(ProtocolError, match="of another"):
        await house.enrolment.renew(attic.node, "attic", {"request": certs.new_request(den.key)})
    await house.enrolment.remove("attic")
    with pytest.raises(JoinRefused, match="removed"):
        await house.enrolment.renew(attic.node, "attic", {"request": certs.new_request(attic.key)})


async def test_a_certificate_that_is_not_ours_is_not_taken(house: House, tmp_path: Path) -> None:
    attic, den = house.machine("attic"), house.machine("den")
    mine = await house.ask(await house.token(), attic, "attic")
    theirs = await house.ask(await house.token(), den, "den")
    attic.join(house.authority.certificate, certs.load_certificate(mine), [Address("127.0.0.1", 7700)])
    member = PeerMembership(attic, SwarmTls(attic.files), clock=house.clock)
    foreign = House(tmp_path / "foreign", house.clock)
    foreign_one = await foreign.ask(await foreign.token(), attic, "attic")
    for certificate in (theirs, foreign_one, b"", b"x" * 5000, None):
        with pytest.raises(ProtocolError):
            member.take_issued({"certificate": certificate})
    kept = attic.membership()
    assert kept is not None
    assert certs.to_der(kept.certificate) == mine


async def test_a_coordinators_own_certificate_renews_itself(house: House, autojump_clock: object) -> None:
    first = house.kept.membership()
    assert first is not None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_certified, house.authority, house.kept, BOTH, house.tls, house.clock)
        await trio.sleep(100 * DAY_S)
        nursery.cancel_scope.cancel()
    kept = house.kept.membership()
    assert kept is not None
    assert kept.about.serial != first.about.serial
    assert kept.about.ends_s - house.clock() > 9 * DAY_S
    assert kept.about.roles == BOTH


# -- removal


async def test_the_list_of_the_removed_ends_links_at_a_peer(house: House) -> None:
    attic = house.machine("attic")
    await house.ask(await house.token(), attic, "attic")
    member = PeerMembership(house.kept, house.tls, renews=False, clock=house.clock)
    cut = trio.Event()

    async def hold() -> None:
        with house.tls.until_revoked(attic.node):
            await trio.sleep_forever()
        cut.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(hold)
        await trio.testing.wait_all_tasks_blocked()
        member.take_revoked(unpack_body(house.enrolment.revoked().body))
        await trio.testing.wait_all_tasks_blocked()
        assert not cut.is_set()
        await house.enrolment.remove("attic")
        await cut.wait()
    member.take_revoked(unpack_body(house.enrolment.revoked().body))
    assert house.tls.is_revoked(attic.node)
    for damaged in ({}, {"nodes": "attic"}, {"nodes": [7]}):
        with pytest.raises(ProtocolError):
            member.take_revoked(damaged)


# -- what lies in the data directory


def test_an_identity_is_made_once_and_is_private(tmp_path: Path) -> None:
    first = NodeIdentity.open(tmp_path)
    assert list(tmp_path.iterdir()) == [], "looking makes nothing"
    first.keep()
    assert NodeIdentity.open(tmp_path).node == first.node
    assert stat.S_IMODE(first.folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in first.folder.iterdir()} == {0o600}
    assert first.membership() is None
    assert first.coordinators() == ()


def read_all(house: House) -> None:
    kept = NodeIdentity.open(house.folder / "coordinator")
    SwarmAuthority.open(kept, house.clock())
    kept.membership()


@pytest.mark.parametrize("name", ["key.pem", "certificate.pem", "ca.pem", "ca-key.pem", "coordinators.json"])
async def test_a_damaged_file_is_named_and_not_replaced(house: House, name: str) -> None:
    house.kept.remember([Address("127.0.0.1", 1)])
    path = house.kept.folder / name
    for damage in (b"", b"nonsense", os.urandom(70_000)):
        path.write_bytes(damage)
        with pytest.raises(InvalidRequest, match=name):
            read_all(house)
        assert path.read_bytes() == damage


async def test_a_key_and_certificates_of_two_nodes_are_not_mixed(house: House, tmp_path: Path) -> None:
    other = House(tmp_path / "other", house.clock)
    for name in ("certificate.pem", "ca.pem"):
        whole = (house.kept.folder / name).read_bytes()
        (house.kept.folder / name).write_bytes((other.kept.folder / name).read_bytes())
        with pytest.raises(InvalidRequest, match="restore them together"):
            read_all(house)
        (house.kept.folder / name).write_bytes(whole)


async def test_a_peer_does_not_become_a_coordinator_by_a_flag(house: House) -> None:
    attic = house.machine("attic")
    certificate = certs.load_certificate(await house.ask(await house.token(), attic, "attic"))
    attic.join(house.authority.certificate, certificate, [Address("127.0.0.1", 7700)])
    with pytest.raises(Conflict, match="--data-dir"):
        SwarmAuthority.open(attic, house.clock())


def test_the_way_to_a_coordinator_is_an_address_of_this_machine() -> None:
    assert address_towards(Address("127.0.0.1", 7700)) == Address("127.0.0.1", 0)
    with pytest.raises(LinkBroken, match="--swarm-listen"):
        address_towards(Address("no-such-host.invalid", 7700))
