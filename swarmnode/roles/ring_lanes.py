"""A stage's lanes, both ways, under one link epoch at a time: dialed to its successor, served to its predecessor.

The next link epoch ends all that is left of the one before: its lanes, and what was queued for them. Sessions do not
outlive a link epoch, so nothing of it is missed.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from swarmnode.errors import ProtocolError, SwarmError
from swarmnode.ring.lanes import base_lane, outgoing_lanes, wire_lane
from swarmnode.roles.lane_ends import LaneIn, LaneOut
from swarmnode.wire.address import parse_address
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import LinkOptions, Parameters
from swarmnode.wire.nursery import open_flat_nursery
from swarmnode.wire.traffic import Route

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from swarmnode.ids import NodeId
    from swarmnode.ring.messages import Epoch
    from swarmnode.roles.context import NodeContext
    from swarmnode.roles.lane_ends import Dial, SeeBetter
    from swarmnode.roles.load_spec import LoadSpec
    from swarmnode.wire.address import Address
    from swarmnode.wire.link import Channel, Hello

LANE_CHANNEL = {"act": "steps", "tok": "steps", "pre": "prompts"}
"""Prompt pieces have a connection of their own, so that a decode step never waits behind 4 MB of prompt."""
EPOCH_S = 5.0
"""The coordinator tells all stages of a new link epoch at once; a neighbour may have heard of it first."""


class RingLanes:
    """`take` gets what comes in, with the lane it is for; `broke` hears once of each link epoch that a lane failed."""

    def __init__(
        self,
        context: NodeContext,
        spec: LoadSpec,
        take: Callable[[Frame], None],
        broke: Callable[[SwarmError], None],
    ) -> None:
        self.epoch: Epoch = spec.epoch
        self.worker = 0
        """This stage's worker process: what a lane that drops must find again."""
        self._context = context
        self._spec = spec
        self._take = take
        self._tell_broken = broke
        self._names = outgoing_lanes(spec.stage, spec.num_stages)
        self._out = self._new_lanes()
        self._in: dict[str, LaneIn] = {}
        self._whole = True
        """No lane of this link epoch has failed."""
        self._running: set[trio.CancelScope] = set()
        self._advanced = trio.Event()

    def post(self, frame: Frame) -> None:
        """Send a frame of this stage's worker."""
        self._out[wire_lane(frame.header["lane"], self._spec.stage)].post(frame)

    def snapshot(self) -> list[dict[str, Any]]:
        """The outgoing lanes: routes, what was measured of their links, and what they carried."""
        return [{**lane.snapshot(), **self._carried(name)} for name, lane in self._out.items()]

    def _carried(self, lane: str) -> dict[str, int]:
        where = Route(LANE_CHANNEL[base_lane(lane)], self._successor, self._spec.ring, lane)
        counts = self._context.traffic.counts(where)
        return {"frames": counts.frames_out, "bytes": counts.bytes_out}

    def advance(self, epoch: Epoch) -> None:
        """End the present link epoch; those who came early for the next one go on."""
        self.epoch, self._whole = epoch, True
        self._out, self._in = self._new_lanes(), {}
        for scope in self._running:
            scope.cancel()
        self._advanced.set()
        self._advanced = trio.Event()

    async def dial(self, next_addresses: Sequence[str], linked: Callable[[], None]) -> None:
        """Bring all outgoing lanes up, say so, and keep them for this link epoch."""
        epoch = self.epoch
        with self._for_this_epoch():
            try:
                addresses = [parse_address(address) for address in next_addresses]
                async with open_flat_nursery() as nursery:
                    for lane in self._names:
                        ways = self._ways_to_next(lane, addresses)
                        await nursery.start(self._out[lane].keep, *ways)
                    linked()
            except SwarmError as error:
                self._broke(epoch, error)

    async def serve(self, hello: Hello, channel: Channel) -> None:
        """Take the frames of one incoming lane until it or its link epoch ends. Raises ProtocolError for another's."""
        spec, where = self._spec, hello.parameters
        predecessor = (spec.stage - 1) % spec.num_stages
        lane, epoch = where.lane or "", where.epoch
        if where.stage != predecessor or lane not in outgoing_lanes(predecessor, spec.num_stages):
            raise ProtocolError(f"ring {spec.ring} has no lane {lane!r} from stage {where.stage} here")
        if hello.identity.node != spec.nodes[predecessor]:
            raise ProtocolError(f"stage {predecessor} of ring {spec.ring} is held by another node")
        if epoch is None or not await self._reached(epoch):
            raise ProtocolError(f"ring {spec.ring} is at epoch {self.epoch} here, not at {epoch}")
        if lane not in self._in:
            self._in[lane] = LaneIn(spec.ring, lane, epoch, self.worker, partial(self._hand_over, base_lane(lane)))
        with self._for_this_epoch():
            try:
                await self._in[lane].serve(channel)
            except SwarmError as error:
                self._broke(epoch, error)

    async def _reached(self, epoch: Epoch) -> bool:
        """Whether this is the epoch here, or becomes it soon."""
        with trio.move_on_after(EPOCH_S):
            while epoch[0] == self.epoch[0] and epoch > self.epoch:
                await self._advanced.wait()
        return epoch == self.epoch

    def _hand_over(self, lane: str, frame: Frame) -> None:
        self._take(Frame(frame.kind, {**frame.header, "lane": lane}, frame.body, frame.checked))

    @property
    def _successor(self) -> NodeId:
        return self._spec.nodes[(self._spec.stage + 1) % self._spec.num_stages]

    def _ways_to_next(self, lane: str, addresses: Sequence[Address]) -> tuple[Dial, SeeBetter]:
        spec, successor, roads = self._spec, self._successor, self._context.roads
        options = LinkOptions(Parameters(spec.ring, self.epoch, lane, spec.stage), self._context.traffic, successor)
        kind = LANE_CHANNEL[base_lane(lane)]
        dial = partial(roads.to_peer, successor, addresses, kind, options)
        return dial, partial(roads.better_to_peer, successor, addresses, kind)

    @contextmanager
    def _for_this_epoch(self) -> Iterator[None]:
        """The block is cancelled by `advance`."""
        with trio.CancelScope() as scope:
            self._running.add(scope)
            try:
                yield
            finally:
                self._running.discard(scope)

    def _broke(self, epoch: Epoch, error: SwarmError) -> None:
        if epoch == self.epoch and self._whole:
            self._whole = False
            self._tell_broken(error)

    def _new_lanes(self) -> dict[str, LaneOut]:
        return {lane: LaneOut(self._spec.ring, lane, self.epoch) for lane in self._names}
