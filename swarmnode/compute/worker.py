"""The stage worker (`swarmnode worker`): one process per loaded stage, frames on stdin and stdout, no trio.

Five threads: this module's reader and writer, on stage 0 one for prompts and one for replies, and the compute loop on
the main thread. The process ends at once when its input closes; the kernel ends it when the node's process dies.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.catalog.layer_kinds import recurrent_layers
from swarmnode.compute.memory_errors import lacks_memory, out_of_memory
from swarmnode.compute.model_config import read_config
from swarmnode.compute.prompt_thread import OpenChat, PromptThread
from swarmnode.compute.ring_loop import RingLoop
from swarmnode.compute.stage_report import StageReport, piece_tokens, report_scripted, report_stage
from swarmnode.compute.step_costs import read_costs
from swarmnode.compute.text_thread import TextThread
from swarmnode.compute.worker_spec import WorkerSpec
from swarmnode.errors import MAX_MESSAGE_CHARS, InternalError, LinkBroken, ProtocolError, SwarmError
from swarmnode.ring.head import Head
from swarmnode.ring.head_config import HeadConfig
from swarmnode.ring.head_messages import Cancel, RingBroken, RingMeasured, StartProbe
from swarmnode.ring.messages import Envelope
from swarmnode.ring.parking import MAX_PARKED
from swarmnode.ring.stage import Stage
from swarmnode.wire.blocking import FrameReader, SharedWriter
from swarmnode.wire.bodies import pack_body, unpack_body
from swarmnode.wire.deadlines import WORKER_EXIT_S
from swarmnode.wire.frames import Frame
from swarmnode.wire.ring_codec import from_frame, to_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from swarmnode.compute.text import TextPipeline
    from swarmnode.ring.work import Engine

PR_SET_PDEATHSIG = 1
EXIT_INPUT_CLOSED = 0
EXIT_FAILED = 70
"""EX_SOFTWARE: the load failed or the loop met a bug; the `fatal` frame says which."""


def main(parent_pid: int) -> None:
    """Run the worker on this process's stdin and stdout until its input closes; never returns."""
    die_with_parent(parent_pid)
    worker = Worker(*claim_pipes())
    try:
        worker.run()
    except SwarmError as error:
        worker.say_last(Frame("fatal", {"code": error.code, "message": error.message}))
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        told = InternalError(f"{type(error).__name__}: {error}")
        worker.say_last(Frame("fatal", {"code": told.code, "message": told.message}))
    sys.stderr.flush()
    os._exit(EXIT_FAILED)


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when the node dies, and check that it has not died already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(EXIT_INPUT_CLOSED)


def claim_pipes() -> tuple[FrameReader, SharedWriter]:
    """Take stdin and stdout for frames and point fd 1 at fd 2, so that a library's print cannot corrupt them."""
    frames_in, frames_out = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return FrameReader(frames_in), SharedWriter(frames_out)


