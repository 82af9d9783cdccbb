"""Who may be connected: a coordinator with real certificates, and members that rename, copy and are removed."""

from __future__ import annotations

import errno
import math
import os
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
from beats import beat_of
from contexts import node_context
from kept_alone import state_at

from swarmnode.api.backend import LoadOptions
from swarmnode.catalog.registry import Registry
from swarmnode.cluster.join_token import ID_BYTES, SECRET_BYTES, JoinToken
from swarmnode.cluster.member_table import Heading, KnownMembers, Row, Update
from swarmnode.cluster.membership import Left, NodeState
from swarmnode.cluster.node_book import NodeRecord
from swarmnode.cluster.placement import ALL_CAPABILITIES
from swarmnode.compute.scripted_servable import write_scripted_servable
from swarmnode.config import read_settings
from swarmnode.errors import (
    Conflict,
    InvalidRequest,
    LinkBroken,
    LoadRefused,
    MembersAwaited,
    NodeRemoved,
    NoSpace,
    PeerNotFound,
    ProtocolError,
    SwarmError,
)
from swarmnode.ids import BootId, ModelId, NodeId
from swarmnode.node import NodeOptions, run_node
from swarmnode.roles.context import PeerResources
from swarmnode.roles.coordinator import Coordinator
from swarmnode.roles.enrolment import Enrolment, certify_self
from swarmnode.roles.gateway import Gateway
from swarmnode.roles.identity import NodeIdentity, SwarmAuthority
from swarmnode.roles.joining import PeerMembership
from swarmnode.roles.member_codec import read_members
from swarmnode.roles.running_node import LOCK_NAME
from swarmnode.wire import certificates as certs
from swarmnode.wire.address import Address
from swarmnode.wire.bodies import unpack_body
from swarmnode.wire.direct import DirectTransport
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import Identity
from swarmnode.wire.tls import SwarmTls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from swarmnode.wire.link import Channel, Hello

END_S = 5.0
ANYWHERE = Address("127.0.0.1", 0)


class Machine:
    """A member that listens, and follows the coordinator's list of removed nodes."""

    def __init__(self, kept: NodeIdentity, name: str) -> None:
        self.identity = Identity(kept.node, BootId(f"{name} boot"), name, ("peer",))
        tls = SwarmTls(kept.files)
        self.transport = DirectTransport(tls)
        self.member = PeerMembership(kept, tls)
        self.lanes = 0

    async def serve(self, kind: str, hello: Hello, channel: Channel) -> None:
        self.lanes += 1
        try:
            async for frame in channel:
                await channel.send(frame)
        finally:
            self.lanes -= 1

    async def follow(self, house: Address, *, task_status: trio.TaskStatus[None]) -> None:
        with suppress(SwarmError):
            async with self.transport.dial(house, "control", self.identity) as control:
                async for frame in control:
                    if frame.kind == "revoked":
                        self.member.take_revoked(unpack_body(frame.body))
                        task_status.started() if not unpack_body(frame.body)["nodes"] else None


