"""Who may coordinate besides this coordinator: those that ask, are reached from here, and get the swarm's key."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from swarmnode.cluster.voter_book import Seated, lacking_without, next_voters
from swarmnode.errors import Conflict, Forbidden, InvalidRequest, SwarmError
from swarmnode.roles.enrolment import VOTER_ROLES, own_request, places_of
from swarmnode.roles.swarm_state import NOT_KEPT
from swarmnode.wire import certificates as certs
from swarmnode.wire.address import Address, ApiUrl, parse_address, parse_place
from swarmnode.wire.bodies import pack_body, unpack_body
from swarmnode.wire.frames import Frame
from swarmnode.wire.nursery import open_flat_nursery

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from swarmnode.cluster.node_book import NodeBook, NodeRecord
    from swarmnode.cluster.voter_book import VoterBook
    from swarmnode.ids import NodeId
    from swarmnode.roles.dialing_back import DialBacks
    from swarmnode.roles.enrolment import Enrolment
    from swarmnode.roles.swarm_state import SwarmState
    from swarmnode.roles.voting import Caller, Voting
    from swarmnode.wire.address import Place
    from swarmnode.wire.certificates import NodeCertificate
    from swarmnode.wire.link import Channel, Hello

CHECK_S = 0.5
"""How soon a node that holds everything gets its vote."""
MAX_PLACES = 8
LOOK_AGAIN_S = 30.0
"""A voter that says that it moved, and is not reached there, may be so in a while: a firewall, a router's new rule."""

_log = logging.getLogger(__name__)


