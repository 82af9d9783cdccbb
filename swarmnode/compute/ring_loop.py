"""Joins a ring machine to an engine: the worker's one compute loop, which never waits for text or sockets.

A decode step is short: what arrives meanwhile waits for its end. A prompt piece is not, and a token that comes back
to stage 0 during one belongs to a user who waits for it. So a second thread takes inputs while a piece is computed, and
only then: the machine is never used by both at once, and steps pay nothing for it.
"""

from __future__ import annotations

import sys
import time
import traceback
from dataclasses import replace
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol

from swarmnode.compute.step_stats import StepStats
from swarmnode.errors import SwarmError
from swarmnode.ring.work import Activation, Failure, GroupWork, PieceWork, WorkResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from swarmnode.ids import SessionId
    from swarmnode.ring.messages import Envelope
    from swarmnode.ring.work import Engine, Work

STATS_INTERVAL_S = 1.0
"""Gauges are sent at most this often while sessions are held, as often as beats: those of a lone reply change with
every token, and each report wakes as many processes as the token does. A worker without sessions sends its last ones
at once."""


class RingMachine(Protocol):
    """What the loop needs of a head or a later stage; `receive` takes what the machine's own input type says."""

    def receive(self, message: Any, now: float, /) -> None: ...
    def handle_timer(self, now: float) -> None: ...
    def next_timer(self) -> float | None: ...
    def next_work(self, now: float) -> Work | None: ...
    def complete(self, work: Work, result: WorkResult, now: float) -> None: ...
    def outgoing(self) -> list[Envelope]: ...
    def freed(self) -> list[SessionId]: ...
    def snapshot(self) -> Mapping[str, int]: ...


class Inbox:
    """Inputs in order, each with the moment it arrived: waiting behind a forward is not the link's time."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[float, object]] = SimpleQueue()

    def put(self, message: object) -> None:
        """Callable from any thread."""
        self._queue.put((time.monotonic(), message))

    def get(self, timeout: float | None) -> tuple[float, object]:
        """The next input; raises Empty after `timeout` seconds (None: waits for ever)."""
        return self._queue.get(timeout=timeout)

    def get_nowait(self) -> tuple[float, object]:
        return self._queue.get_nowait()


_COMPUTED = object()
"""In the inbox: the piece is computed, and the inputs are the loop's again."""