class House:
    """The coordinator."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = NodeIdentity.open(folder / "house")
        self.authority = SwarmAuthority.open(kept, time.time())
        roles = ("coordinator", "peer")
        certify_self(self.authority, kept, roles, time.time())
        tls = SwarmTls(kept.files, enrolment=True)
        self.transport = DirectTransport(tls)
        self.identity = Identity(kept.node, BootId("b"), "house", roles)
        self.events: list[str] = []
        context = replace(
            node_context(self.identity, self.transport, read_settings(folder, environ={})),
            emit=lambda event, _: self.events.append(event),
        )
        self.state = state_at(folder / "swarm.json")
        keeper = NodeRecord(kept.node, "house", math.inf)
        enrolment = Enrolment(self.authority, self.state, tls, ("127.0.0.1:1",), keeper=keeper)
        self.coordinator = Coordinator(context, Registry(folder), enrolment)
        self.address = ANYWHERE

    async def run(self, nursery: trio.Nursery) -> None:
        await nursery.start(self.coordinator.run)
        listen = partial(self.transport.listen, ANYWHERE, self.coordinator.serve_channel, self.identity)
        self.address = await nursery.start(listen)

    async def machine(self, name: str) -> Machine:
        kept = NodeIdentity.open(self.folder / name)
        certificate = self.authority.issue(certs.new_request(kept.key), ("peer",), time.time())
        await self.state.change(lambda _, nodes: nodes.issued(kept.node, name, time.time() + 1000))
        kept.join(self.authority.certificate, certificate, [self.address])
        return Machine(kept, name)

    def connected(self) -> set[str]:
        return {member.identity.name for member in self.coordinator.members.values()}


@pytest.fixture
async def house(tmp_path: Path, nursery: trio.Nursery) -> AsyncIterator[House]:
    house = House(tmp_path)
    await house.run(nursery)
    yield house
    nursery.cancel_scope.cancel()


async def test_a_removed_nodes_lanes_with_others_are_cut_there(house: House, nursery: trio.Nursery) -> None:
    """Two peers speak to each other without the coordinator; both of them hear of the removal from it."""
    attic, den = await house.machine("attic"), await house.machine("den")
    at_den = await nursery.start(partial(den.transport.listen, ANYWHERE, den.serve, den.identity))
    await nursery.start(den.follow, house.address)
    async with attic.transport.dial(at_den, "steps", attic.identity) as lane:
        await lane.send(Frame("end", {"session": 1}))
        assert (await lane.receive()).kind == "end"
        await house.coordinator.remove("attic")
        with trio.fail_after(END_S), pytest.raises(LinkBroken):
            await lane.receive()
        with trio.fail_after(END_S):
            while den.lanes:  # noqa: ASYNC110 - the lane's task has no event for its end
                await trio.sleep(0.01)
        with pytest.raises(NodeRemoved, match="removed from the swarm"):
            async with attic.transport.dial(at_den, "steps", attic.identity):
                pytest.fail("it was let in again")


async def refusal(house: House, machine: Machine, identity: Identity, kind: str) -> SwarmError:
    """What a channel of a member's is ended with; on `control` it sends a beat."""
    with trio.fail_after(END_S):
        try:
            async with machine.transport.dial(house.address, kind, identity) as channel:
                if kind == "control":
                    await channel.send(beat_of(identity))
                while True:
                    await channel.receive()
        except SwarmError as error:
            return error


@pytest.mark.parametrize("kind", ["requests", "control"])
async def test_a_copy_of_an_identity_is_told_on_either_channel(house: House, kind: str) -> None:
    attic = await house.machine("attic")
    async with attic.transport.dial(house.address, "requests", attic.identity):
        with trio.fail_after(END_S):
            while house.connected() != {"attic"}:  # noqa: ASYNC110 - the coordinator's own task
                await trio.sleep(0.01)
        copied = await refusal(house, attic, replace(attic.identity, boot=BootId("another process")), kind)
        assert isinstance(copied, Conflict)
        assert "data directory copied" in copied.message
        assert house.connected() == {"attic"}
        again = await refusal(house, attic, replace(attic.identity, boot=BootId("another process")), kind)
        assert again.message == copied.message
    told = [event for event in house.events if event == "copy_refused"]
    assert told == ["copy_refused"], "people hear of it once"


async def kind_after_places(control: Channel) -> str:
    while (kind := (await control.receive()).kind) == "places":
        pass
    return kind


async def test_a_doctor_on_a_copy_is_told_and_one_on_the_node_itself_is_not(house: House) -> None:
    attic = await house.machine("attic")
    at_home = replace(attic.identity, listen=("192.0.2.1:7700",))
    async with attic.transport.dial(house.address, "requests", at_home):
        with trio.fail_after(END_S):
            while house.connected() != {"attic"}:  # noqa: ASYNC110 - the coordinator's own task
                await trio.sleep(0.01)
        doctor = replace(at_home, boot=BootId("doctor's"), name="doctor")
        for listen, copied in ((("192.0.2.2:7700",), True), (at_home.listen, False)):
            examined = replace(doctor, listen=listen)
            with trio.fail_after(END_S):
                async with attic.transport.dial(house.address, "control", examined) as control:
                    await control.send(Frame("dial_back", {}))
                    assert (await control.receive()).kind == "revoked"
                    if copied:  # the refusal may overtake what else is told at first
                        with pytest.raises(Conflict, match="data directory copied"):
                            await kind_after_places(control)
                    else:
                        assert [(await control.receive()).kind for _ in range(2)] == ["places", "dialed_back"]


