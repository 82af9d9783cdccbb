"""The coordinator role: knows the peers, the catalogue and the rings, and carries requests between API and heads."""

from __future__ import annotations

import logging
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from swarmnode.cluster.local_health import LocalHealth
from swarmnode.cluster.machine_book import MachineBook
from swarmnode.cluster.member_table import Heading
from swarmnode.cluster.membership import Connected, Heard, Late, Left, NodeState, Parted, StateChanged
from swarmnode.cluster.recent_events import RecentEvents
from swarmnode.cluster.ring_life_messages import (
    ProbeReturned,
    Progress,
    RingInput,
    StageDown,
    StageLinked,
    StageUnloaded,
)
from swarmnode.cluster.roll import Roll
from swarmnode.driver import Driver
from swarmnode.errors import Conflict, LinkBroken, NotCoordinator, ProtocolError
from swarmnode.ids import NodeId, RingId
from swarmnode.roles.control_channels import ControlChannels
from swarmnode.roles.dialing_back import DialBacks
from swarmnode.roles.file_server import serve_files
from swarmnode.roles.loop_watch import watch_loop
from swarmnode.roles.member_codec import members_frame, read_mark
from swarmnode.roles.members import Member
from swarmnode.roles.relay import Relay
from swarmnode.roles.reports import Beat, LinkedStage, ReadyStage, read_gauges, read_report
from swarmnode.roles.rings import Peers, Rings
from swarmnode.roles.worker_logs import LogAsks
from swarmnode.wire.bodies import unpack_body
from swarmnode.wire.frames import Frame
from swarmnode.wire.nursery import open_flat_nursery

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from swarmnode.catalog.registry import Registry
    from swarmnode.cluster.member_table import Row
    from swarmnode.cluster.membership import MembershipEvent, MembershipInput
    from swarmnode.cluster.node_book import NodeRecord
    from swarmnode.roles.context import NodeContext
    from swarmnode.roles.enrolment import Enrolment
    from swarmnode.roles.outbox import Outbox
    from swarmnode.roles.polling import PolledLinks
    from swarmnode.roles.seats import Seats
    from swarmnode.roles.swarm_state import SwarmState
    from swarmnode.wire.link import Channel, Hello, Identity

FENCED = frozenset({"load", "unload", "link", "probe_ring"})
"""Commands that change what a node holds: they name the term they are given in."""
HEARD_EVERY_S = 0.25
"""How often a connection's frames count as signs of life: texts come with every token, beats every other second."""
LISTEN_S = 1.0
"""How often a channel is looked at for anything that came on it."""
REQUEST_KINDS = frozenset({"accepted", "started", "text", "done", "error"})

_log = logging.getLogger(__name__)


