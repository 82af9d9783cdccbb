"""The peer role: keeps a connection to the coordinator, holds stages when told to, and serves its rings' lanes."""

from __future__ import annotations

import logging
import random
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import trio

from swarmnode.cluster.local_health import LocalHealth
from swarmnode.cluster.membership import BEAT_INTERVAL_S
from swarmnode.cluster.reconnecting import wait_s
from swarmnode.errors import Conflict, LinkBroken, NodeRemoved, ProtocolError, SwarmError
from swarmnode.roles.coordinator_watch import CoordinatorWatch
from swarmnode.roles.file_server import serve_shares
from swarmnode.roles.lane_ends import BETTER_S
from swarmnode.roles.load_spec import LoadSpec
from swarmnode.roles.loop_watch import watch_loop
from swarmnode.roles.member_codec import read_members
from swarmnode.roles.outbox import Outbox
from swarmnode.roles.reports import MAX_MODELS_KEPT
from swarmnode.roles.stage_host import StageHost
from swarmnode.roles.worker_logs import KeptLogs
from swarmnode.wire.bodies import pack_body, unpack_body
from swarmnode.wire.frames import Frame
from swarmnode.wire.link_meter import LinkMeter
from swarmnode.wire.nursery import open_flat_nursery
from swarmnode.wire.routes import DIRECT, worst

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from swarmnode.catalog.store import ShardStore
    from swarmnode.ids import NodeId, RingId
    from swarmnode.roles.context import CardMemory, NodeContext, PeerResources
    from swarmnode.roles.joining import PeerMembership
    from swarmnode.wire.address import Place
    from swarmnode.wire.link import Channel, Hello

RING_COMMANDS = frozenset({"open", "unload", "link", "probe_ring"})
"""Frames of the coordinator that are about a ring held here (their table row makes `ring` a must)."""
REFUSED_S = 15.0
"""The wait where the coordinator refuses this node's name, or knows its identity from another machine: people mend
that, but one that lost power there is only missed after some seconds."""
STAND_AGAIN_S = 30.0
"""The wait where a coordinator did not reach this node; people open ports meanwhile."""
STEADY_S = 5.0
"""A connection that ends sooner was no success: a coordinator refuses a node's name or identity once both are up."""

_log = logging.getLogger(__name__)