@pytest.mark.parametrize(
    ("name", "error"), [("house", Conflict), ("den", Conflict), ("evil\x1b[2J", SwarmError), ("", SwarmError)]
)
async def test_a_member_connects_under_no_name_that_fools_people(
    house: House, name: str, error: type[SwarmError]
) -> None:
    attic = await house.machine("attic")
    await house.machine("den")
    assert isinstance(await refusal(house, attic, replace(attic.identity, name=name), "requests"), error)
    assert {record.name for record in house.coordinator.enrolment.nodes} == {"attic", "den"}
    assert house.connected() == set()


@pytest.mark.parametrize("kind", ["requests", "control"])
@pytest.mark.parametrize("protocol", [(2, 2), (4, 4)])
async def test_a_program_that_is_a_version_older_or_newer_is_refused_naming_both(
    house: House, kind: str, protocol: tuple[int, int]
) -> None:
    """Before it sends a beat that is none here."""
    attic = await house.machine("attic")
    error = await refusal(house, attic, replace(attic.identity, protocol=protocol), kind)
    assert isinstance(error, ProtocolError)
    assert f"the listener speaks 3, the dialer {protocol[0]}; update the older program" in error.message
    assert house.connected() == set()


async def test_a_new_name_is_noted_when_its_node_connects(house: House) -> None:
    attic = await house.machine("attic")
    async with attic.transport.dial(house.address, "requests", replace(attic.identity, name="loft")):
        with trio.fail_after(END_S):
            while house.connected() != {"loft"}:  # noqa: ASYNC110 - the coordinator's own task
                await trio.sleep(0.01)
    assert [record.name for record in state_at(house.folder / "swarm.json").nodes.records()] == ["loft"]
    with pytest.raises(InvalidRequest):
        await house.coordinator.enrolment.note_name(attic.identity.node, "x" * 65)


async def test_a_call_counts_on_who_brought_it_not_on_who_it_says(house: House) -> None:
    attic = await house.machine("attic")
    await house.machine("den")
    brought: list[str] = []

    async def serve(via: str, channel: Channel) -> None:
        brought.append(via)

    house.coordinator.serve_api = serve
    async with attic.transport.dial(house.address, "api", replace(attic.identity, name="den")) as channel:
        with trio.fail_after(END_S), pytest.raises(trio.EndOfChannel):
            await channel.receive()
    assert brought == ["attic"]


async def answers(control: Channel, said: Frame, count: int) -> list[Frame]:
    await control.send(said)
    with trio.fail_after(END_S):
        return [await control.receive() for _ in range(count)]


async def test_a_beat_is_answered_with_what_the_members_table_lacks(house: House) -> None:
    attic = await house.machine("attic")
    me = replace(attic.identity, listen=("192.0.2.1:7700",), incarnation=5)
    async with (
        attic.transport.dial(house.address, "requests", me),
        attic.transport.dial(house.address, "control", me) as control,
    ):
        with trio.fail_after(END_S):
            while house.connected() != {"attic"}:  # noqa: ASYNC110 - the coordinator's own task
                await trio.sleep(0.01)
        frames = await answers(control, beat_of(me, incarnation=5), 4)
        assert [frame.kind for frame in frames] == ["revoked", "places", "heard", "members"]
        assert "above" not in frames[2].header
        update = read_members(frames[3])
        assert (update.since, update.heading.coordinator) == (0, "house")
        [row] = update.rows
        assert (row.name, row.address, row.state) == ("attic", "192.0.2.1:7700", NodeState.ALIVE)
        assert [f.kind for f in await answers(control, beat_of(me, incarnation=5, table=update.mark), 1)] == ["heard"]
        assert [f.kind for f in await answers(control, beat_of(me, incarnation=5), 2)] == ["heard", "members"]


async def test_a_node_that_counts_as_dead_comes_back_by_a_higher_incarnation(house: House) -> None:
    attic = await house.machine("attic")
    me = replace(attic.identity, incarnation=5)
    async with attic.transport.dial(house.address, "control", me) as control:
        first = (await answers(control, beat_of(me, incarnation=5), 4))[2:]
        mark = read_members(first[1]).mark
        house.coordinator._driver.feed(Left(me.node, me.boot))
        [heard] = await answers(control, beat_of(me, incarnation=5, table=mark), 1)
        assert heard.header["above"] == 5
        assert house.coordinator.state(me.node) is NodeState.LEFT
        [heard] = await answers(control, beat_of(me, incarnation=6, table=mark), 1)
        assert "above" not in heard.header
        assert house.coordinator.state(me.node) is NodeState.ALIVE