class Coordinator:
    """`run` it, hand it the channels of its swarm port, and give its `Gateway` to the API."""

    def __init__(
        self,
        context: NodeContext,
        registry: Registry,
        enrolment: Enrolment,
        state: SwarmState | None = None,
        *,
        term: int = 0,
    ) -> None:
        """`state`: where the rings that run are written down; None: nowhere, a restart then finds none of them.
        `term`: in which it was elected; its commands name it, and nodes that heard a later one refuse them."""
        self.recent = RecentEvents()
        self.context = replace(context, emit=self._emit)
        self._report = context.emit
        self.registry = registry
        self.enrolment = enrolment
        self._state = state
        self.members: dict[NodeId, Member] = {}
        self.term = term
        self.seats: Seats | None = None
        """Who may coordinate besides; None: nobody."""
        self.dial_backs = DialBacks(context.transport)
        self._controls = ControlChannels()
        self.relay = Relay(self._tell, context.traffic)
        self.polled: PolledLinks | None = None
        """Links of peers that reach only the API port; None while there is none."""
        self.serve_api: Callable[[str, Channel], Awaitable[None]] | None = None
        """Serves a call that the peer of that name forwards; None while there is no API."""
        self.logs = LogAsks(self.post)
        self.machines = MachineBook()
        """What was measured of the nodes and the ways between them; learned anew after a restart."""
        peers = Peers(self.members, lambda: self.awaited, self.machines, self.post)
        self.rings = Rings(self.context, registry, state, peers)
        self.lets_in: Callable[[], bool] = lambda: False
        """Whether the API asks nobody for a token now."""
        self.health = LocalHealth()
        self._revocations = 0
        self._roll = Roll(term)
        self._driver: Driver[MembershipInput, object, MembershipEvent] = Driver(
            self._roll, lambda _: None, self._member_changed
        )

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with open_flat_nursery() as nursery:
            self._await_members()
            nursery.start_soon(self._driver.run)
            nursery.start_soon(watch_loop, self.health, lambda score: self._driver.feed(Late(score)))
            await nursery.start(self.rings.run)
            for node in self.enrolment.nodes:
                if node.removed_s is not None:
                    self._drop_peer(node)
            task_status.started()
            await trio.sleep_forever()

    def _await_members(self) -> None:
        """Who was there under the coordinator before this one, as this node was told while it was a member."""
        known = self.context.known.rows.values()
        self._roll.inherit([row for row in known if not self.enrolment.removed(row.node)], trio.current_time())

    def _emit(self, event: str, values: Mapping[str, object]) -> None:
        self.recent.note(event, values, time.time())
        self._report(event, values)

    def post(self, node: NodeId, frame: Frame) -> None:
        """Send to a peer; a peer that is gone is dealt with by membership, so its frame is dropped."""
        member = self.members.get(node)
        if member is None:
            return
        try:
            member.outbox.post(self._in_term(frame))
        except LinkBroken:
            member.scope.cancel()

    def _in_term(self, frame: Frame) -> Frame:
        return Frame(frame.kind, {**frame.header, "term": self.term}, frame.body) if frame.kind in FENCED else frame

    def voters(self) -> Sequence[str]:
        """The names of the nodes that vote."""
        return () if self._state is None else self._state.voter_names()

    def voter_links(self) -> list[dict[str, object]]:
        """See `Seats.voter_links`."""
        return [] if self.seats is None else self.seats.voter_links()

    def dismiss(self) -> None:
        """This coordinator is over: whoever waits here hears of it, and members look for another one. Their stages
        stay, for that one to take over."""
        over = NotCoordinator("this node does not coordinate the swarm any more; try again in a few seconds")
        for ring in self.rings.running.values():
            ring.abandon(over)
        for member in self.members.values():
            member.scope.cancel()
        self._controls.end_all()

    # what peers say

    async def serve_channel(self, kind: str, hello: Hello, channel: Channel) -> None:
        """One channel of the swarm port that is not a ring's lane."""
        if kind == "join":
            await self.enrolment.serve(hello, channel)
            return
        async with self.hearing(hello, channel):
            await self._serve_members(kind, hello, channel)

    async def _serve_members(self, kind: str, hello: Hello, channel: Channel) -> None:
        match kind:
            case "control":
                await self._serve_control(hello, channel)
            case "requests":
                await self._serve_requests(hello, channel)
            case "files":
                await serve_files(self.registry, channel)
            case "api":
                await self._serve_api(hello, channel)
            case "relay":
                await self.relay.serve(hello, channel)
            case _:
                raise ProtocolError(f"a coordinator serves no {kind} channels")

    @asynccontextmanager
    async def hearing(self, hello: Hello, channel: Channel) -> AsyncIterator[None]:
        """Whatever comes on a member's channel is a sign of its life: beats may wait behind it on a slow uplink."""
        async with open_flat_nursery() as nursery:
            nursery.start_soon(self._hear, hello.identity, channel)
            yield
            nursery.cancel_scope.cancel()

    async def _hear(self, identity: Identity, channel: Channel) -> None:
        heard_bytes = channel.heard_bytes
        while True:
            await trio.sleep(LISTEN_S)
            member = self.members.get(identity.node)
            if channel.heard_bytes != heard_bytes and member is not None and member.boot == identity.boot:
                self._note_life(member)
            heard_bytes = channel.heard_bytes

    def state(self, node: NodeId) -> NodeState:
        return self._roll.members.state(node)

    def silence_s(self, node: NodeId) -> float | None:
        return self._roll.members.silence_s(node, trio.current_time())

    def awaits(self, node: NodeId) -> bool:
        """Whether it is one of those that `awaited` names."""
        return node not in self.members and self._roll.members.awaits(node)

    @property
    def awaited(self) -> Sequence[Row]:
        """Members of before that this coordinator did not hear yet, and does not give up yet."""
        return [row for row in self._roll.awaited() if self.awaits(row.node)]

    async def remove(self, name: str) -> NodeRecord:
        """Take a node out for good: links with it end here at once, at its neighbours when they hear of it. Raises
        Conflict for one that the swarm needs to have a coordinator."""
        record = await self.enrolment.remove(name, *([] if self.seats is None else [self.seats.check_leaving]))
        self._controls.tell_all(self.enrolment.revoked())
        self.tell_places()
        self.machines.forget(record.node)
        self._roll.table.drop(record.node)
        self._drop_peer(record)
        await self.rings.keep_quietly()
        return record

    def _drop_peer(self, removed: NodeRecord) -> None:
        """No ring waits for it any more; its name may be another's by now."""
        taken = any(node.name == removed.name and node.removed_s is None for node in self.enrolment.nodes)
        self.rings.restoring.drop_peers({removed.node} if taken else {removed.node, removed.name})

    def tell_places(self) -> None:
        """Where coordinators answer has changed."""
        self._controls.tell_all(self.enrolment.where())

    def token_revoked(self, _: str) -> None:
        """Of an API token: nodes that knew its bearer as let in hear at once that this counts no more, and those that
        do not read now with the answer to their next beat."""
        self._revocations += 1
        before = self._roll.table.mark
        self._set_heading()
        if (update := self._roll.table.since(before)) is not None:
            self._controls.tell_all(members_frame(update))

    def _tell(self, node: NodeId, frame: Frame) -> bool:
        """Post a frame on a member's control channel; False: it has none, or one that it does not read."""
        member = self.members.get(node)
        return member is not None and self._controls.tell((node, member.boot), frame)

    async def _serve_api(self, hello: Hello, channel: Channel) -> None:
        if self.serve_api is None:
            raise LinkBroken("the coordinator serves no API")
        known = self.enrolment.name_of(hello.identity.node)  # HELLO could give another's name
        await self.serve_api(known or hello.identity.node[:8], channel)

    async def _serve_control(self, hello: Hello, channel: Channel) -> None:
        with self._controls.open((hello.identity.node, hello.identity.boot)) as outbox:
            outbox.post(self.enrolment.revoked())
            outbox.post(self.enrolment.where())
            await self._exchange_control(hello.identity, channel, outbox)

    async def _exchange_control(self, identity: Identity, channel: Channel, outbox: Outbox) -> None:
        async with open_flat_nursery() as nursery:
            nursery.start_soon(outbox.run, channel)
            async for frame in channel:
                if frame.kind == "beat":
                    self._take_beat(identity, frame)
                    self._answer_beat(identity, frame, outbox)
                elif frame.kind == "bye":
                    self._driver.feed(Left(identity.node, identity.boot))
                elif frame.kind == "dial_back":
                    self._refuse_second_place(identity)
                    outbox.post(await self.dial_backs.answer(identity, channel.direct_source))
            nursery.cancel_scope.cancel()

    def _take_beat(self, identity: Identity, frame: Frame) -> None:
        self._refuse_copy(identity)
        self._driver.feed(_heard(identity, frame))
        member = self.members.get(identity.node)
        if member is not None and member.boot == identity.boot:
            came = not member.usable
            member.beat = read_report(Beat, frame)
            for held in member.beat.stages:
                ring = self.rings.running.get(RingId(held.ring))
                if ring is not None and ring.stage_of(identity.node) == held.stage:
                    ring.take_links(held.stage, held.links)
            here, trip_ms = self.context.identity.node, member.beat.round_trip_ms
            self.machines.note_link(identity.node, here, trip_ms, None, trio.current_time())
            self._tell_stragglers()
            self._note_lost(identity.node, {held.ring for held in member.beat.stages})
            if came:
                self.rings.restoring.room_changed()

    def _tell_stragglers(self) -> None:
        for change in self.machines.events():
            member = self.members.get(change.node)
            if member is not None:
                name = "straggler" if change.straggles else "straggler_recovered"
                self._emit(name, {"name": member.identity.name, "times": round(change.times, 1)})

    def _answer_beat(self, identity: Identity, beat: Frame, outbox: Outbox) -> None:
        """`heard`, and what the sender's copy of the table of members lacks."""
        self._set_heading()
        answer = self._roll.answer(_heard(identity, beat), read_mark(beat.header["table"]))
        above = {} if answer.above is None else {"above": answer.above}
        outbox.post(Frame("heard", {"seq": beat.header["seq"], **above}))
        if answer.update is not None:
            outbox.post(members_frame(answer.update))

    def _set_heading(self) -> None:
        name, voters = self.context.identity.name, tuple(self.voters())
        self._roll.table.set_heading(Heading(name, voters, self.lets_in(), self._revocations))

    def _note_lost(self, node: NodeId, held: set[str]) -> None:
        """A node of a ring that was away, or whose coordinator was, is back: it may have lost its stage meanwhile."""
        for ring, stage in self.rings.held_by(node):
            if stage not in ring.unsure and not ring.adopting:
                continue
            ring.unsure.discard(stage)
            if ring.ring not in held:
                ring.lose(stage, "came back without it")

    async def _serve_requests(self, hello: Hello, channel: Channel) -> None:
        identity = hello.identity
        self._refuse_copy(identity)
        await self.enrolment.note_name(identity.node, identity.name)
        if (old := self.members.get(identity.node)) is not None:
            old.scope.cancel()
            self._drop(old)
        try:
            async with open_flat_nursery() as nursery:
                member = Member(identity, nursery.cancel_scope, channel.route)
                self.members[identity.node] = member
                self.machines.came(identity.node, identity.boot)
                self._roll.introduce(identity.node, identity.name, next(iter(identity.listen), ""))
                self._driver.feed(Connected(identity.node, identity.boot, identity.incarnation))
                self.context.emit("peer_joined", {"node": identity.node, "name": identity.name})
                nursery.start_soon(member.outbox.run, channel)
                channel.take_at_once(partial(self._take_at_once, member))
                async for frame in channel:
                    if self._take_at_once(member, frame):
                        continue
                    if frame.kind == "renew":
                        body = unpack_body(frame.body)
                        issued = await self.enrolment.renew(identity.node, identity.name, body, channel.certified)
                        if issued is not None:
                            member.outbox.post(issued)
                    elif frame.kind == "stand":
                        nursery.start_soon(self._answer_stand, hello, channel, frame, member)
                nursery.cancel_scope.cancel()
        finally:
            self._drop(member)

    def _take_at_once(self, member: Member, frame: Frame) -> bool:
        """One frame of a peer; False where its answer takes time, or another connection of it has taken over."""
        if self.members.get(member.node) is not member:
            return False
        self._note_life(member)
        if frame.kind in ("renew", "stand"):
            return False
        self._take(member.node, frame)
        return True

    def _note_life(self, member: Member) -> None:
        now = trio.current_time()
        if now - member.heard_s >= HEARD_EVERY_S:
            member.heard_s = now
            self._driver.feed(Heard(member.node, member.boot, member.identity.incarnation))

    async def _answer_stand(self, hello: Hello, channel: Channel, frame: Frame, member: Member) -> None:
        answer = None if self.seats is None else await self.seats.stand(hello, channel, frame)
        with suppress(LinkBroken):  # it left meanwhile
            if answer is not None:
                member.outbox.post(answer)

    def _refuse_copy(self, identity: Identity) -> None:
        """One identity on two machines: the one that is there stays. A node that fell silent may come back at once."""
        there = self.members.get(identity.node)
        if there is None or there.boot == identity.boot or self.state(identity.node) is not NodeState.ALIVE:
            return
        if identity.boot != there.refused:  # it comes back, and people here need to hear of it once
            there.refused = identity.boot
            self.context.emit("copy_refused", {"node": identity.node, "name": there.identity.name})
        raise self._copied(there, identity)

    def _refuse_second_place(self, identity: Identity) -> None:
        """A doctor has a boot of its own, but looks at one machine: where the node that is connected is another's."""
        there = self.members.get(identity.node)
        if there is not None and identity.listen[:1] != there.identity.listen[:1]:
            raise self._copied(there, identity)

    def _copied(self, there: Member, identity: Identity) -> Conflict:
        return Conflict(
            f"node {identity.node[:8]} is connected already, as {there.identity.name} from another process; was its "
            "data directory copied? Each machine needs its own: start this one with an empty --data-dir and a token"
        )

    def _drop(self, member: Member) -> None:
        """Its connection ended: replies of heads there are lost, and the node itself unless it is back soon; at once if
        it was removed."""
        if self.members.get(member.node) is not member:
            return
        del self.members[member.node]
        self.context.emit("peer_left", {"node": member.node, "name": member.identity.name})
        if self.enrolment.removed(member.node):
            self._driver.feed(Left(member.node, member.boot))
            return
        for ring, stage in self.rings.held_by(member.node):
            ring.part_from(stage)
        self._driver.feed(Parted(member.node, member.boot))

    def _member_changed(self, change: MembershipEvent) -> None:
        if isinstance(change, StateChanged) and change.state.gone:
            member = self.members.get(change.node)
            if member is not None and member.boot == change.boot:
                member.scope.cancel()
            for ring, stage in self.rings.held_by(change.node):
                ring.lose(stage, "was stopped" if change.state is NodeState.LEFT else "is gone")

    def _take(self, node: NodeId, frame: Frame) -> None:
        """One frame of a peer. It may speak only of rings it is part of, and only for its own stage."""
        if frame.kind in REQUEST_KINDS:
            self._take_reply(node, frame)
            return
        if frame.kind == "logs_tail":
            self.logs.take(node, frame)
            return
        ring = self.rings.running.get(RingId(frame.header["ring"])) if "ring" in frame.header else None
        if frame.kind == "stage_ready" and (ring is None or ring.ending):
            self.post(node, Frame("unload", {"ring": frame.header["ring"]}))  # it was lost while the node was away
        if ring is None:
            return  # a report about a ring that is over crossed its end
        stage = ring.stage_of(node)
        if stage is None:
            raise ProtocolError(f"{frame.kind} for ring {ring.ring}, which this node is not part of")
        if frame.kind == "gauges":
            ring.gauges[stage] = read_gauges(frame)
        elif frame.kind == "stage_ready":
            ring.take_ready(stage, read_report(ReadyStage, frame))
        elif frame.kind == "stage_failed":
            ring.take_failure(stage, frame.header["code"], frame.header["message"])
        else:
            if frame.kind == "linked" and frame.body:
                ring.take_links(stage, read_report(LinkedStage, frame).links)
            ring.feed(_ring_input(stage, frame))

    def _take_reply(self, node: NodeId, frame: Frame) -> None:
        for ring in self.rings.running.values():
            stream = ring.requests.get(frame.header.get("request", ""))
            if stream is not None and ring.head == node:
                ring.take_reply(stream, frame)


def _ring_input(stage: int, frame: Frame) -> RingInput:
    header = frame.header
    match frame.kind:
        case "progress":
            return Progress(stage, header["phase"], header["done"], header["total"])
        case "linked":
            return StageLinked(stage, _links(header))
        case "probed":
            return ProbeReturned()
        case "broken":
            why = header.get("message") or f"stage {stage} saw the ring break"
            return StageDown(stage, "stage_lost", why, symptom=True, links=_links(header))
        case "unloaded":
            return StageUnloaded(stage)
        case _:
            raise ProtocolError(f"a peer sent {frame.kind} to the coordinator")


def _heard(identity: Identity, beat: Frame) -> Heard:
    """A beat names the incarnation of now; the connection's own may have been refuted."""
    return Heard(identity.node, identity.boot, beat.header["incarnation"])


def _links(header: Mapping[str, Any]) -> int:
    """The link epoch that a stage speaks of."""
    return int(header.get("epoch", (0, 0))[1])