class Peer:
    """Dials the coordinator and does what it says; the stages held for a lost one wait for it for a while."""

    def __init__(
        self,
        context: NodeContext,
        coordinators: Sequence[Place],
        resources: PeerResources,
        store: ShardStore,
        member: PeerMembership,
        follow: Callable[[], Awaitable[None]] | None = None,
        stands_at: Sequence[str] = (),
    ) -> None:
        """`follow` runs while a coordinator is connected: what of this node calls it besides. `stands_at`: the places
        where this node can be reached, if it wants to be able to coordinate."""
        self._context = context
        context.roads.known = tuple(coordinators)
        self._member = member
        self._follow = follow
        self._stands_at = tuple(stands_at)
        self._resources = resources
        self._store = store
        self._hosts: dict[RingId, StageHost] = {}
        self._logs = KeptLogs()
        self._outbox = Outbox()
        self._health = LocalHealth()
        self._beat_now = trio.Event()
        """A beat is wanted before its time."""
        self._connected = False
        self._control: Channel | None = None
        """While it is."""
        self._beats = LinkMeter()
        """Of the present connection's beats and their answers."""
        self._holding: trio.Nursery | None = None
        self._patience = trio.CancelScope()
        """Of the stages that wait for their coordinator."""

    def use_card(self, card: CardMemory) -> None:
        """Its stages compute on this card, and take its memory."""
        self._resources = self._resources.on_card(card)

    async def run(self) -> None:
        """Stay connected until cancelled; the stages held here outlive a connection."""
        async with open_flat_nursery() as self._holding:
            self._holding.start_soon(watch_loop, self._health)
            await self._stay_connected()

    def say_goodbye(self) -> None:
        """Right before this node is cancelled, and its connections with it: what the socket does not take at once is
        not said, and the coordinator finds out. One on this node ends too, and the others' stages wait for the next."""
        if self._control is not None and _who(self._control) != self._context.identity.node:
            with suppress(SwarmError):
                self._control.send_nowait(Frame("bye", {"reason": "the node was stopped"}))

    async def _stay_connected(self) -> None:
        """Every lost connection is reported and tried again."""
        attempt = 0
        while True:
            began_s = trio.current_time()
            try:
                await self._serve_coordinator()
            except SwarmError as error:
                if isinstance(error, NodeRemoved):  # no coordinator will take its stages over
                    self._context.say_removed(error)
                    self._unload_all()
                else:
                    self._context.emit("coordinator_lost", {"reason": error.message})
                lasted = isinstance(error, _Disconnected) and trio.current_time() - began_s >= STEADY_S
                refused = not lasted and isinstance(error.__cause__ or error, Conflict)
            attempt = 0 if lasted else attempt + 1
            await trio.sleep(REFUSED_S if refused else wait_s(attempt, random.random))

    async def serve_lane(self, hello: Hello, channel: Channel) -> None:
        """An incoming lane of a ring; refused when the ring is not held here."""
        host = self._hosts.get(hello.parameters.ring) if hello.parameters.ring is not None else None
        if host is None:
            raise ProtocolError(f"no stage of ring {hello.parameters.ring} is held here")
        await host.serve_lane(hello, channel)

    async def serve_shares(self, channel: Channel) -> None:
        """Another peer fetches from what this one has of a model's files."""
        await serve_shares(self._store, channel)

    def snapshot(self) -> list[dict[str, Any]]:
        """The stages held here, for beats and `ps`."""
        return [
            {
                "ring": ring,
                "model": host.spec.model,
                "stage": host.spec.stage,
                "phase": host.phase,
                "pid": host.worker.pid if host.worker is not None else None,
                "gauges": host.gauges,
                "links": host.links,
                "activity": host.activity(),
            }
            for ring, host in self._hosts.items()
        ]

    async def _serve_coordinator(self) -> None:
        """One connection's life: control and requests, until either breaks."""
        self._outbox = Outbox()
        roads = self._context.roads
        roads.places = roads.known
        async with roads.to_coordinator("control") as control:
            roads.places = tuple(place for place in roads.known if str(place) == control.way.name)
            async with roads.to_coordinator("requests") as requests:
                for channel in (control.up, requests.up):
                    await self._member.admit_term(_term_of(channel))
                self._context.emit("joined", {"coordinator": control.way.name, "route": requests.way.route})
                await self._serve_connected(control.up, requests.up)

    def _post(self, *frames: Frame) -> None:
        """To the coordinator. While there is none, what stages say is dropped: they say what matters again later."""
        if self._connected:
            self._outbox.post(*frames)

    def _found(self) -> None:
        """A coordinator is there: it hears of every stage, and takes over or ends those it did not load itself."""
        self._connected = True
        self._patience.cancel()
        for host in self._hosts.values():
            host.announce()

    def _lost(self) -> None:
        """The stages wait for it, for a while."""
        self._connected = False
        for host in self._hosts.values():
            host.coordinator_lost()
        if self._hosts and self._holding is not None:
            self._patience = trio.CancelScope()
            self._holding.start_soon(self._end_unless_found, self._patience)

    async def _end_unless_found(self, patience: trio.CancelScope) -> None:
        with patience:
            await trio.sleep(self._context.settings.keep_stages_s)
            self._unload_all()

    def _unload_all(self) -> None:
        for host in self._hosts.values():
            host.unload()

    async def _serve_connected(self, control: Channel, requests: Channel) -> None:
        """While both are up."""
        try:
            self._control = control
            self._found()
            async with open_flat_nursery() as nursery:
                nursery.start_soon(self._send_beats, control)
                watch = CoordinatorWatch(self._health)
                nursery.start_soon(watch.run)
                nursery.start_soon(self._read_control, control, nursery, watch)
                nursery.start_soon(self._outbox.run, requests)
                nursery.start_soon(self._member.keep_certified, self._outbox.post)
                if self._stands_at:
                    nursery.start_soon(self._stand)
                nursery.start_soon(self._look_for_better, worst((control.route, requests.route)))
                if self._follow is not None:
                    nursery.start_soon(self._follow)
                async for frame in requests:
                    self._check_term(frame, requests)
                    self._take(frame, nursery)
                raise LinkBroken("the coordinator closed the connection")
        except SwarmError as error:
            raise _Disconnected(error.message) from error
        finally:
            self._control = None
            self._lost()

    async def _stand(self) -> None:
        """Ask to be able to coordinate: once to say where this node is now, and again until it is."""
        self._outbox.post(self._member.stand(self._stands_at))
        while True:
            await trio.sleep(STAND_AGAIN_S)
            if not self._member.seated:
                self._outbox.post(self._member.stand(self._stands_at))

    async def _look_for_better(self, route: str) -> None:
        """Come back by a better road as soon as one is open and nothing is held that would end with this one."""
        roads = self._context.roads
        while route != DIRECT:
            await trio.sleep(BETTER_S)
            better = not self._hosts and await roads.better_to_coordinator(roads.known, route)
            if better and not self._hosts:
                raise LinkBroken(f"a better road to it than the {route} one is open; changing to it")

    async def _send_beats(self, control: Channel) -> None:
        seq = 0
        self._beats = LinkMeter()
        while True:
            trip_s = self._beats.round_trip_s
            self._beat_now = trio.Event()
            header = {
                "node": self._context.identity.node,
                "boot": self._context.identity.boot,
                "incarnation": self._member.incarnation,
                "seq": seq,
                "table": list(self._context.known.mark),
            }
            body = {
                "memory_bytes": self._resources.memory_bytes,
                **self._card_memory(),
                "device": self._resources.device,
                "threads": self._resources.threads,
                "stages": self.snapshot(),
                "models": self._store.models()[:MAX_MODELS_KEPT],
                "round_trip_ms": None if trip_s is None else round(trip_s * 1e3, 2),
                "health": self._health.score,
            }
            self._beats.sent(seq, 0, trio.current_time())
            await control.send(Frame("beat", header, pack_body(body)))
            seq += 1
            with trio.move_on_after(BEAT_INTERVAL_S):
                await self._beat_now.wait()

    def _card_memory(self) -> dict[str, int]:
        """Free now, as far as a stage there says, and else as it was before any stage."""
        card = self._resources.card
        if card is None:
            return {}
        free = [host.gauges["vram_free_bytes"] for host in self._hosts.values() if "vram_free_bytes" in host.gauges]
        return {"vram_bytes": card.total_bytes, "vram_free_bytes": min(free, default=card.free_bytes)}

    async def _read_control(self, control: Channel, nursery: trio.Nursery, watch: CoordinatorWatch) -> None:
        """Answers to beats, removals, which end the lanes of who was removed, and other peers' calls, until the
        coordinator hangs up. One that is silent may be stopped, and another have followed it."""
        while True:
            try:
                frame = await control.receive()
            except trio.EndOfChannel:
                raise LinkBroken("the coordinator closed the connection") from None
            self._check_term(frame, control)
            watch.heard()
            if frame.kind == "heard":
                self._beats.acknowledged(frame.header["seq"] + 1, trio.current_time())
                await self._take_answer(frame)
            elif frame.kind == "members":
                self._context.known.take(read_members(frame), time.time())
            elif frame.kind == "revoked":
                self._member.take_revoked(unpack_body(frame.body))
            elif frame.kind == "places":
                roads = self._context.roads
                roads.known = self._member.take_places(unpack_body(frame.body), roads.places)
            elif frame.kind == "relay_offer":
                nursery.start_soon(self._answer_relay, frame.header["call"])

    async def _take_answer(self, heard: Frame) -> None:
        """To a beat; where this node counts as dead, it says at once that it is not."""
        self._context.known.confirm(time.time())
        if "above" in heard.header:
            await self._member.refute(heard.header["above"])
            self._beat_now.set()

    async def _answer_relay(self, call: str) -> None:
        try:
            await self._context.roads.answer_relay(call)
        except SwarmError as error:  # the caller hears of it from its own end
            _log.info("a call through the relay ended: %s", error)

    def _check_term(self, frame: Frame, channel: Channel) -> None:
        """What names no term is of the one in which the coordinator answered on its channel. Raises StaleTerm."""
        self._member.check_term(frame.header.get("term", _term_of(channel)))

    def _take(self, frame: Frame, nursery: trio.Nursery) -> None:
        """One frame of the coordinator; only a load starts anything new."""
        if frame.kind == "load":
            holding = self._holding or nursery
            holding.start_soon(self._hold, LoadSpec.read(frame.header, unpack_body(frame.body)))
            return
        if frame.kind == "issued":
            roads = self._context.roads
            roads.known = self._member.take_issued(unpack_body(frame.body)) or roads.known
            return
        if frame.kind == "seat":
            self._member.take_seat(unpack_body(frame.body))
            self._context.emit("seated", {"name": self._context.identity.name, "places": list(self._stands_at)})
            return
        if frame.kind == "no_seat":
            self._context.emit("seat_refused", {"name": self._context.identity.name, "why": frame.header["message"]})
            return
        if frame.kind == "logs":
            self._outbox.post(self._logs.answer(frame, self._hosts.values()))
            return
        if frame.kind == "cancel":
            for head in (host for host in self._hosts.values() if host.spec.stage == 0):
                head.take(frame)
            return
        if frame.kind not in RING_COMMANDS:
            raise ProtocolError(f"the coordinator sent {frame.kind}, which this version does not take; update it")
        host = self._hosts.get(frame.header["ring"])
        if host is None:
            self._answer_unknown(frame)
        elif frame.kind == "unload":
            host.unload()
        elif frame.kind == "link":
            first, links = frame.header.get("epoch", host.spec.epoch)
            host.link(_texts(unpack_body(frame.body).get("next")), (first, links))
        else:
            host.take(frame)

    def _answer_unknown(self, frame: Frame) -> None:
        """A ring that is gone here: the coordinator's command crossed its end."""
        if frame.kind == "open":
            text = "the stage that took requests is gone"
            header = {"request": frame.header["request"], "code": "stage_lost", "message": text}
            self._outbox.post(Frame("error", header))
        elif frame.kind == "unload":
            self._outbox.post(Frame("unloaded", {"ring": frame.header["ring"], "stage": 0}))

    async def _hold(self, spec: LoadSpec) -> None:
        host = StageHost(self._context, spec, self._resources, self._store, self._post)
        self._hosts[spec.ring] = host
        try:
            await host.run()
        finally:
            del self._hosts[spec.ring]
            self._logs.note_ended(host)
            self._context.traffic.forget_ring(spec.ring)


def _term_of(channel: Channel) -> int:
    """In which the coordinator at its other end coordinates."""
    return 0 if channel.welcome is None else channel.welcome.identity.term


def _who(channel: Channel) -> NodeId | None:
    """Answered at its other end."""
    return None if channel.welcome is None else channel.welcome.identity.node


def _texts(value: object) -> list[str]:
    return [str(text) for text in value] if isinstance(value, list) else []


class _Disconnected(LinkBroken):
    """A connection that was up has ended: the next attempt comes soon."""
