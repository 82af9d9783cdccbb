"""A coordinator's rings: planned, loaded, taken over, written down for who follows, and remembered when over."""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import trio

from swarmnode.cluster.placement import PeersLacking
from swarmnode.errors import Conflict, InvalidModel, LoadRefused, MembersAwaited, PeerNotFound, SwarmError
from swarmnode.ids import ModelId, NodeId, RingId
from swarmnode.roles.file_sources import with_kept, with_sources
from swarmnode.roles.loaded_ring import LoadedRing
from swarmnode.roles.planning import NOTHING_KNOWN, examine, files_here, plan_ring
from swarmnode.roles.restoring import Restoring
from swarmnode.roles.ring_lifecycle import RingLifecycle
from swarmnode.roles.ring_measures import RingMeasures
from swarmnode.roles.ring_record import from_record, to_record
from swarmnode.roles.swarm_state import NOT_KEPT
from swarmnode.wire.nursery import open_flat_nursery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from swarmnode.api.backend import LoadOptions
    from swarmnode.catalog.manifest import Manifest
    from swarmnode.catalog.registry import Registry
    from swarmnode.cluster.machine_book import MachineBook
    from swarmnode.cluster.member_table import Row
    from swarmnode.cluster.placement import PeerResources
    from swarmnode.roles.context import NodeContext
    from swarmnode.roles.members import Member
    from swarmnode.roles.planning import Known, PlannedRing
    from swarmnode.roles.swarm_state import SwarmState
    from swarmnode.wire.frames import Frame

