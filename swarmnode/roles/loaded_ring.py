"""One loaded (or loading) ring at the coordinator: its life machine, its stages' gauges, its requests."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import trio

from swarmnode.cluster.machine_book import MachineBook
from swarmnode.cluster.ring_life import RingLife, RingState
from swarmnode.cluster.ring_life_messages import (
    Progress,
    RingCommand,
    RingEvent,
    RingInput,
    RingLost,
    RingOver,
    RingParted,
    RingReady,
    RingRelinked,
    SendLink,
    SendLoad,
    SendProbe,
    SendUnload,
    StageDown,
    StageReady,
    UnloadAsked,
)
from swarmnode.driver import Driver
from swarmnode.errors import ModelUnloading, StageLost, StreamClosed, SwarmError, from_wire
from swarmnode.roles.requests import RequestStream
from swarmnode.roles.ring_measures import RingMeasures
from swarmnode.wire.bodies import pack_body
from swarmnode.wire.deadlines import DRAIN_S
from swarmnode.wire.frames import Frame
from swarmnode.wire.routes import worst

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from swarmnode.ids import NodeId, RequestId, RingId
    from swarmnode.roles.planning import PlannedRing
    from swarmnode.roles.reports import LaneLink, ReadyStage

_STATE_NAMES = {
    RingState.READY: "ready",
    RingState.RELINKING: "relinking",
    RingState.ADOPTING: "relinking",
}
_log = logging.getLogger(__name__)


class LoadedRing:
    """Made when a load was planned; over when every stage gave its memory back.

    `post` sends a frame to a node (and drops it where the node is gone: membership then ends the stage); `on_over` is
    called once, before anyone who waits for `over` goes on.
    """

    def __init__(
        self,
        planned: PlannedRing,
        post: Callable[[NodeId, Frame], None],
        on_over: Callable[[LoadedRing], None],
        *,
        adopted: bool = False,
        measures: RingMeasures | None = None,
    ) -> None:
        """`adopted`: its stages were loaded for a coordinator before this one. `measures` hears what they measure."""
        self.planned = planned
        self.specs = planned.specs
        self.plan = planned.plan
        self.dtype = planned.dtype
        self.quantization = planned.quantization
        self.asked_quantization = planned.asked_quantization
        self.notice = planned.notice
        self.started_unix = int(time.time())
        self.draining = False
        """It takes no requests."""
        self.going = False
        """`unload` has begun."""
        self.gauges: dict[int, Mapping[str, Any]] = {}
        self.ready: dict[int, ReadyStage] = {}
        """What stages said of themselves when they had loaded."""
        self.links: dict[int, Sequence[LaneLink]] = {}
        """What each stage sends on, as it last said."""
        self.requests: dict[RequestId, RequestStream] = {}
        self.settled = trio.Event()
        """Ready, or failed for good."""
        self.over = trio.Event()
        self.measures = measures or RingMeasures(MachineBook(), planned)
        nodes = [stage.peer.node for stage in self.plan.stages]
        self.life = RingLife(nodes, trio.current_time(), adopted=adopted)
        self._post = post
        self._on_over = on_over
        self._adopted = adopted
        self._abandoned: SwarmError | None = None
        self.unsure: set[int] = set()
        """Stages whose node was away, and has not said yet that it holds them."""
        self._idle = trio.Event()
        """Set while no request runs that could still end well; one for all that wait for it."""
        self._idle.set()
        self._driver: Driver[RingInput, RingCommand, RingEvent] = Driver(self.life, self._send, self._notify)

    @property
    def ring(self) -> RingId:
        return self.specs[0].ring

    @property
    def epoch(self) -> int:
        """Its load's; a later load has a larger one, whatever was loaded and whoever coordinated."""
        return self.specs[0].epoch[0]

    @property
    def model(self) -> str:
        return self.specs[0].model

    @property
    def head(self) -> NodeId:
        return self.life.nodes[0]

    @property
    def kv_tokens(self) -> int:
        """What all conversations may hold together: the plan's budget, or less where a stage measured less."""
        return min([self.plan.kv_tokens, *(ready.kv_tokens for ready in self.ready.values())])

    @property
    def context_tokens(self) -> int:
        """The longest conversation that the ring takes."""
        return min(self.plan.context_tokens, self.kv_tokens)

    @property
    def adopting(self) -> bool:
        """Its stages were loaded for a coordinator before this one, and are not all heard of yet."""
        return self.life.state is RingState.ADOPTING

    @property
    def ending(self) -> bool:
        """Its stages are to be unloaded, or are."""
        return self.life.state in (RingState.ENDING, RingState.OVER)

    @property
    def runs(self) -> bool:
        """Its stages are loaded, and are to stay so."""
        return self.life.state in (RingState.READY, RingState.RELINKING, RingState.ADOPTING)

    @property
    def serving(self) -> bool:
        return self.life.state is RingState.READY and not self.draining

    @property
    def state(self) -> str:
        """As the API says it: loading, ready, relinking, unloading, lost or failed."""
        if self.life.error is not None:
            return "lost" if self.life.error.was_ready else "failed"
        if self.draining or self.life.state in (RingState.ENDING, RingState.OVER):
            return "unloading"
        return _STATE_NAMES.get(self.life.state, "loading")

    @property
    def error(self) -> SwarmError | None:
        if self._abandoned is not None:
            return self._abandoned
        lost = self.life.error
        return from_wire(lost.code, lost.message) if lost is not None else None

    async def run(self) -> None:
        """Drive the life until it is over."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._driver.run)
            await self.over.wait()
            nursery.cancel_scope.cancel()

    def feed(self, message: RingInput) -> None:
        self._driver.feed(message)

    def stage_of(self, node: NodeId) -> int | None:
        """The stage `node` holds; None for a node that is not part of this ring."""
        return self.life.nodes.index(node) if node in self.life.nodes else None

    def take_ready(self, stage: int, report: ReadyStage) -> None:
        """A stage has loaded and measured itself; it says the same again to every coordinator that it comes to."""
        if not self._adopted and stage not in self.ready:  # else it measured that long ago
            self.measures.loaded(stage, report, trio.current_time())
        self.ready[stage] = report
        if report.kv_tokens < self.plan.kv_tokens:
            _log.warning(
                "%s: stage %d has room for %d tokens of KV, %d were planned",
                self.model,
                stage,
                report.kv_tokens,
                self.plan.kv_tokens,
            )
        self.feed(StageReady(stage, report.address, report.kv_tokens, report.links))

    async def unload(self, *, force: bool) -> None:
        """Let running replies finish (for DRAIN_S, not at all with `force`), then give every stage's memory back."""
        self.draining = self.going = True
        if not force:
            with trio.move_on_after(DRAIN_S):
                await self._idle.wait()
        self.fail_requests(ModelUnloading(f"{self.model} is being unloaded"))
        self.feed(UnloadAsked())
        await self.over.wait()

    def open(self, request: RequestId, body: Mapping[str, Any]) -> RequestStream:
        """Send a request to the head; `close` it whatever happens."""
        opened = Frame("open", {"request": request, "ring": self.ring}, pack_body(body))
        cancel = Frame("cancel", {"request": request})
        stream = RequestStream(request, lambda: self._post(self.head, cancel))
        for other in (stream, *self.requests.values()) if self.requests else ():
            other.alone = False
        if self._idle.is_set():
            self._idle = trio.Event()
        self.requests[request] = stream
        self._post(self.head, opened)
        return stream

    def take_links(self, stage: int, links: Sequence[LaneLink]) -> None:
        """While a stage is being linked anew, its lanes are on no route: what they were stays known."""
        if links and all(link.route for link in links):
            self.links[stage] = links
            self.measures.linked(stage, links, trio.current_time())

    @property
    def route(self) -> str:
        """What the hidden states take: the worst of all lanes, nothing at all in a ring of one stage."""
        if len(self.specs) == 1:
            return "local"
        return worst(link.route for links in self.links.values() for link in links)

    def take_reply(self, stream: RequestStream, frame: Frame) -> None:
        """One frame of the head about a request. That its ring broke is the ring's to say, once the cause is known."""
        lost = frame.kind == "error" and frame.header["code"] == StageLost.code
        if lost and self.life.state is RingState.READY:
            links, why = self.life.links, frame.header["message"]
            self.feed(StageDown(0, StageLost.code, why, symptom=True, links=links))
        elif not lost or self.life.state is not RingState.RELINKING:
            stream.put(frame)

    def close(self, stream: RequestStream) -> None:
        """Forget a request; a head that still works for it is told to stop."""
        stream.cancel(StreamClosed("the client left"))
        self.requests.pop(stream.request, None)
        if not self.requests:
            self._idle.set()

    def part_from(self, stage: int) -> None:
        """A stage's node lost its connection to the coordinator. Its stage and its lanes may be well; what is under way
        to and from the head is lost, and so is a load."""
        self.unsure.add(stage)
        if stage == 0:
            name = self.plan.stages[stage].peer.name
            self.fail_requests(StageLost(f"the connection to {name}, which takes the requests, broke; try again"))
        if not self.runs:
            self.lose(stage, "is gone")

    def lose(self, stage: int, how: str) -> None:
        """Its peer does not hold it any more; `how`: what the peer did."""
        name = self.plan.stages[stage].peer.name
        self.feed(StageDown(stage, StageLost.code, f"stage {stage} is lost: its peer {name} {how}", gone=True))

    def abandon(self, why: SwarmError) -> None:
        """Its coordinator is over: whoever waits here hears of it, the stages hear nothing."""
        self._abandoned = why
        self.fail_requests(why)
        self.settled.set()
        self.over.set()

    def fail_requests(self, error: SwarmError) -> None:
        """All that run; nobody needs to wait for them any more."""
        for stream in self.requests.values():
            stream.cancel(error)
        self._idle.set()

    def phase(self, stage: int) -> str:
        """Of a stage, for people: never ready where its peer is away, or it is gone."""
        progress = self.progress(stage)
        if stage in self.unsure:
            return "away"
        return self.life.condition(stage) or (progress.phase if progress is not None else "starting")

    def progress(self, stage: int) -> Progress | None:
        return self.life.progress.get(stage)

    def _send(self, command: RingCommand) -> None:
        match command:
            case SendLoad(stage=stage):
                spec = self.specs[stage]
                self._post(self.life.nodes[stage], Frame("load", spec.header(), pack_body(spec.body())))
            case SendLink(stage=stage, next_address=address, links=links):
                where = {"ring": self.ring, "stage": stage, "epoch": [self.epoch, links]}
                frame = Frame("link", where, pack_body({"next": self._addresses_after(stage) or [address]}))
                self._post(self.life.nodes[stage], frame)
            case SendProbe():
                self._post(self.head, Frame("probe_ring", {"ring": self.ring}, pack_body(self._measured())))
            case SendUnload(stage=stage):
                self._post(self.life.nodes[stage], Frame("unload", {"ring": self.ring}))

    def _addresses_after(self, stage: int) -> list[str]:
        ready = self.ready.get((stage + 1) % len(self.specs))
        return ready.addresses if ready is not None else []

    def _measured(self) -> dict[str, Any]:
        """What the head has to know of all stages before the first request."""
        stages = (self.ready.get(stage) for stage in range(len(self.specs)))
        costs = [ready.costs.model_dump() if ready and ready.costs else None for ready in stages]
        return {"kv_tokens": self.kv_tokens, "costs": costs}

    def _notify(self, event: RingEvent) -> None:
        match event:
            case RingReady():
                self.settled.set()
            case RingParted(message=message):
                _log.warning("%s: %s; its stages are being linked anew", self.model, message)
                self.fail_requests(StageLost(f"{message}; {self.model} is being linked anew, try again in a moment"))
            case RingRelinked():
                _log.warning("%s: its stages are linked again", self.model)
                self.settled.set()
            case RingLost(code=code, message=message):
                self.fail_requests(from_wire(code, message))
                self.settled.set()
            case RingOver():
                self._on_over(self)
                self.settled.set()
                self.over.set()