class Seats:
    """`run` it while this node coordinates; `stand` answers a node that wants to be able to."""

    def __init__(
        self,
        me: Seated,
        state: SwarmState,
        voting: Voting,
        enrolment: Enrolment,
        dial_backs: DialBacks,
        *,
        admits: bool,
        emit: Callable[[str, Mapping[str, object]], None],
        told: Callable[[], None],
    ) -> None:
        """`admits` False: nobody new comes in. `told` is called when there is somebody new, or at another place."""
        self._told = told
        self._me = me
        self._state = state
        self._voting = voting
        self._enrolment = enrolment
        self._dial_backs = dial_backs
        self._admits = admits
        self._emit = emit
        self._looked_s: dict[NodeId, float] = {}
        """When a voter was last dialled where it says it is now."""

    async def run(self) -> None:
        async with open_flat_nursery() as nursery:
            while True:
                for caller in self._voting.callers.values():
                    if (seat := self._moved(caller)) is not None:
                        nursery.start_soon(self._follow_move, caller, seat)
                try:
                    await self._put_right()
                except NOT_KEPT as error:  # it is tried again
                    _log.info("the voters stay as they are: %s", error)
                await trio.sleep(CHECK_S)

    async def _put_right(self) -> None:
        if self._state.seats.get(self._me.node) != self._me:
            await self._state.change_seats(lambda seats, _: seats.seat(self._me))
        seated = frozenset(record.node for record in self._state.seats.records())
        await self._voting.seat(seated)
        may_vote = seated - self._voting.blank  # who lost its disk comes in anew, when its removal has reached it
        wanted = next_voters(self._state.voters, self._me.node, may_vote, self._voting.up_to_date)
        if wanted is not None:
            await self._state.change_voters(wanted)
            self._emit("voters_changed", {"voters": self._state.voter_names(wanted)})

    def _moved(self, caller: Caller) -> Seated | None:
        """The seat of a node that says that it is elsewhere now, when it is time to look there."""
        here, now = caller.identity, trio.current_time()
        seat = self._state.seats.get(here.node)
        if seat is None or not here.listen or {*here.listen} <= {*seat.places}:
            return None
        if now - self._looked_s.get(here.node, -LOOK_AGAIN_S) < LOOK_AGAIN_S:
            return None
        self._looked_s[here.node] = now
        return seat

    async def _follow_move(self, caller: Caller, seat: Seated) -> None:
        """A node that may coordinate came back at another address, where nobody looks for it: it dials the others, and
        is dialled back as when it got its seat."""
        here = caller.identity
        try:
            listen = [parse_address(text) for text in here.listen]
            await self._check(listen, here.node, caller.source)
        except SwarmError as error:
            _log.warning("%s says that it is at %s now: %s", seat.name, ", ".join(here.listen), error)
            return
        apis = (place for place in seat.places if isinstance(parse_place(place), ApiUrl))
        moved = replace(seat, places=(*map(str, listen), *apis)[:MAX_PLACES])

        def edit(seats: VoterBook, _: NodeBook) -> bool:
            return seats.get(seat.node) == seat and seats.seat(moved)  # it may have been removed meanwhile

        try:
            if await self._state.change_seats(edit):
                self._tell_seated(moved)
        except NOT_KEPT as error:
            _log.info("%s stays known where it was: %s", seat.name, error)

    def _tell_seated(self, record: Seated) -> None:
        self._emit("seated", {"name": record.name, "places": list(record.places)})
        self._told()

    def voter_links(self) -> list[dict[str, object]]:
        """Who votes besides this node, by `node` and `name`, and whether the link to it is `up`."""
        voters, connected = self._state.voters, self._voting.connected
        named = zip(voters, self._state.voter_names(voters), strict=True)
        return [{"node": n, "name": name, "up": n in connected} for n, name in named if n != self._me.node]

    def check_leaving(self, record: NodeRecord) -> None:
        """Raises Conflict for a voter without which no majority would be connected. A voter that was removed a moment
        ago counts, as one that is away, until the others have agreed that it votes no more."""
        connected = {self._me.node, *(n for n in self._voting.connected if self._state.seats.get(n) is not None)}
        away = lacking_without(record.node, self._state.voters, connected)
        if away:
            raise Conflict(
                f"without {record.name} no majority of the voters would be connected, and nobody could coordinate: "
                f"away are {', '.join(self._state.voter_names(away))}. Start them again, or remove them first"
            )

    async def stand(self, hello: Hello, channel: Channel, frame: Frame) -> Frame | None:
        """A member asks to be able to coordinate: `seat` with key and certificate, or `no_seat` with why not; nothing
        for one that can already, from where it says it is."""
        try:
            body = unpack_body(frame.body)
            places = places_of(body, MAX_PLACES)
            record = Seated(hello.identity.node, hello.identity.name, tuple(map(str, places)))
            if self._state.seats.get(record.node) == record and _coordinates(channel.certified):
                return None
            if not self._admits and self._state.seats.get(record.node) is None:
                raise Forbidden("this swarm takes no more voters (SWARM_ADMIT_VOTERS=0 at the coordinator)")
            await self._check(places, record.node, channel.direct_source)
            return await self._seat(record, own_request(record.node, body))
        except SwarmError as error:
            self._emit("seat_refused", {"name": hello.identity.name, "why": error.message})
            return Frame("no_seat", {"message": error.message})

    async def _check(self, places: Sequence[Place], node: NodeId, source: str) -> None:
        """All voters will dial these: the first is dialled now. Raises what is wrong with one of them."""
        first, *others = places
        if not isinstance(first, Address):
            raise InvalidRequest(f"the first place of a voter is its swarm port, and {first} is none")
        named = [place if isinstance(place, Address) else place.address for place in others]
        await self._dial_backs.dial(node, first, source, named)

    async def _seat(self, record: Seated, request: bytes) -> Frame:
        certificate, key = self._enrolment.authority.seat(request, VOTER_ROLES, self._enrolment.now)

        def edit(seats: VoterBook, nodes: NodeBook) -> bool:
            nodes.issued(record.node, record.name, certs.read_certificate(certificate).ends_s, self._enrolment.keeper)
            return seats.seat(record)

        if await self._state.change_seats(edit):
            self._tell_seated(record)
        return Frame("seat", {}, pack_body({"certificate": certs.to_der(certificate), "key": key}))


def _coordinates(certified: NodeCertificate | None) -> bool:
    return certified is not None and "coordinator" in certified.roles
