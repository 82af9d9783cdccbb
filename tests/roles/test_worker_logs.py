"""The tails of workers' logs: bounded whatever a worker writes, and only those that were asked for are taken."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from swarmnode.errors import LinkBroken, ProtocolError
from swarmnode.ids import NodeId
from swarmnode.roles.reports import MAX_REPORT_BYTES, LogTails, read_report
from swarmnode.roles.worker_logs import KeptLogs, LogAsks
from swarmnode.wire.bodies import pack_body
from swarmnode.wire.frames import Frame

DEN, ATTIC = NodeId("den"), NodeId("attic")
ASK = Frame("logs", {"ask": "a1"})


def host(ring: str, *lines: str, worker: bool = True) -> Any:
    """A stage host as far as its log goes."""
    spec = SimpleNamespace(ring=ring, model="m", stage=0)
    process = SimpleNamespace(pid=7, log=deque(lines, maxlen=200)) if worker else None
    return SimpleNamespace(spec=spec, phase="ready", worker=process)


def test_the_newest_lines_of_each_worker_come_in_order_and_cannot_move_the_cursor() -> None:
    answer = KeptLogs().answer(ASK, [host("r1", "first", "second \x1b[2J蜂"), host("r2", worker=False)])
    one, other = read_report(LogTails, answer).workers
    assert answer.header == {"ask": "a1"}
    assert (one.ring, one.stage, one.pid, one.lines) == ("r1", 0, 7, ["first", "second ?[2J\\u8702"])
    assert (other.pid, other.lines) == (None, [])


@pytest.mark.parametrize("line", ["x" * 2000, "🐝" * 2000, "\x00" * 2000, "y", ""])
def test_whatever_they_wrote_fits_into_a_report(line: str) -> None:
    hosts = [host(f"r{number}", *[line] * 200) for number in range(9)]
    kept = KeptLogs()
    for ended in hosts[:3]:
        kept.note_ended(ended)
    answer = kept.answer(ASK, hosts)
    assert len(answer.body) <= MAX_REPORT_BYTES
    assert [tail.ring for tail in read_report(LogTails, answer).workers] == ["r5", "r6", "r7", "r8"]


def test_workers_that_ended_can_still_be_asked_about() -> None:
    kept = KeptLogs()
    for ended in (host("r1", "a"), host("r2", "b"), host("r3", "c"), host("never started", worker=False)):
        kept.note_ended(ended)
    tails = read_report(LogTails, kept.answer(ASK, [])).workers
    assert [(tail.ring, tail.lines) for tail in tails] == [("r2", ["b"]), ("r3", ["c"])]


def answer_to(ask: Frame, *lines: str) -> Frame:
    tail = {"ring": "r", "model": "m", "stage": 0, "phase": "ready", "lines": list(lines)}
    return Frame("logs_tail", {"ask": ask.header["ask"]}, pack_body({"workers": [tail]}))


async def test_an_answer_reaches_who_asked(autojump_clock: object) -> None:
    asks = LogAsks(lambda node, frame: asks.take(node, answer_to(frame, "from " + node)))
    [tail] = await asks.ask(DEN)
    assert (tail["lines"], tail["pid"]) == (["from den"], None)


async def test_a_node_that_does_not_answer_and_one_that_answers_for_another(autojump_clock: object) -> None:
    posted: list[Frame] = []
    asks = LogAsks(lambda _, frame: posted.append(frame))

    async def lie() -> None:
        await trio.sleep(1)
        asks.take(ATTIC, answer_to(posted[0], "not theirs to say"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(lie)
        with pytest.raises(LinkBroken, match="did not answer within 5 s"):
            await asks.ask(DEN)
    asks.take(DEN, answer_to(posted[0], "too late"))


async def test_an_answer_twice_or_beyond_its_bounds_breaks_the_link(autojump_clock: object) -> None:
    found: list[Exception] = []

    def post(node: NodeId, frame: Frame) -> None:
        asks.take(node, answer_to(frame, "once"))
        for wrong in (answer_to(frame, "twice"), answer_to(frame, *["x"] * 201)):
            with pytest.raises(ProtocolError) as error:
                asks.take(node, wrong)
            found.append(error.value)

    asks = LogAsks(post)
    await asks.ask(DEN)
    assert len(found) == 2