KNEW = Update(
    (3, 4),
    0,
    Heading("first"),
    tuple(Row(NodeId(name), name, f"{name}:7700", NodeState.ALIVE) for name in ("den", "loft", "gone")),
)
"""Of the coordinator before."""
HOPELESS: list[tuple[LoadOptions, type[SwarmError]]] = [
    (LoadOptions(num_stages=1000), LoadRefused),
    (LoadOptions(dtype="float7"), LoadRefused),
    (LoadOptions(peers=("den", "den")), LoadRefused),
    (LoadOptions(peers=("den",), num_stages=2), LoadRefused),
    (LoadOptions(peers=("den", "nobody")), PeerNotFound),
]
"""What nobody's coming makes possible."""


async def test_a_coordinator_elected_anew_shows_and_awaits_the_members_that_it_knew_as_one_of_them(
    tmp_path: Path, nursery: trio.Nursery
) -> None:
    write_scripted_servable(tmp_path, "scripted", {}, stages=1)
    house = House(tmp_path)
    attic = await house.machine("attic")
    attic.identity = replace(attic.identity, capabilities=tuple(ALL_CAPABILITIES))
    gone = NodeId("gone")
    await house.state.change(lambda _, nodes: nodes.issued(gone, "gone", 2e9))
    await house.coordinator.enrolment.remove("gone")
    seen = (Row(attic.identity.node, "attic", "", NodeState.ALIVE), *KNEW.rows)
    house.coordinator.context.known.take(replace(KNEW, rows=seen), 0.0)
    await house.run(nursery)
    gateway = Gateway(house.coordinator)

    def states() -> dict[str, str]:
        return {peer["name"]: peer["state"] for peer in gateway.nodes()["peers"]}

    assert states() == {"attic": "awaited", "den": "awaited", "loft": "awaited"}
    assert {node["name"]: node["state"] for node in gateway.nodes()["members"]} == {
        "attic": "awaited",
        "gone": "removed",
    }
    refused = r"attic, den, loft did not come back yet; .* Without them: 1 stage"
    with pytest.raises(MembersAwaited, match=refused) as few:
        house.coordinator.rings.plan(ModelId("scripted"), LoadOptions())
    assert few.value.retryable
    plan = partial(house.coordinator.rings.plan, ModelId("scripted"))
    with pytest.raises(MembersAwaited, match="no peer is called 'den'"):
        plan(LoadOptions(peers=("den",)))
    for options, why in HOPELESS:
        with pytest.raises(why):  # members_awaited would have people try again for ever
            plan(options)
    async with (
        attic.transport.dial(house.address, "requests", attic.identity),
        attic.transport.dial(house.address, "control", attic.identity) as control,
    ):
        with trio.fail_after(END_S):
            while house.connected() != {"attic"}:  # noqa: ASYNC110 - the coordinator's own task
                await trio.sleep(0.01)
        update = read_members((await answers(control, beat_of(attic.identity), 4))[3])
        assert {row.name: row.state for row in update.rows} == {
            "attic": NodeState.ALIVE,
            "den": NodeState.SUSPECT,
            "loft": NodeState.SUSPECT,
        }
        assert states() == {"attic": "alive", "den": "awaited", "loft": "awaited"}
        house.coordinator.rings.plan(ModelId("scripted"), LoadOptions())
    nursery.cancel_scope.cancel()


async def test_a_removed_node_leaves_the_table_at_once(house: House) -> None:
    attic = await house.machine("attic")
    async with attic.transport.dial(house.address, "requests", attic.identity):
        with trio.fail_after(END_S):
            while house.connected() != {"attic"}:  # noqa: ASYNC110 - the coordinator's own task
                await trio.sleep(0.01)
        await house.coordinator.remove("attic")
        with trio.fail_after(END_S):
            while house.connected():  # noqa: ASYNC110 - the coordinator's own task
                await trio.sleep(0.01)
    assert house.coordinator.state(attic.identity.node) is NodeState.LEFT
    assert house.coordinator._roll.table.rows == {}