class RingLoop:
    """Feeds the machine from `inbox`, runs its work, and hands out what it wants sent.

    `send` takes an envelope, `drain_events` is called after every input (the head's events go to the text thread),
    `report` takes the gauges. All three are called on one of the loop's threads at a time and must not block.
    """

    def __init__(
        self,
        machine: RingMachine,
        engine: Engine,
        *,
        send: Callable[[Envelope], None],
        drain_events: Callable[[], None],
        report: Callable[[Mapping[str, int]], None],
        stage: int = 0,
    ) -> None:
        self.inbox = Inbox()
        self._machine = machine
        self._engine = engine
        self._send = send
        self._drain_events = drain_events
        self._report = report
        self._stats = StepStats(stage)
        self._reported: Mapping[str, int] = {}
        self._reported_s = 0.0
        self._owes_report = False
        self._pieces: SimpleQueue[bool] = SimpleQueue()
        """To the thread beside: a piece begins (True), or the loop has ended."""
        self._heard: SimpleQueue[bool | BaseException] = SimpleQueue()
        """From it, when the piece is computed: whether the loop goes on, or what went wrong with an input."""

    def close(self) -> None:
        """End `run` after the work in hand; callable from any thread."""
        self.inbox.put(None)

    def run(self) -> None:
        """Serve until `close`."""
        Thread(target=self._listen, name="beside-pieces", daemon=True).start()
        try:
            self._serve()
        finally:
            self._pieces.put(False)

    def _serve(self) -> None:
        while True:
            work = self._machine.next_work(time.monotonic())
            self._flush()  # a frame that was refused instead of run has freed a session and sent its failure
            if work is None:
                self._report_gauges()
                idle_s = time.monotonic()
                if not self._take_inputs(wait=True):
                    return
                self._stats.waited(time.monotonic() - idle_s)
                continue
            result, goes_on = self._run(work)
            self._log_stats(work, result)
            self._machine.complete(work, result, time.monotonic())
            self._flush()
            if time.monotonic() - self._reported_s >= STATS_INTERVAL_S:
                self._report_gauges()
            if not goes_on or not self._take_inputs(wait=False):
                return

    def _run(self, work: Work) -> tuple[WorkResult, bool]:
        """The forward, and whether the loop is to go on after it."""
        if not isinstance(work, PieceWork):
            return run_work(self._engine, work), True
        self._pieces.put(True)
        try:
            result = run_work(self._engine, work)
        finally:
            self.inbox.put(_COMPUTED)
        heard = self._heard.get()
        if isinstance(heard, BaseException):
            raise heard
        return result, heard

    def _listen(self) -> None:
        """The thread beside: from a piece's beginning to its end the inputs are its own."""
        while self._pieces.get():
            try:
                self._heard.put(self._take_until_computed())
            except BaseException as error:  # the loop raises it: it would wait for this thread for ever
                self._heard.put(error)

    def _take_until_computed(self) -> bool:
        """Returns whether the loop is to go on. What is freed meanwhile waits: the engine is at work."""
        goes_on = True
        while (entry := self.inbox.get(None))[1] is not _COMPUTED:
            arrived_s, message = entry
            if message is None:
                goes_on = False
                continue
            self._machine.receive(message, arrived_s)
            self._hand_out()
        return goes_on

    def _log_stats(self, work: Work, result: WorkResult) -> None:
        line = self._stats.ran(len(work.rows) if isinstance(work, GroupWork) else 0, result.compute_ms)
        if line is not None:
            print(line, file=sys.stderr, flush=True)

    def _take_inputs(self, *, wait: bool) -> bool:
        """Hand everything queued to the machine; with `wait`, block for the first input or the machine's timer."""
        try:
            arrived_s, message = self.inbox.get(self._patience_s()) if wait else self.inbox.get_nowait()
            while message is not None:
                self._machine.receive(message, arrived_s)
                arrived_s, message = self.inbox.get_nowait()
            return False
        except Empty:
            self._machine.handle_timer(time.monotonic())
            self._flush()
            return True

    def _patience_s(self) -> float | None:
        report_s = self._reported_s + STATS_INTERVAL_S if self._owes_report else None
        due_s = [moment_s for moment_s in (self._machine.next_timer(), report_s) if moment_s is not None]
        return max(0.0, min(due_s) - time.monotonic()) if due_s else None

    def _flush(self) -> None:
        for session in self._machine.freed():
            self._engine.free(session)
        self._hand_out()

    def _hand_out(self) -> None:
        for envelope in self._machine.outgoing():
            self._send(envelope)
        self._drain_events()

    def _report_gauges(self) -> None:
        now, counts = time.monotonic(), self._machine.snapshot()
        self._owes_report = counts["sessions"] > 0 and now - self._reported_s < STATS_INTERVAL_S
        if self._owes_report:
            return
        gauges = {**counts, "kv_tokens": self._engine.kv_tokens(), "kv_bytes": self._engine.kv_bytes()}
        if gauges != self._reported:
            self._reported, self._reported_s = gauges, now
            self._report(gauges)


def run_work(engine: Engine, work: Work) -> WorkResult:
    """Run `work` and time it; a group whose forward fails runs row by row: only those end that fail alone."""
    started_s = time.perf_counter()
    try:
        result = engine.run(work)
    except Exception as error:  # whatever a forward raises belongs to its sessions, not to the worker
        traceback.print_exc(file=sys.stderr)
        result = _run_singly(engine, work, error)
    return replace(result, compute_ms=(time.perf_counter() - started_s) * 1e3)


def _run_singly(engine: Engine, work: Work, error: Exception) -> WorkResult:
    if not isinstance(work, GroupWork):
        return WorkResult(failed={work.session: _failure(error)})
    if len(work.rows) == 1:
        return WorkResult(failed={work.rows[0].session: _failure(error)})
    results = [run_work(engine, _single(work, index)) for index in range(len(work.rows))]
    failed = {session: failure for result in results for session, failure in result.failed.items()}
    return WorkResult(
        hidden=_stack([r.hidden for r in results if r.hidden is not None]),
        tokens=tuple(token for r in results for token in r.tokens),
        failed=failed,
    )


def _single(work: GroupWork, index: int) -> GroupWork:
    hidden = None if work.hidden is None else work.hidden.take_rows([index])
    return GroupWork((work.rows[index],), hidden)


def _stack(parts: Sequence[Activation]) -> Activation | None:
    if not parts:
        return None
    shape = (len(parts), *parts[0].shape[1:])
    return Activation(parts[0].dtype, shape, b"".join(bytes(p.data) for p in parts))


def _failure(error: Exception) -> Failure:
    if isinstance(error, SwarmError):
        return Failure(error.code, error.message)
    return Failure("stage_failed", f"{type(error).__name__}: {error}")
