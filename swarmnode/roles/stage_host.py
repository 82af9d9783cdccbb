"""One stage of one ring on a peer: fetch its files, run its worker, join the worker to the ring's lanes.

The host routes by header and never looks at a body. However it ends, the worker is gone when `run` returns.
"""

from __future__ import annotations

import logging
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import trio

from swarmnode.cluster.head_activity import HeadActivity
from swarmnode.compute.worker_spec import WorkerSpec
from swarmnode.errors import (
    MAX_MESSAGE_CHARS,
    InternalError,
    LinkBroken,
    OutOfMemory,
    ProtocolError,
    StageLost,
    SwarmError,
    from_wire,
)
from swarmnode.roles.fetching import fetch_files
from swarmnode.roles.outbox import Outbox
from swarmnode.roles.ring_lanes import RingLanes
from swarmnode.roles.worker_process import WorkerProcess, describe_exit, start_worker
from swarmnode.wire.bodies import pack_body, unpack_body
from swarmnode.wire.frames import Frame
from swarmnode.wire.nursery import open_flat_nursery

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from swarmnode.catalog.store import ShardStore
    from swarmnode.ring.messages import Epoch
    from swarmnode.roles.context import NodeContext, PeerResources
    from swarmnode.roles.load_spec import LoadSpec
    from swarmnode.wire.frames import Post
    from swarmnode.wire.link import Channel, Hello

RING_KINDS = frozenset({"piece", "piece_done", "group", "tokens", "end", "ended", "failed", "probe", "drop", "reset"})
REPLY_KINDS = frozenset({"accepted", "started", "text", "done", "error", "probed"})
OVERTAKES_REPLIES = RING_KINDS | {"stats"}
STALL_S = 120.0
"""A worker that holds sessions and says nothing of them for this long is stuck in a driver; it is killed."""
PULSE_S, MISSED_PULSES = 5.0, 3
"""How often a worker is asked for a sign of life, which its reader thread gives whatever it computes, and how many may
be missing before it is killed: a process that was stopped, or that thrashes, answers nothing."""

_log = logging.getLogger(__name__)