async def test_a_revoked_token_is_told_at_once_to_who_is_connected(house: House) -> None:
    """And to who lacks something before it with the answer to the next beat."""
    attic = await house.machine("attic")
    async with attic.transport.dial(house.address, "control", attic.identity) as control:
        first = read_members((await answers(control, beat_of(attic.identity), 4))[3])
        known = KnownMembers()
        assert known.take(first, 0.0)
        house.coordinator.token_revoked("any")
        with trio.fail_after(END_S):
            assert known.take(read_members(await control.receive()), 0.0)
        assert known.heading.revocations == 1
        house.coordinator.token_revoked("another")
        with trio.fail_after(END_S):
            await control.receive()
        heard, update = await answers(control, beat_of(attic.identity, table=known.mark), 2)
        assert heard.kind == "heard"
        assert known.take(read_members(update), 0.0)
        assert known.heading.revocations == 2


async def test_an_incarnation_only_grows_whatever_restarts(tmp_path: Path) -> None:
    kept = NodeIdentity.open(tmp_path)
    assert [kept.next_incarnation() for _ in range(3)] == [1, 2, 3]
    member = PeerMembership(NodeIdentity.open(tmp_path), cast("Any", None))
    await member.refute(2)
    assert member.incarnation == 3, "it said more than that already"
    await member.refute(7)
    assert member.incarnation == NodeIdentity.open(tmp_path).incarnation() == 8
    assert NodeIdentity.open(tmp_path).next_incarnation() == 9


class Disk:
    full = False

    def fsync(self, descriptor: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()
    monkeypatch.setattr(os, "fsync", made.fsync)
    return made


async def test_a_member_lives_on_where_its_disk_is_full(
    tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    kept = NodeIdentity.open(tmp_path)
    kept.next_incarnation()
    member = PeerMembership(kept, cast("Any", None))
    disk.full = True
    await member.refute(7)
    assert (member.incarnation, kept.incarnation()) == (8, 1)
    assert "cannot be written: No space left on device" in caplog.text
    assert member.take_places({"places": ["192.0.2.1:7700"]}, ()) == (Address("192.0.2.1", 7700),)
    disk.full = False
    await member.refute(8)
    assert member.incarnation == kept.incarnation() == 9


async def test_a_term_that_cannot_be_kept_is_not_followed_yet(tmp_path: Path, disk: Disk) -> None:
    kept = NodeIdentity.open(tmp_path)
    member = PeerMembership(kept, cast("Any", None))
    disk.full = True
    for _ in range(2):
        with pytest.raises(NoSpace):
            await member.admit_term(3)
    disk.full = False
    await member.admit_term(3)
    assert kept.term() == 3


async def test_a_certificate_that_cannot_be_kept_leaves_the_old_one(house: House, disk: Disk) -> None:
    attic = await house.machine("attic")
    kept = NodeIdentity.open(house.folder / "attic")
    before, places = kept.files.certificate.read_bytes(), kept.coordinators()
    issued = house.authority.issue(certs.new_request(kept.key), ("peer",), time.time())
    body = {"certificate": certs.to_der(issued), "coordinators": ["192.0.2.1:7700"]}
    disk.full = True
    assert attic.member.take_issued(body) == (Address("192.0.2.1", 7700),)
    assert (kept.files.certificate.read_bytes(), kept.coordinators()) == (before, places)
    disk.full = False
    attic.member.take_issued(body)
    assert kept.files.certificate.read_bytes() == certs.to_pem(issued)


async def test_a_node_that_cannot_join_leaves_no_identity_behind(tmp_path: Path) -> None:
    token = JoinToken(bytes(32), ("127.0.0.1:1",), bytes(ID_BYTES), bytes(SECRET_BYTES))
    for join, error in ((token, LinkBroken), (None, InvalidRequest)):
        options = NodeOptions(("peer",), ANYWHERE, None, join, tmp_path, None, PeerResources(1 << 30, "cpu", 1))
        with pytest.raises(error):
            await run_node(options, lambda *_: None)
        assert os.listdir(tmp_path) == [LOCK_NAME]


async def test_a_node_on_a_full_disk_says_so_and_does_not_start(tmp_path: Path, disk: Disk) -> None:
    options = NodeOptions(("coordinator",), ANYWHERE, None, None, tmp_path, None, PeerResources(1 << 30, "cpu", 1))
    disk.full = True
    with pytest.raises(NoSpace, match=r"key\.pem cannot be written: No space left on device; free some space"):
        await run_node(options, lambda *_: None)