class Worker:
    """Loads one stage as the `init` frame says, then serves it; see the module docstring."""

    def __init__(self, reader: FrameReader, writer: SharedWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._route: Callable[[Frame], None] = _refuse_early
        self._writing = start_thread("writer", self._write)

    def run(self) -> None:
        spec = self._read_spec()
        start_thread("reader", self._read)
        machine = make_machine(spec)
        stage = _load_or_say_why(spec, self._report_loading)
        about = {**stage.report.as_map(), "pid": os.getpid()}
        text: TextThread | None = None
        prompts: PromptThread | None = None
        loop = RingLoop(
            machine,
            stage.engine,
            send=lambda envelope: self._post(_envelope_frame(envelope)),
            drain_events=lambda: _hand_over(machine, text, self._post),
            stage=spec.stage,
            report=lambda gauges: self._post(Frame("stats", {}, pack_body({**gauges, **stage.card_gauges()}))),
        )
        if stage.pipeline is not None:
            text = TextThread(spec.ring_id, stage.pipeline, loop.inbox.put, self._post)
            limit = max(1, spec.max_in_flight + spec.max_waiting)
            prompts = PromptThread(stage.pipeline, loop.inbox.put, text.inbox.put, self._post, limit)
            start_thread("text", text.run)
            start_thread("prompts", prompts.run)
        self._route = FrameRouter(loop, prompts, spec.num_stages).route
        self._post(Frame("ready", {}, pack_body(about)))
        loop.run()

    def say_last(self, frame: Frame) -> None:
        """Send `frame` behind everything queued and wait until it is written."""
        self._post(frame)
        self._writer.close()
        self._writing.join(timeout=WORKER_EXIT_S)

    def _read_spec(self) -> WorkerSpec:
        frame = self._reader.read()
        if frame is None:
            os._exit(EXIT_INPUT_CLOSED)
        if frame.kind != "init":
            raise ProtocolError(f"a worker's first frame must be init, not {frame.kind}")
        return WorkerSpec.from_map(unpack_body(frame.body))

    def _read(self) -> None:
        """The reader thread: the end of input ends the process, whatever the other threads are doing."""
        while (frame := self._reader.read()) is not None and frame.kind != "shutdown":
            if frame.kind == "ping":
                self._post(Frame("pong"))  # from this thread: a long forward is no reason to be taken for dead
            else:
                self._route(frame)
        os._exit(EXIT_INPUT_CLOSED)

    def _write(self) -> None:
        """The writer thread: what the pipe does not take at once."""
        try:
            self._writer.run()
        except LinkBroken:
            os._exit(EXIT_INPUT_CLOSED)

    def _post(self, *frames: Frame) -> None:
        try:
            self._writer.post(*frames)
        except LinkBroken:
            os._exit(EXIT_INPUT_CLOSED)

    def _report_loading(self, phase: str, done: int, total: int) -> None:
        self._post(Frame("loading", {"phase": phase, "done": done, "total": total}))


def start_thread(name: str, run: Callable[[], None]) -> threading.Thread:
    """Start one of the worker's threads. Without any of them the stage would live on and answer nobody, so whatever
    `run` raises ends the process: the node sees the exit, and the log's last line is the reason."""

    def guarded() -> None:
        try:
            run()
        except BaseException:
            traceback.print_exc(file=sys.stderr)
            sys.stderr.flush()
            os._exit(EXIT_FAILED)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread


class FrameRouter:
    """Turns the node's frames into inputs of the loop and the prompt thread; runs on the reader thread."""

    def __init__(self, loop: RingLoop, prompts: PromptThread | None, stages: int) -> None:
        self._loop = loop
        self._prompts = prompts
        self._stages = stages
        self._nonces = itertools.count(1)

    def route(self, frame: Frame) -> None:
        match frame.kind:
            case "open":
                self._prompt_thread(frame).put(OpenChat(frame.header["request"], unpack_body(frame.body)))
            case "cancel":
                # to the loop at once, and behind an `open` that is still being tokenized
                cancel = Cancel(frame.header["request"])
                self._loop.inbox.put(cancel)
                self._prompt_thread(frame).put(cancel)
            case "probe_ring":
                self._loop.inbox.put(read_measured(unpack_body(frame.body), self._stages))
                self._loop.inbox.put(StartProbe(next(self._nonces)))
            case _:
                self._loop.inbox.put(Envelope(frame.header.get("lane", ""), from_frame(frame)))

    def _prompt_thread(self, frame: Frame) -> PromptThread:
        if self._prompts is None:
            raise ProtocolError(f"{frame.kind} reached a stage that is not stage 0")
        return self._prompts


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """A stage's engine, on stage 0 its text side, and what the stage measured of itself."""

    engine: Engine
    pipeline: TextPipeline | None
    report: StageReport
    card_gauges: Callable[[], Mapping[str, int]] = dict
    """What the process holds of a card now, and what is free there."""


def load(spec: WorkerSpec, report: Callable[[str, int, int], None]) -> LoadedStage:
    """Load the stage's weights (or script) and, on stage 0, the tokenizer; heavy imports happen here."""
    folder = Path(spec.folder)
    pipeline = None
    if spec.stage == 0:
        from swarmnode.compute.text import TextPipeline

        report("tokenizer", 0, 1)
        pipeline = TextPipeline(folder / "tokenizer")
    if spec.scripted:
        from swarmnode.compute.scripted import load_scripted

        script = load_scripted(spec.stage_spec())
        return LoadedStage(script, pipeline, report_scripted(spec, script))
    from swarmnode.compute.device import stage_gauges
    from swarmnode.compute.loader import load_stage

    begun_s = time.monotonic()
    engine = load_stage(spec.stage_spec(), report)
    about = report_stage(spec, engine, time.monotonic() - begun_s, report)
    return LoadedStage(engine, pipeline, about, partial(stage_gauges, engine.model.device))


def _load_or_say_why(spec: WorkerSpec, report: Callable[[str, int, int], None]) -> LoadedStage:
    try:
        return load(spec, report)
    except Exception as error:
        if lacks_memory(error):
            raise out_of_memory(spec.stage, error) from error
        raise


def make_machine(spec: WorkerSpec) -> Head | Stage:
    """The ring machine of this stage."""
    if spec.stage > 0:
        return Stage(spec.stage, spec.num_stages)
    recurrent = not spec.scripted and bool(recurrent_layers(read_config(Path(spec.folder))))
    return Head(
        HeadConfig(
            num_stages=spec.num_stages,
            context_tokens=spec.context_tokens,
            kv_tokens=spec.kv_tokens,
            max_in_flight=spec.max_in_flight,
            max_waiting=spec.max_waiting,
            eos_token_ids=frozenset(spec.eos_token_ids),
            prefill_chunk=piece_tokens(spec),
            max_group=spec.max_group,
            schedule=spec.schedule,
            typical_tokens=spec.typical_tokens,
            exact_prefix=recurrent,
            max_parked=spec.max_in_flight if recurrent else MAX_PARKED,
        )
    )


def read_measured(body: Mapping[str, Any], stages: int) -> RingMeasured:
    """What the coordinator collected of all stages, from the body of `probe_ring`; raises ProtocolError."""
    kv_tokens, costs = body.get("kv_tokens"), body.get("costs")
    if type(kv_tokens) is not int or kv_tokens < 0 or not isinstance(costs, list) or len(costs) != stages:
        raise ProtocolError(
            f"probe_ring: kv_tokens={kv_tokens!r:.80} and costs={costs!r:.80} are not those of {stages} stages"
        )
    max_group = body.get("max_group", 0)
    if type(max_group) is not int or max_group < 0:
        raise ProtocolError(f"probe_ring: max_group={max_group!r:.80} is no number of rows")
    return RingMeasured(kv_tokens, tuple(None if entry is None else read_costs(entry) for entry in costs), max_group)


def _hand_over(machine: Head | Stage, text: TextThread | None, post: Callable[[Frame], None]) -> None:
    """Pass the head's events to the text thread, and a ring given up to the node; a later stage has no events."""
    if isinstance(machine, Head) and text is not None:
        for event in machine.events():
            if isinstance(event, RingBroken):
                post(Frame("broken", {"stage": 0, "message": event.why[:MAX_MESSAGE_CHARS]}))
            else:
                text.inbox.put(event)


def _envelope_frame(envelope: Envelope) -> Frame:
    frame = to_frame(envelope.message)
    return Frame(frame.kind, frame.header | {"lane": envelope.lane}, frame.body)


def _refuse_early(frame: Frame) -> None:
    raise ProtocolError(f"{frame.kind} came before the stage was ready")
