"""Rings that go without being asked to, and room for those that come: the coordinator's side of `cluster.lifecycle`."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import trio

from swarmnode.cluster.lifecycle import (
    IdleRings,
    IdleTooLong,
    ReplyEnded,
    ReplyStarted,
    RingGone,
    RingServes,
    RingUse,
    Use,
    find_room,
)
from swarmnode.cluster.ring_life import RingState
from swarmnode.driver import Driver

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from swarmnode.cluster.placement import PeerResources
    from swarmnode.config import Settings
    from swarmnode.ids import NodeId, RingId
    from swarmnode.roles.loaded_ring import LoadedRing
    from swarmnode.roles.members import Member
    from swarmnode.roles.planning import PlannedRing


class RingLifecycle:
    """`rings` gives the coordinator's present rings; `emit` hears why one of them goes."""

    def __init__(
        self,
        rings: Callable[[], Collection[LoadedRing]],
        settings: Settings,
        emit: Callable[[str, Mapping[str, object]], None],
    ) -> None:
        self._rings = rings
        self._most = settings.max_loaded_models
        self._emit = emit
        self._uses = IdleRings(settings.model_idle_unload_s)
        self._driver: Driver[Use, object, IdleTooLong] = Driver(self._uses, lambda _: None, self._idle_too_long)
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Unload what was idle for too long, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await self._driver.run()

    async def serve(
        self, ring: LoadedRing, leaving: Sequence[LoadedRing] = (), decided: trio.Event | None = None
    ) -> None:
        """A ring's whole life, which begins when those that make room for it are over; nobody goes before it is
        `decided`, nor who was spared by then."""
        if decided is not None:
            await decided.wait()
        async with trio.open_nursery() as nursery:
            for other in (other for other in leaving if other.draining):
                nursery.start_soon(partial(other.unload, force=False))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._note_ready, ring)
            await ring.run()
            nursery.cancel_scope.cancel()
        self._driver.feed(RingGone(ring.ring))

    async def _note_ready(self, ring: LoadedRing) -> None:
        await ring.settled.wait()
        if ring.error is None and not ring.ending:  # an unload may have ended its load
            self._driver.feed(RingServes(ring.ring))
            self._emit("ring_ready", {"model": ring.model, "ring": ring.ring, "stages": len(ring.specs)})

    @contextmanager
    def in_use(self, ring: LoadedRing) -> Iterator[None]:
        """The block is a reply that runs on it."""
        self._driver.feed(ReplyStarted(ring.ring))
        try:
            yield
        finally:
            self._driver.feed(ReplyEnded(ring.ring))

    def find_room(
        self,
        members: Collection[Member],
        plan: Callable[[Sequence[PeerResources]], PlannedRing],
        *,
        evict: bool = True,
    ) -> tuple[PlannedRing, list[LoadedRing]]:
        """A plan, and the rings that go first; changes nothing. Raises as `plan`, and Conflict where rings that must
        stay are in the way; all must without `evict`."""
        leaving = frozenset(ring.ring for ring in self._rings() if _is_leaving(ring))

        def plan_without(gone: frozenset[RingId]) -> PlannedRing:
            return plan([self._offer(member, gone | leaving) for member in members if member.usable])

        staying = [self._use(ring, evict) for ring in self._rings() if ring.ring not in leaving]
        planned, evicted = find_room(staying, plan_without, _nodes)
        held = _nodes(planned)
        gone = {ring.ring for ring in self._rings() if ring.ring in leaving and held & {*ring.life.nodes}}
        return planned, [ring for ring in self._rings() if ring.ring in gone | {*evicted}]

    def hold(self, leaving: Sequence[LoadedRing]) -> list[LoadedRing]:
        """From now on they take no requests. Returns those that stay if they are spared; the others go anyway."""
        held = [ring for ring in leaving if not ring.draining]
        for ring in held:
            ring.draining = True
            self._driver.feed(RingGone(ring.ring))
        return held

    def evict(self, held: Sequence[LoadedRing], model: str) -> None:
        """They make room for `model`; `serve` unloads them."""
        for ring in held:
            self._emit("ring_evicted", {"model": ring.model, "ring": ring.ring, "for": model})

    def spare(self, held: Sequence[LoadedRing]) -> None:
        """They go on, but for those that were told to go meanwhile, or broke."""
        for ring in held:
            if not ring.going and not ring.ending:
                ring.draining = False
                self._driver.feed(RingServes(ring.ring))

    def _use(self, ring: LoadedRing, evict: bool) -> RingUse:
        kept = ""
        if ring.requests:
            kept = f"{len(ring.requests)} running there"
        elif ring.state == "loading":
            kept = "it is loading"
        elif not evict:
            kept = "it serves"
        return RingUse(ring.ring, ring.model, frozenset(ring.life.nodes), self._uses.last_used_s(ring.ring), kept)

    def _offer(self, member: Member, gone: frozenset[RingId]) -> PeerResources:
        """What is left of a peer beside the rings that stay on it."""
        held = [ring for ring in self._rings() if ring.ring not in gone and ring.stage_of(member.node) is not None]
        offer = member.resources(held[0].model if len(held) >= self._most else None)
        taken = sum(_bytes_on(ring, member.node) for ring in held)
        return replace(offer, memory_bytes=max(0, offer.memory_bytes - taken))

    def _idle_too_long(self, idle: IdleTooLong) -> None:
        ring = next((ring for ring in self._rings() if ring.ring == idle.ring), None)
        if ring is None or self._nursery is None:
            return
        if ring.requests or not ring.serving:
            self._driver.feed(RingServes(ring.ring))  # it is being linked anew: from now on once more
            return
        ring.draining = True  # at once: a request that comes now hears that the model is going
        self._emit("ring_idle", {"model": ring.model, "ring": ring.ring, "idle_s": idle.idle_s})
        self._nursery.start_soon(partial(ring.unload, force=False))


def _is_leaving(ring: LoadedRing) -> bool:
    """It gives its memory back within the bound of an unload, whatever else happens."""
    return ring.life.state in (RingState.ENDING, RingState.OVER) or (ring.draining and not ring.requests)


def _nodes(planned: PlannedRing) -> frozenset[NodeId]:
    return frozenset(stage.peer.node for stage in planned.plan.stages)


def _bytes_on(ring: LoadedRing, node: NodeId) -> int:
    stage = ring.stage_of(node)
    return 0 if stage is None else int(ring.plan.stages[stage].price.need(ring.plan.kv_tokens))
