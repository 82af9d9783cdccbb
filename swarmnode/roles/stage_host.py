"""One stage of one ring on a peer: fetch its files, run its worker, join the worker to the ring's lanes.

The host routes by header and never looks at a body. However it ends, the worker is gone when `run` returns.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import trio

from swarmnode.compute.worker_spec import WorkerSpec
from swarmnode.errors import (
    MAX_MESSAGE_CHARS,
    InternalError,
    LinkBroken,
    ProtocolError,
    StageLost,
    SwarmError,
    from_wire,
)
from swarmnode.ring.lanes import base_lane, outgoing_lanes, wire_lane
from swarmnode.roles.file_client import fetch_files
from swarmnode.roles.outbox import Outbox
from swarmnode.roles.worker_process import WorkerProcess, describe_exit, start_worker
from swarmnode.wire.address import Address, parse_address
from swarmnode.wire.bodies import pack_body, unpack_body
from swarmnode.wire.frames import Frame
from swarmnode.wire.lane import LaneReceiver, LaneSender
from swarmnode.wire.link import LinkOptions, Parameters
from swarmnode.wire.nursery import open_flat_nursery

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from swarmnode.catalog.store import ShardStore
    from swarmnode.roles.context import NodeContext, PeerResources
    from swarmnode.roles.load_spec import LoadSpec
    from swarmnode.wire.link import Channel, Hello

RING_KINDS = frozenset({"piece", "piece_done", "group", "tokens", "end", "ended", "failed", "probe", "drop", "reset"})
REPLY_KINDS = frozenset({"accepted", "started", "text", "done", "error", "probed"})
LANE_CHANNEL = {"act": "steps", "tok": "steps", "pre": "prompts"}
"""Prompt pieces have a connection of their own, so that a decode step never waits behind 4 MB of prompt."""
STALL_S = 120.0
"""A worker that holds sessions and says nothing for this long is stuck in a driver or stopped; it is killed."""

_log = logging.getLogger(__name__)


class StageHost:
    """Made for one `load`; `run` lives until `unload`, a failure, or the end of the peer."""

    def __init__(
        self,
        context: NodeContext,
        spec: LoadSpec,
        resources: PeerResources,
        store: ShardStore,
        post: Callable[[Frame], None],
    ) -> None:
        self.spec = spec
        self.gauges: dict[str, Any] = {}
        self.phase = "starting"
        self.worker: WorkerProcess | None = None
        self._context = context
        self._resources = resources
        self._store = store
        self._post = post
        self._to_worker = Outbox()
        self._lanes = {lane: Outbox() for lane in outgoing_lanes(spec.stage, spec.num_stages)}
        self._scope = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._ready = False
        self._heard_s = trio.current_time()
        self._requests: set[str] = set()
        """Handed to the worker and not answered yet. Its gauges cannot tell: they come after a forward, not before."""

    # what the peer calls

    async def run(self, coordinator: Address) -> None:
        """Serve the stage; reports `stage_failed` for any fault and `unloaded` when its memory is back."""
        try:
            with self._scope:
                await self._serve(coordinator)
        except SwarmError as error:
            self._fail(error)
        except Exception as error:  # a bug here ends this stage, not the node, which may hold others
            _log.exception("stage %s of %s failed", self.spec.stage, self.spec.model)
            self._fail(InternalError(f"the node failed around the stage: {error!r:.200}; its log has the details"))
        finally:
            self.phase = "ended"
            self._post(Frame("unloaded", self._where()))

    def unload(self) -> None:
        self._scope.cancel()

    def take(self, frame: Frame) -> None:
        """A frame of the coordinator for this stage's worker (open, cancel, probe_ring)."""
        if self._ready:
            if frame.kind == "open":
                self._note_opened(frame.header["request"])
            self._to_worker.post(frame)
        elif frame.kind == "open":
            refused = {"request": frame.header["request"], "code": StageLost.code, "message": "the stage is not ready"}
            self._post(Frame("error", refused))

    def link(self, next_address: str) -> None:
        """Dial the successor's lanes; `linked` is reported when they are up."""
        if self._nursery is not None:
            self._nursery.start_soon(self._dial_lanes, next_address)

    async def serve_lane(self, hello: Hello, channel: Channel) -> None:
        """Take the frames of one incoming lane until it ends; its end is the ring's end."""
        where = hello.parameters
        predecessor = (self.spec.stage - 1) % self.spec.num_stages
        expected = outgoing_lanes(predecessor, self.spec.num_stages)
        lane = where.lane or ""
        if not self._ready or where.epoch != self.spec.epoch or where.stage != predecessor or lane not in expected:
            raise ProtocolError(f"ring {self.spec.ring} has no lane {lane!r} from stage {where.stage} here")
        if hello.identity.node != self.spec.nodes[predecessor]:
            raise ProtocolError(f"stage {predecessor} of ring {self.spec.ring} is held by another node")
        receiver = LaneReceiver(self.spec.ring, lane, self.spec.epoch)
        base = base_lane(lane)
        try:
            async for frame in channel:
                accepted = receiver.accept(frame)
                if accepted is not None:
                    header = {**accepted.header, "lane": base}
                    self._to_worker.post(Frame(accepted.kind, header, accepted.body))
            raise LinkBroken(f"stage {predecessor} closed lane {lane}")
        except SwarmError as error:
            self._lane_broke(lane, error)

    # its life

    async def _serve(self, coordinator: Address) -> None:
        self.phase = "fetching"
        await fetch_files(self._context, coordinator, self.spec, self._store, self._report_progress)
        folder = await trio.to_thread.run_sync(self._store.place, self.spec.model, self.spec.files)
        self.phase = "loading"
        async with start_worker(self._environment()) as worker, open_flat_nursery() as nursery:
            self.worker, self._nursery = worker, nursery
            nursery.start_soon(worker.collect_log)
            nursery.start_soon(self._feed_worker, worker)
            nursery.start_soon(self._watch_stall)
            self._to_worker.post(Frame("init", {}, pack_body(self._worker_spec(folder).as_map())))
            try:
                await self._pump(worker)
            except SwarmError as error:
                self._fail(error)  # before the lanes close, or a neighbour that only sees that names the wrong cause
                self._scope.cancel()

    def _environment(self) -> dict[str, str]:
        threads = str(self._resources.threads) if self._resources.threads else ""
        return {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"} if threads else {}

    def _worker_spec(self, folder: Path) -> WorkerSpec:
        spec = self.spec
        return WorkerSpec(
            ring=spec.ring,
            epoch=spec.epoch[0],
            stage=spec.stage,
            num_stages=spec.num_stages,
            folder=str(folder),
            shards=tuple(entry.path for entry in spec.files if entry.path.startswith("shards/")),
            first_layer=spec.first_layer,
            end_layer=spec.end_layer,
            num_layers=spec.num_layers,
            scripted=spec.scripted,
            dtype=spec.dtype,
            quantization=spec.quantization,
            device=self._resources.device,
            threads=self._resources.threads,
            eos_token_ids=spec.eos_token_ids,
            context_tokens=spec.context_tokens,
            min_context_tokens=spec.min_context_tokens,
            kv_tokens=spec.kv_tokens,
            max_in_flight=spec.max_in_flight,
            max_waiting=spec.max_waiting,
            prefill_chunk=self._context.settings.prefill_chunk,
            max_group=spec.max_group,
            schedule=spec.schedule,
            typical_tokens=spec.typical_tokens,
            memory_bytes=self._resources.memory_bytes,
            step_costs=spec.step_costs or self._context.settings.step_costs,
        )

    async def _feed_worker(self, worker: WorkerProcess) -> None:
        try:
            await self._to_worker.run(worker.pipe)
        except LinkBroken:
            await trio.sleep_forever()  # the worker is ending; `_pump` sees it and says how

    async def _pump(self, worker: WorkerProcess) -> None:
        """Route what the worker says until it ends, which is a fault unless the scope was cancelled."""
        try:
            while (frame := await worker.pipe.receive()) is not None:
                self._heard_s = trio.current_time()
                self._route(frame)
        except (LinkBroken, ProtocolError):
            with trio.move_on_after(1):  # killed in the middle of a frame: say so, not that its frame was bad
                await worker.wait()
            if not worker.ended:
                raise
        code = await worker.wait()
        raise StageLost(f"stage {self.spec.stage}'s worker {describe_exit(code)}{self._last_words(worker)}")

    def _route(self, frame: Frame) -> None:
        if frame.kind in RING_KINDS:
            lane = wire_lane(frame.header["lane"], self.spec.stage)
            self._lanes[lane].post(frame)
        elif frame.kind in REPLY_KINDS:
            if frame.kind in ("done", "error"):
                self._requests.discard(frame.header.get("request", ""))
            self._post(frame)
        elif frame.kind == "stats":
            self.gauges = unpack_body(frame.body)
            self._post(Frame("gauges", self._where(), frame.body))
        elif frame.kind == "loading":
            self._report_progress(frame.header["phase"], frame.header["done"], frame.header["total"])
        elif frame.kind == "ready":
            self._become_ready(unpack_body(frame.body))
        elif frame.kind == "broken":
            self._ring_broke(frame.header.get("message", ""))
        elif frame.kind == "fatal":
            raise from_wire(frame.header["code"], frame.header["message"])
        else:
            raise ProtocolError(f"the worker sent {frame.kind}")

    def _become_ready(self, about: dict[str, Any]) -> None:
        self._ready, self.phase = True, "ready"
        address = self._context.identity.listen[0]
        self._post(Frame("stage_ready", self._where(), pack_body({**about, "address": address})))

    async def _watch_stall(self) -> None:
        while True:
            await trio.sleep(STALL_S / 4)
            if self._busy and trio.current_time() - self._heard_s > STALL_S and self.worker is not None:
                self.worker.kill()

    @property
    def _busy(self) -> bool:
        return bool(self._requests or self.gauges.get("running", 0) or self.gauges.get("queued", 0))

    def _note_opened(self, request: str) -> None:
        if not self._busy:
            self._heard_s = trio.current_time()  # an idle worker's silence is not held against it
        self._requests.add(request)

    # lanes

    async def _dial_lanes(self, next_address: str) -> None:
        """Bring all outgoing lanes up, report it, and keep them; a lane that breaks ends the ring."""
        try:
            address = parse_address(next_address)
            async with open_flat_nursery() as nursery:
                for lane in self._lanes:
                    await nursery.start(self._keep_lane, lane, address)
                self._post(Frame("linked", self._where()))
        except SwarmError as error:
            self._lane_broke(", ".join(self._lanes), error)

    async def _keep_lane(
        self, lane: str, address: Address, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        spec = self.spec
        successor = spec.nodes[(spec.stage + 1) % spec.num_stages]
        parameters = Parameters(spec.ring, spec.epoch, lane, spec.stage)
        options = LinkOptions(parameters, self._context.traffic, successor)
        kind = LANE_CHANNEL[base_lane(lane)]
        async with self._context.transport.dial(address, kind, self._context.identity, options) as channel:
            sender = LaneSender(spec.ring, lane, spec.epoch)
            task_status.started()
            async with open_flat_nursery() as nursery:
                nursery.start_soon(self._lanes[lane].run, channel, sender.stamp)
                async for frame in channel:
                    raise ProtocolError(f"{frame.kind} came back on outgoing lane {lane}")
                raise LinkBroken(f"the next stage closed lane {lane}")

    def _lane_broke(self, lane: str, error: SwarmError) -> None:
        """Tell the coordinator, and the head's sessions if they are here; the coordinator ends the ring."""
        if self._scope.cancel_called:
            return
        _log.info("ring %s: lane %s broke: %s", self.spec.ring, lane, error)
        broken = self._ring_broke(f"stage {self.spec.stage} lost its link to a neighbour")
        if self.spec.stage == 0 and self._ready:
            self._to_worker.post(broken)

    def _ring_broke(self, why: str) -> Frame:
        """Report to the coordinator that this stage saw the ring fail; returns what it was told."""
        where = {"ring": self.spec.ring, "epoch": list(self.spec.epoch), "stage": self.spec.stage}
        broken = Frame("broken", {**where, "message": why[:MAX_MESSAGE_CHARS]})
        self._post(broken)
        return broken

    # reports

    def _report_progress(self, phase: str, done: int, total: int) -> None:
        self.phase = phase
        self._post(Frame("progress", {**self._where(), "phase": phase, "done": done, "total": total}))

    def _where(self) -> dict[str, Any]:
        return {"ring": self.spec.ring, "stage": self.spec.stage}

    def _fail(self, error: SwarmError) -> None:
        _log.warning("stage %s of %s failed: %s", self.spec.stage, self.spec.model, error)
        self._post(Frame("stage_failed", {**self._where(), "code": error.code, "message": error.message}))

    def _last_words(self, worker: WorkerProcess) -> str:
        said = [line for line in worker.log if not line.startswith("[stage")]  # the stats lines are no last words
        return f"; its last words: {said[-1]}" if said else ""
