"""The worker's loop around the real machines, in a real thread: what is decided is sent, without waiting for more."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING

import pytest
from ring_world import EOS, GREEDY, WatchedEngine, head_config, stage_spec

from swarmnode.compute import step_stats
from swarmnode.compute.ring_loop import STATS_INTERVAL_S, RingLoop
from swarmnode.compute.script import Script
from swarmnode.ids import RequestId, SessionId
from swarmnode.ring.head import Head
from swarmnode.ring.head_messages import Cancel, Finished, HeadEvent, Open, Sampled
from swarmnode.ring.messages import Envelope, Failed, Group, Row
from swarmnode.ring.stage import Stage
from swarmnode.ring.work import Activation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from swarmnode.ring.head_messages import HeadInput
    from swarmnode.ring.work import Work, WorkResult

PATIENCE_S = 10.0
"""For a thread to do what takes microseconds."""


class RunningLoop:
    def __init__(self, machine: Head | Stage, engine: WatchedEngine) -> None:
        self.sent: SimpleQueue[Envelope] = SimpleQueue()
        self.events: SimpleQueue[HeadEvent] = SimpleQueue()
        self.gauges: SimpleQueue[Mapping[str, int]] = SimpleQueue()
        self._machine = machine
        self.loop = RingLoop(
            machine, engine, send=self.sent.put, drain_events=self._take_events, report=self.gauges.put
        )
        self._thread = threading.Thread(target=self.loop.run)

    def __enter__(self) -> RunningLoop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.close()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _take_events(self) -> None:
        if isinstance(self._machine, Head):
            for event in self._machine.events():
                self.events.put(event)


@pytest.fixture
def stage() -> Iterator[RunningLoop]:
    with RunningLoop(Stage(1, 2), WatchedEngine(Script(), stage_spec(1, 2))) as running:
        yield running


@pytest.fixture
def head() -> Iterator[RunningLoop]:
    script = Script(default=(5, 6))
    with RunningLoop(Head(head_config(1)), WatchedEngine(script, stage_spec(0, 1))) as running:
        yield running


def events_to_the_end(running: RunningLoop) -> list[HeadEvent]:
    events = [running.events.get(timeout=PATIENCE_S)]
    while not isinstance(events[-1], Finished):
        events.append(running.events.get(timeout=PATIENCE_S))
    return events


def test_a_frame_that_is_refused_is_answered_though_nothing_else_comes(stage: RunningLoop) -> None:
    group = Group((Row(SessionId(3), 0, 9),), Activation("float32", (1, 8), bytes(32)))
    stage.loop.inbox.put(Envelope("act", group))
    answer = stage.sent.get(timeout=PATIENCE_S)
    assert isinstance(answer.message, Failed)
    assert (answer.lane, answer.message.session, answer.message.code) == ("tok", 3, "cache_gap")


def test_a_chat_runs_to_its_end_and_the_last_gauges_are_zero(head: RunningLoop) -> None:
    head.loop.inbox.put(Open(RequestId("q"), (1, 2, 3), 9, GREEDY))
    events = events_to_the_end(head)
    assert [e.token for e in events if isinstance(e, Sampled)] == [5, 6, EOS]
    while (gauges := head.gauges.get(timeout=PATIENCE_S))["kv_reserved_tokens"]:
        pass
    assert (gauges["running"], gauges["kv_tokens"], gauges["kv_bytes"]) == (0, 0, 0)


def test_a_cancel_is_taken_between_two_steps(head: RunningLoop) -> None:
    head.loop.inbox.put(Open(RequestId("q"), (1, 2, 3), 4000, GREEDY))
    head.loop.inbox.put(Cancel(RequestId("q")))
    assert isinstance(events_to_the_end(head)[-1], Finished)


def test_gauges_of_a_long_reply_come_at_intervals_and_not_with_every_token() -> None:
    script = Script(default=(5,) * 400)
    with RunningLoop(Head(head_config(1)), WatchedEngine(script, stage_spec(0, 1))) as head:
        began_s = time.monotonic()
        head.loop.inbox.put(Open(RequestId("q"), (1, 2, 3), 400, GREEDY))
        tokens = sum(isinstance(event, Sampled) for event in events_to_the_end(head))
        intervals = (time.monotonic() - began_s) / STATS_INTERVAL_S
    assert tokens == 400
    assert head.gauges.qsize() <= 3 + intervals, "the first, one an interval, the last"


def test_gauges_that_were_held_back_come_though_nothing_else_happens(stage: RunningLoop) -> None:
    for session in (3, 4):
        group = Group((Row(SessionId(session), 0, 0),), Activation("float32", (1, 8), bytes(32)))
        stage.loop.inbox.put(Envelope("act", group))
    while stage.gauges.get(timeout=PATIENCE_S)["sessions"] < 2:
        pass


def test_t6_the_loop_tells_its_steps_and_its_waiting(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step_stats, "TRAFFIC_S", 0.0)
    head, engine = Head(head_config(1)), WatchedEngine(Script(default=(9,), then="repeat"), stage_spec(0, 1))
    with RunningLoop(head, engine) as running:
        time.sleep(0.05)  # idle: what `wait_ms` has to tell
        running.loop.inbox.put(Open(RequestId("a"), (1,), 2, GREEDY))
        while not isinstance(running.events.get(timeout=PATIENCE_S), Finished):
            pass
    (line,) = [line for line in capfd.readouterr().err.splitlines() if " stats " in line]
    told = dict(part.split("=") for part in line.split("] ")[1].split())
    assert told["batch_size"] == "1.00"
    assert float(told["wait_ms"]) >= 40, "all of the 50 but for the moment in which the loop begins"


class _HeldUp(WatchedEngine):
    """Its first piece takes until it is let go."""

    def __init__(self) -> None:
        super().__init__(Script(default=(5, 6)), stage_spec(0, 1))
        self.begun, self.let_go = threading.Event(), threading.Event()

    def run(self, work: Work) -> WorkResult:
        result = super().run(work)
        if len(self.works) == 1:
            self.begun.set()
            assert self.let_go.wait(PATIENCE_S)
        return result


def test_inputs_are_taken_while_a_piece_is_computed_and_caches_go_behind_it() -> None:
    engine = _HeldUp()
    with RunningLoop(Head(head_config(1)), engine) as head:
        head.loop.inbox.put(Open(RequestId("q"), (1, 2, 3), 9, GREEDY))
        assert engine.begun.wait(PATIENCE_S)
        head.loop.inbox.put(Cancel(RequestId("q")))
        assert isinstance(events_to_the_end(head)[-1], Finished), "while the piece is still under way"
        assert engine.caches, "it is at work on that session's"
        engine.let_go.set()
        head.loop.inbox.put(Open(RequestId("r"), (1, 2, 3), 1, GREEDY))
        events_to_the_end(head)
    assert not engine.caches


@pytest.mark.parametrize("when", ["beside", "behind"])
def test_the_loop_ends_with_its_piece(when: str) -> None:
    engine = _HeldUp()
    with RunningLoop(Head(head_config(1)), engine) as head:
        head.loop.inbox.put(Open(RequestId("q"), (1, 2, 3), 9, GREEDY))
        assert engine.begun.wait(PATIENCE_S)
        if when == "beside":
            head.loop.close()
        engine.let_go.set()


class _FailsAt(Head):
    """Whatever `error` is, an input of request "r" raises it."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(head_config(1))
        self._error = error

    def receive(self, message: HeadInput, now: float) -> None:
        if isinstance(message, Open) and message.request == "r":
            raise self._error
        super().receive(message, now)


@pytest.mark.parametrize("error", [TypeError("none"), SystemExit(0), KeyboardInterrupt()], ids=repr)
def test_a_machine_that_fails_beside_a_piece_ends_the_loop(error: BaseException) -> None:
    engine = _HeldUp()
    running = RunningLoop(_FailsAt(error), engine)
    failed: SimpleQueue[BaseException] = SimpleQueue()

    def serve() -> None:
        try:
            running.loop.run()
        except BaseException as raised:
            failed.put(raised)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    running.loop.inbox.put(Open(RequestId("q"), (1, 2, 3), 9, GREEDY))
    assert engine.begun.wait(PATIENCE_S)
    running.loop.inbox.put(Open(RequestId("r"), (1, 2, 3), 9, GREEDY))
    engine.let_go.set()
    assert failed.get(timeout=PATIENCE_S) is error
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
