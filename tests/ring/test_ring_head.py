"""The head alone: moments that a whole ring reaches only by luck."""

from __future__ import annotations

import pytest
from ring_world import GREEDY, head_config

from sims.source_transport import OneGroup
from swarmnode.ids import RequestId, SessionId
from swarmnode.ring.cost_model import CostModel
from swarmnode.ring.head import Head
from swarmnode.ring.head_messages import Finished, Open, Refused
from swarmnode.ring.kv_budget import KvBudget
from swarmnode.ring.messages import Broken, Envelope, PieceDone, Row, Tokens
from swarmnode.ring.progress import SLACK
from swarmnode.ring.work import Activation, GroupWork, WorkResult


def rows_of(count: int) -> WorkResult:
    return WorkResult(hidden=Activation("float32", (count, 1), bytes(4 * count)))


HIDDEN = rows_of(4)


def opened(num_stages: int, *lengths: int, new: int = 4) -> Head:
    head = Head(head_config(num_stages))
    for index, length in enumerate(lengths):
        head.receive(Open(RequestId(f"r{index}"), (1,) * length, new, GREEDY), 0.0)
    return head


def test_waiting_for_its_turn_at_stage_0_is_no_stages_silence() -> None:
    """Eight prompts, ten seconds each: none is stalled, and the wait of the last is not learned as a step's time."""
    head, now = opened(1, *[1] * 8, new=1), 0.0
    while (work := head.next_work(now)) is not None:
        head.handle_timer(now)
        now += 10
        head.complete(work, WorkResult(tokens=(9,)), now)
    assert now == 80
    assert not [event for event in head.events() if isinstance(event, Refused)]
    assert head.progress.limit_s(pieces_in_flight=False) == SLACK * 10


def test_a_pieces_answer_counts_once() -> None:
    head = opened(2, 40)
    for _ in range(2):
        work = head.next_work(0.0)
        assert work is not None
        head.complete(work, HIDDEN, 0.0)
    for _ in range(3):
        head.receive(Envelope("tok", PieceDone(SessionId(1), 0, 0, 4)), 1.0)
    assert head.next_work(1.0) is not None
    assert head.next_work(1.0) is None


def test_r8_what_a_step_waited_for_at_later_stages_is_queue_and_not_link() -> None:
    """200 ms from its beginning to its token, of which 150 were compute and 30 a queue."""
    head = opened(2, 1, new=2)
    piece = head.next_work(0.0)
    assert piece is not None
    head.complete(piece, rows_of(1), 0.0)
    head.receive(Envelope("tok", PieceDone(SessionId(1), 0, 0, 1, 9)), 0.5)
    step = head.next_work(0.5)
    assert step is not None
    head.complete(step, rows_of(1), 0.6)
    row = Row(SessionId(1), 0, 1)
    head.receive(Envelope("tok", Tokens((row,), (9,), (100.0, 50.0), queue_ms=30.0)), 0.7)
    (finished,) = [event for event in head.events() if isinstance(event, Finished)]
    told = {name: finished.timing[f"{name}_ms"] for name in ("stage0", "stage1", "link", "queue")}
    assert told == pytest.approx({"stage0": 100, "stage1": 50, "link": 20, "queue": 30})


@pytest.mark.parametrize(("came_back", "steps_learned"), [((1, 2), 1), ((2,), 0)])
def test_a_group_of_which_a_stage_left_rows_out_teaches_no_costs(
    came_back: tuple[int, ...], steps_learned: int
) -> None:
    """Stage 0 has computed both rows: that is no time of a group of one."""
    config = head_config(2)
    head = Head(config, OneGroup(config, CostModel(2)))
    for request in ("a", "b"):
        head.receive(Open(RequestId(request), (1,), 4, GREEDY), 0.0)
    for _ in range(2):
        piece = head.next_work(0.0)
        assert piece is not None
        head.complete(piece, rows_of(1), 0.0)
    for session in (1, 2):
        head.receive(Envelope("tok", PieceDone(SessionId(session), 0, 0, 1, 9)), 0.0)
    group = head.next_work(1.0)
    assert isinstance(group, GroupWork)
    assert len(group.rows) == 2
    head.complete(group, rows_of(2), 1.1)
    rows = tuple(Row(SessionId(session), 0, 1) for session in came_back)
    head.receive(Envelope("tok", Tokens(rows, (9,) * len(rows), (100.0, 50.0))), 1.2)
    assert head.costs.steps == steps_learned


def test_nothing_is_sent_after_the_ring_broke() -> None:
    head = opened(2, 12)
    work = head.next_work(0.0)
    assert work is not None
    head.complete(work, HIDDEN, 0.0)
    head.receive(Envelope("tok", Broken(1)), 0.0)
    assert head.outgoing() == []
    assert head.next_work(0.0) is None
    assert head.freed() == [SessionId(1)]


def test_the_budget_gives_its_last_token_and_no_more() -> None:
    budget = KvBudget(10)
    assert budget.reserve(SessionId(1), 10)
    assert not budget.reserve(SessionId(2), 1)
    assert not budget.reserve(SessionId(1), 11)
    assert (budget.held_by(SessionId(1)), budget.free_tokens) == (10, 0)