KEEP_AGAIN_S = 5.0
"""After the disk did not take it: people make room meanwhile."""
LEFT_OUT_TOLD = 8
"""Peers without a stage that a load's event names; its status has them all."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Peers:
    """The peers as rings see them: who is connected, who is `awaited`, what was measured of them, and how a frame gets
    to one of them."""

    members: Mapping[NodeId, Member]
    awaited: Callable[[], Sequence[Row]]
    machines: MachineBook
    post: Callable[[NodeId, Frame], None]


class Rings:
    """`run` it; `running` are those that are there, from the plan of a load until all memory is back."""

    def __init__(self, context: NodeContext, registry: Registry, state: SwarmState | None, peers: Peers) -> None:
        self.running: dict[RingId, LoadedRing] = {}
        self._over: dict[ModelId, LoadedRing] = {}
        """The last ring of each model that is over: where its files are, and what became of it."""
        self._known: dict[ModelId, tuple[Manifest, bool, Known]] = {}
        """Of each model, whether its files were here when somebody looked last, and what was read of them."""
        self._looked_after: set[ModelId] = set()
        """Models of which nobody is told any more what became of their last ring."""
        self._context = context
        self._registry = registry
        self._state = state
        self._peers = peers
        self._epoch = 0
        self.lifecycle = RingLifecycle(lambda: self.running.values(), context.settings, context.emit)
        self.restoring = Restoring(self.look, self.start, context.emit)
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with open_flat_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self.lifecycle.run)
            self._adopt(nursery)
            nursery.start_soon(self.restoring.run)
            task_status.started()
            await trio.sleep_forever()

    # which there are

    def of_model(self, model: ModelId) -> LoadedRing | None:
        """The ring that serves or is to serve `model`."""
        return next((ring for ring in self.running.values() if ring.model == model), None)

    def held_by(self, node: NodeId) -> list[tuple[LoadedRing, int]]:
        """The stages of a node; a ring may end while the caller goes through them."""
        held = ((ring, ring.stage_of(node)) for ring in self.running.values())
        return [(ring, stage) for ring, stage in held if stage is not None]

    def ended(self, model: ModelId) -> LoadedRing | None:
        """The last ring of a model that is over, as long as status says what became of it."""
        return None if model in self._looked_after else self._over.get(model)

    def failed(self) -> list[ModelId]:
        """Models whose last ring did not end because somebody wanted it to."""
        return [model for model, ring in self._over.items() if ring.error is not None and self.ended(model) is ring]

    def looked_after(self, model: ModelId) -> None:
        """Somebody loads or unloads it: what became of its last ring is nobody's concern any more. That its peers keep
        its files is."""
        self._looked_after.add(model)

    # loading

    def start(self, model: ModelId, options: LoadOptions) -> LoadedRing:
        """Plan a ring and begin to load it; raises LoadRefused and the like before anything was sent. Nobody asked for
        it: it takes no other ring's place."""
        planned, leaving = self.plan(model, options, evict=False)
        return self._begin(planned, leaving, options, asked=False)

    async def load(self, model: ModelId, options: LoadOptions) -> LoadedRing:
        """The same for somebody who asks: written down before anything is sent, any ring goes for it, and anybody hears
        that it is under way. Raises as `SwarmState`'s changes, too, and then all is as it was."""
        planned, leaving = self.plan(model, options)
        held, decided = self.lifecycle.hold(leaving), trio.Event()
        ring = self._begin(planned, leaving, options, asked=True, decided=decided)
        try:
            await self.keep()
        except BaseException:
            self.lifecycle.spare(held)
            decided.set()
            await ring.unload(force=True)
            raise
        self.lifecycle.evict(held, model)
        decided.set()
        return ring

    def _begin(
        self,
        planned: PlannedRing,
        leaving: Sequence[LoadedRing],
        options: LoadOptions,
        *,
        asked: bool,
        decided: trio.Event | None = None,
    ) -> LoadedRing:
        if self._nursery is None:
            raise RuntimeError("a load before run")
        self._epoch += 1
        ring = self.make(planned)
        model = ModelId(ring.model)
        self.running[ring.ring] = ring
        self.looked_after(model)
        self.restoring.begun(ring, options, asked=asked)
        self._nursery.start_soon(self.lifecycle.serve, ring, leaving, decided)
        without = {left.name: left.why for left in planned.plan.left_out[:LEFT_OUT_TOLD]}
        told = {"model": model, "ring": ring.ring, "stages": len(ring.specs), "left_out": without}
        self._context.emit("ring_loading", told)
        self._nursery.start_soon(self._keep_when_ready, ring)
        return ring

    async def look(self, model: ModelId) -> None:
        """Read, in a thread, what `plan` needs to know of a model's files. Raises as `plan`. Whoever leaves off waits
        for no disk: it is only read."""
        manifest = self._registry.get(model)
        files = files_here(self._registry, manifest)
        known = NOTHING_KNOWN
        if files is not None:
            known = await trio.to_thread.run_sync(examine, manifest, files, abandon_on_cancel=True)
        self._known[model] = manifest, files is not None, known

    def _known_of(self, manifest: Manifest) -> Known:
        """What was read last, unless it was of another model, or its files have come or gone since."""
        here = manifest in self._registry.here()
        *looked_at, known = self._known.get(manifest.model_id, (None, False, NOTHING_KNOWN))
        if looked_at != [manifest, here]:
            known = examine(manifest, files_here(self._registry, manifest))
            self._known[manifest.model_id] = manifest, here, known
        return known

    def plan(
        self, model: ModelId, options: LoadOptions, *, evict: bool = True
    ) -> tuple[PlannedRing, Sequence[LoadedRing]]:
        """What a load would be, and the rings that would go for it; raises as `start` and changes nothing. `look` comes
        before it: else what others wait for waits for the disk."""
        ring_id = RingId(f"{model}-{uuid.uuid4().hex[:8]}"[-64:])
        manifest = self._registry.get(model)
        of_model = self._known_of(manifest)
        members = self._peers.members

        def plan(offers: Sequence[PeerResources]) -> PlannedRing:
            known = replace(of_model, measured=partial(self._peers.machines.seen, now=trio.current_time()))
            layers = manifest.architecture.num_layers
            offers = with_kept(offers, members, model, layers, self._over.get(model))
            return plan_ring(manifest, options, offers, self._context.settings, ring_id, self._epoch + 1, known)

        try:
            planned, leaving = self.lifecycle.find_room(members.values(), plan, evict=evict)
        except (LoadRefused, PeerNotFound) as error:
            awaited = self._peers.awaited()
            if _may_help(awaited, error, options, members.values()):
                raise MembersAwaited(
                    f"of the nodes that the coordinator before this one knew, {', '.join(r.name for r in awaited)} did "
                    f"not come back yet; try again in a few seconds. Without them: {error.message}",
                    param=error.param,
                ) from error
            raise
        return with_sources(planned, members.values()), leaving

    def make(self, planned: PlannedRing, *, adopted: bool = False) -> LoadedRing:
        measures = RingMeasures(self._peers.machines, planned)
        return LoadedRing(planned, self._peers.post, self._ring_over, adopted=adopted, measures=measures)

    def _ring_over(self, ring: LoadedRing) -> None:
        del self.running[ring.ring]
        model = ModelId(ring.model)
        self._over[model] = ring
        self._looked_after.discard(model)
        self._context.traffic.forget_ring(ring.ring)
        why = ring.error.message if ring.error is not None else None
        self._context.emit("ring_over", {"model": ring.model, "ring": ring.ring, "error": why})
        self.restoring.over(ring)
        if self._nursery is not None:
            self._nursery.start_soon(self.keep_quietly)

    # what outlives this coordinator

    def _adopt(self, nursery: trio.Nursery) -> None:
        """Take over what ran when this coordinator was here last, or the one before it: its stages may still be there.
        What is to be there besides is loaded again."""
        if self._state is None:
            return
        self.restoring.remember(self._state.desired)
        self._epoch = self._state.epoch
        for record in self._state.rings:
            try:
                planned = from_record(record)
            except ValueError as error:
                _log.warning("a ring of before cannot be taken over: %s", error)
                continue
            ring = self.make(planned, adopted=True)
            self._epoch = max(self._epoch, ring.epoch)
            self.running[ring.ring] = ring
            self.restoring.up(ring)
            nursery.start_soon(self.lifecycle.serve, ring)

    async def keep(self) -> None:
        """Write down the rings that run, for whoever coordinates after a restart. Raises as `SwarmState`'s changes."""
        if self._state is None:
            return
        hides = self._registry.hides
        running = [ring for ring in self.running.values() if ring.runs and not hides(ring.model)]
        for ring in running:
            self.restoring.up(ring)
        for ring in self.running.values():
            if ring.life.error is not None:
                self.restoring.failed(ring)
        leaving = {ring.model for ring in self.running.values() if ring.draining or hides(ring.model)}
        records = [to_record(ring.planned) for ring in running]
        await self._state.keep_rings(records, self.restoring.records(leaving), self._epoch)

    async def keep_quietly(self) -> bool:
        """The same where nobody waits for it; whether it is written down."""
        try:
            await self.keep()
        except NOT_KEPT as error:
            _log.warning("the rings that run cannot be written down, and a restart will not find them: %s", error)
            return False
        return True

    async def _keep_when_ready(self, ring: LoadedRing) -> None:
        """Again and again: a successor unloads a ring that it does not know of, and loads one that failed."""
        await ring.settled.wait()
        while ring.runs or ring.life.error is not None:
            if await self.keep_quietly():
                return
            await trio.sleep(KEEP_AGAIN_S)

    # models that go

    async def forget_model(self, manifest: Manifest) -> None:
        """Out of the catalogue first, which others may have to agree to; then its memory comes back; then its files go
        from this machine's disk. Raises as `SwarmState`'s changes, before anything is unloaded or deleted, and as
        `delete_files`."""
        try:
            with self._registry.hidden(manifest.model_id):  # no load begins, and its ring is not written down anew
                await self._forget_hidden(manifest)
        except (InvalidModel, *NOT_KEPT):
            await self.keep_quietly()  # what was written meanwhile left its ring out
            raise

    async def _forget_hidden(self, manifest: Manifest) -> None:
        model = manifest.model_id
        if self._state is not None:
            await self._state.drop_model(manifest, time.time())
        self.restoring.forget(model)
        if (ring := self.of_model(model)) is not None:
            await ring.unload(force=True)
        self._over.pop(model, None)
        self._known.pop(model, None)
        self._looked_after.discard(model)
        await self.delete_files(manifest)

    async def delete_files(self, manifest: Manifest) -> None:
        """Of a model that is removed. Raises Conflict or InvalidModel that says that they are still here."""
        try:
            await trio.to_thread.run_sync(self._registry.remove_files, manifest)
        except (Conflict, InvalidModel) as error:
            raise type(error)(
                f"{manifest.id} is removed from the swarm and no longer served, but its files are still on this "
                f"machine: {error.message}; `swarmnode model-remove {manifest.id}` tries again"
            ) from error


def _may_help(awaited: Sequence[Row], error: SwarmError, options: LoadOptions, members: Iterable[Member]) -> bool:
    """Whether a load that was refused may be possible when the awaited are back. One that names its peers needs these
    and no others."""
    if not isinstance(error, PeersLacking | PeerNotFound) or not awaited:
        return False
    there = {text for member in members for text in (member.identity.name, member.node)}
    missing = {*options.peers} - there
    return not options.peers or (
        bool(missing) and missing <= {text for row in awaited for text in (row.name, row.node)}
    )