class StageHost:
    """Made for one `load`; `run` lives until `unload`, a failure, or the end of the peer."""

    def __init__(
        self,
        context: NodeContext,
        spec: LoadSpec,
        resources: PeerResources,
        store: ShardStore,
        post: Post,
    ) -> None:
        """`post` goes to the coordinator."""
        self.spec = spec
        self.gauges: dict[str, Any] = {}
        self.phase = "starting"
        self.worker: WorkerProcess | None = None
        self._context = context
        self._resources = resources
        self._store = store
        self._post = post
        self._to_worker = Outbox()
        self._lanes = RingLanes(context, spec, self._to_worker.post, self._lane_broke)
        self._head_serves = True
        """As far as this node knows: False from the ring's loss until the head's next probe is back."""
        self._scope = trio.CancelScope()
        self._nursery: trio.Nursery | None = None
        self._ready = False
        self._heard_s = trio.current_time()
        self._pulse = True
        """The worker said something since it was last asked for a sign of life."""
        self._killed_because = ""
        self._report: dict[str, Any] = {}
        """What the worker measured of itself, once it has loaded."""
        self._activity = HeadActivity(trio.current_time())
        self._requests: set[str] = set()
        """Handed to the worker and not answered yet. Its gauges cannot tell: they come after a forward, not before."""

    @property
    def links(self) -> list[dict[str, Any]]:
        """The links it sends on: their routes, and what was measured of them."""
        return self._lanes.snapshot()

    def activity(self) -> dict[str, Any] | None:
        """What people had of this stage, if it is their replies' first: for beats."""
        if self.spec.stage != 0:
            return None
        now, head = trio.current_time(), self._activity
        return {
            "requests": head.requests,
            "running": head.running,
            "tokens_per_s": round(head.tokens_per_s(now), 2),
            "last_ttft_s": head.last_ttft_s,
            "idle_s": round(head.idle_s(now), 1),
        }

    # what the peer calls

    async def run(self) -> None:
        """Serve the stage; reports `stage_failed` for any fault and `unloaded` when its memory is back."""
        try:
            with self._scope:
                await self._serve()
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

    def link(self, next_addresses: Sequence[str], epoch: Epoch) -> None:
        """Dial the successor's lanes; `linked` is reported when they are up. A later epoch ends what is left of the
        ring's links."""
        if self._nursery is None or epoch < self._lanes.epoch:
            return
        if epoch > self._lanes.epoch:
            self._end_sessions()
            self._lanes.advance(epoch)
        self._nursery.start_soon(self._lanes.dial, next_addresses, partial(self._linked, epoch))

    def _linked(self, epoch: Epoch) -> None:
        header = {**self._where(), "epoch": list(epoch)}
        self._post(Frame("linked", header, pack_body({"links": self.links})))

    async def serve_lane(self, hello: Hello, channel: Channel) -> None:
        """Take the frames of one incoming lane until it ends; its end is the ring's end."""
        if not self._ready:
            raise ProtocolError(f"ring {self.spec.ring} has no lanes here yet")
        await self._lanes.serve(hello, channel)

    def coordinator_lost(self) -> None:
        """Nobody waits for its replies any more, and a stage that is not ready cannot become so."""
        for request in self._requests:
            self._to_worker.post(Frame("cancel", {"request": request}))
        if not self._ready:
            self.unload()

    def announce(self) -> None:
        """Say what the stage is, to a coordinator that may be new."""
        if self._report:
            report = {**self._report, "links": self._lanes.epoch[1]}
            self._post(Frame("stage_ready", self._where(), pack_body(report)))

    # its life

    async def _serve(self) -> None:
        self.phase = "fetching"
        sliced = await fetch_files(self._context, self.spec, self._store, self._report_progress)
        folder = await trio.to_thread.run_sync(self._store.place, self.spec.model, self.spec.files, sliced)
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
            prefill_chunk=spec.prefill_chunk,
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
            while frames := await worker.pipe.receive():
                self._pulse = True
                self._route_all([frame for frame in frames if frame.kind != "pong"])
        except (LinkBroken, ProtocolError):
            with trio.move_on_after(1):  # killed in the middle of a frame: say so, not that its frame was bad
                await worker.wait()
            if not worker.ended:
                raise
        code = await worker.wait()
        with trio.move_on_after(1):  # a child of its own may hold its stderr open
            await worker.log_over.wait()
        how = f"stage {self.spec.stage}'s worker {self._how_it_ended(code, worker.log)}"
        if code == -signal.SIGKILL and not (self._ready or self._killed_because):
            raise OutOfMemory(
                f"{how}. While a stage loads, that is the kernel where memory ran out. {OutOfMemory.advice}"
            )
        raise StageLost(how)

    def _route_all(self, frames: list[Frame]) -> None:
        """What the worker wrote in one go: its ring frames leave each at once, since a stage waits for them, the texts
        of a step's replies in one write behind them, which wakes the coordinator once; but before what says how the
        stage is, since what ends a stage ends the replies that are still open."""
        if not frames:
            return
        now = self._heard_s = trio.current_time()
        replies: list[Frame] = []
        for frame in frames:
            if frame.kind in REPLY_KINDS:
                self._note_reply(frame, now)
                replies.append(frame)
                continue
            if replies and frame.kind not in OVERTAKES_REPLIES:
                self._post(*replies)
                replies = []
            self._route(frame)
        if replies:
            self._post(*replies)

    def _note_reply(self, frame: Frame, now: float) -> None:
        request = frame.header.get("request", "")
        if frame.kind in ("done", "error"):
            self._requests.discard(request)
            self._activity.ended(request, now)
        elif frame.kind == "text":
            self._activity.gave(request, frame.header["n"], now)
        elif frame.kind == "probed":
            self._head_serves = True

    def _route(self, frame: Frame) -> None:
        if frame.kind in RING_KINDS:
            self._lanes.post(frame)
        elif frame.kind == "stats":
            self.gauges = unpack_body(frame.body)
            self._post(Frame("gauges", self._where(), frame.body))
        elif frame.kind == "loading":
            self._report_progress(frame.header["phase"], frame.header["done"], frame.header["total"])
        elif frame.kind == "ready":
            self._become_ready(unpack_body(frame.body))
        elif frame.kind == "broken":
            self._head_gave_up(frame.header.get("message", ""))
        elif frame.kind == "fatal":
            raise from_wire(frame.header["code"], frame.header["message"])
        else:
            raise ProtocolError(f"the worker sent {frame.kind}")

    def _become_ready(self, about: dict[str, Any]) -> None:
        self._ready, self.phase = True, "ready"
        self._lanes.worker = int(about["pid"])
        if self._nursery is not None:
            self._nursery.start_soon(self._watch_pulse)
        listen = self._context.identity.listen
        where = {"address": listen[0], "addresses": list(listen)}
        self._report = {**about, **where}
        self.announce()

    async def _watch_stall(self) -> None:
        while True:
            await trio.sleep(STALL_S / 4)
            if self._busy and trio.current_time() - self._heard_s > STALL_S:
                self._kill(f"it held requests and said nothing of them for {STALL_S:g} s")

    async def _watch_pulse(self) -> None:
        """Counted in questions, not in time: a laptop that slept finds its worker well."""
        missed = 0
        while missed < MISSED_PULSES:
            self._pulse = False
            self._to_worker.post(Frame("ping"))
            await trio.sleep(PULSE_S)
            missed = 0 if self._pulse else missed + 1
        self._kill(f"it had not answered for {MISSED_PULSES * PULSE_S:g} s")

    def _kill(self, why: str) -> None:
        if self.worker is not None:
            self._killed_because = f" ({why})"
            self.worker.kill()

    @property
    def _busy(self) -> bool:
        return bool(self._requests or self.gauges.get("running", 0) or self.gauges.get("queued", 0))

    def _note_opened(self, request: str) -> None:
        if not self._busy:
            self._heard_s = trio.current_time()  # an idle worker's silence is not held against it
        self._requests.add(request)
        self._activity.opened(request, trio.current_time())

    # a ring that broke

    def _lane_broke(self, error: SwarmError) -> None:
        """Tell the coordinator, who has the ring linked anew or ends it, and the head, whose sessions are over."""
        if self._scope.cancel_called:
            return
        _log.info("ring %s: a lane broke: %s", self.spec.ring, error)
        self._ring_broke(f"stage {self.spec.stage} lost its link to a neighbour")
        self._end_sessions()

    def _end_sessions(self) -> None:
        if self.spec.stage == 0 and self._ready and self._head_serves:
            self._head_serves = False
            self._to_worker.post(Frame("broken", {"ring": self.spec.ring, "stage": 0}))

    def _head_gave_up(self, why: str) -> None:
        """Its own decision, or the echo of ours."""
        if self._head_serves:
            self._head_serves = False
            self._ring_broke(why)

    def _ring_broke(self, why: str) -> None:
        """Report to the coordinator that this stage saw the ring fail; also where this node's own loop is late.

        It accuses nobody: the coordinator looks for a cause itself, and no node dies of it. Left unsaid, the ring would
        stay as it is, and carry nothing.
        """
        where = {"ring": self.spec.ring, "epoch": list(self._lanes.epoch), "stage": self.spec.stage}
        self._post(Frame("broken", {**where, "message": why[:MAX_MESSAGE_CHARS]}))

    # reports

    def _report_progress(self, phase: str, done: int, total: int) -> None:
        self.phase = phase
        self._post(Frame("progress", {**self._where(), "phase": phase, "done": done, "total": total}))

    def _where(self) -> dict[str, Any]:
        return {"ring": self.spec.ring, "stage": self.spec.stage}

    def _fail(self, error: SwarmError) -> None:
        _log.warning("stage %s of %s failed: %s", self.spec.stage, self.spec.model, error)
        self._post(Frame("stage_failed", {**self._where(), "code": error.code, "message": error.message}))

    def _how_it_ended(self, code: int, log: Sequence[str]) -> str:
        """For clients of the API. What the worker wrote is for those who may read its log, except why it did not
        load."""
        words = last_words(log) if code > 0 and not self._ready else ""
        said = f"; its last words: {words}" if words else ""
        where = f"GET /api/v1/workers/{self._context.identity.name}/logs has what it wrote"
        return f"{describe_exit(code)}{self._killed_because}{said}; {where}"


def last_words(log: Sequence[str]) -> str:
    """The last line that says why a worker gave up: no gauges, no warning, and no source line that is quoted below one;
    empty where there is none."""
    said = (line for line in reversed(log) if line and not line.startswith((" ", "\t", "[")) and "Warning:" not in line)
    return next(said, "")
