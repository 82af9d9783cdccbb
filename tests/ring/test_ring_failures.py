"""R5 and DESIGN sections 7 and 10: a session that fails ends alone, a ring that breaks ends everything once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from ring_world import GREEDY, Link, Outcome, Request, RingWorld, head_config, tokens_alone

from swarmnode.compute.script import Reply, Script
from swarmnode.ids import RequestId, SessionId
from swarmnode.ring.head import Head
from swarmnode.ring.head_messages import Finished, Open, Refused, Sampled
from swarmnode.ring.messages import Broken, End, Envelope, Failed, Group, Piece, PieceDone
from swarmnode.ring.progress import END_SLACK, PIECE_FLOOR_S, SLACK, STEP_FLOOR_S, WINDOW, ProgressDeadline
from swarmnode.ring.work import GroupWork, PieceWork, WorkResult

FAILING, GOOD = 77, 88


def script(fail_at: int, layer: int, **changes: float) -> Script:
    failing = Reply(when=(FAILING,), ids=(4,) * 40, fail_at=fail_at, fail_layer=layer)
    good = Reply(when=(GOOD,), ids=tuple(range(100, 130)))
    return Script(replies=(failing, good), default=(9,), then="repeat", decode_ms=5, **changes)


def request(name: str, marker: int, length: int = 5, new: int | None = 25) -> Request:
    return Request(name, (marker, *range(1, length)), new)


def refused(outcome: Outcome) -> Refused:
    assert isinstance(outcome.end, Refused)
    return outcome.end


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("fail_at", [0, 1, 7])
def test_r5_a_failing_session_ends_alone_wherever_it_fails(num_stages: int, fail_at: int) -> None:
    for layer in range(num_stages):
        told = script(fail_at, layer)
        world = RingWorld(head_config(num_stages), told)
        asked = [request("g0", GOOD), request("bad", FAILING), request("g1", GOOD), request("g2", GOOD, 12)]
        outcomes = [world.open(one) for one in asked]
        world.run_until_quiet()
        good = [(o, one) for o, one in zip(outcomes, asked, strict=True) if one.name != "bad"]
        assert [o.tokens for o, _ in good] == [tokens_alone(told, one) for _, one in good]
        assert len(outcomes[1].tokens) == fail_at
        assert refused(outcomes[1]).code == "stage_failed"
        assert f"fails token {fail_at}" in refused(outcomes[1]).message
        assert not world.leftovers()


def test_the_failure_travels_to_the_head_which_ends_the_session_everywhere() -> None:
    world = RingWorld(head_config(4), script(3, 1))
    outcome = world.open(request("bad", FAILING))
    world.run_until_quiet()
    assert refused(outcome).message.startswith("stage 1: ")
    failed = [(stage, e.lane) for _, stage, e in world.sent if isinstance(e.message, Failed)]
    assert failed == [(1, "act"), (2, "act"), (3, "tok")]
    ends = [(stage, e.lane) for _, stage, e in world.sent if isinstance(e.message, End)]
    assert sorted(ends) == [(stage, lane) for stage in (0, 1, 2) for lane in ("act", "pre")]
    assert [engine.caches for engine in world.engines] == [set()] * 4


def test_a_group_that_fails_is_run_again_one_by_one() -> None:
    world = RingWorld(head_config(1), script(4, 0))
    good, bad = world.open(request("good", GOOD)), world.open(request("bad", FAILING))
    world.run_until_quiet()
    sizes = [len(w.rows) for w in world.engines[0].works if isinstance(w, GroupWork)]
    retried = next(i for i, (a, b) in enumerate(pairwise(sizes)) if a == 2 and b == 1)
    assert sizes[retried : retried + 3] == [2, 1, 1]
    assert len(good.tokens) == 25
    assert refused(bad).code == "stage_failed"


def test_a_failing_piece_fails_only_its_prompt_and_later_pieces_are_skipped() -> None:
    """Stage 1 lost the session's cache (position 8 follows nothing): what is behind is dropped, not run."""
    world = RingWorld(head_config(3, prefill_chunk=4), script(0, 1, prefill_ms_per_token=5))
    outcome, other = world.open(request("a", 1, 40)), world.open(request("b", GOOD, 30))
    world.run_until(0.06)
    ran_before = len(world.engines[1].works)
    world.stages[0]._held.pop(SessionId(1))
    world.run_until_quiet()
    assert refused(outcome).code == "cache_gap"
    assert "follows a cache of 0" in refused(outcome).message
    after = [w for w in world.engines[1].works[ran_before:] if isinstance(w, PieceWork)]
    assert SessionId(1) not in {w.session for w in after}
    assert len(other.tokens) == 25
    assert not world.leftovers()


@pytest.mark.parametrize("at_s", [0.0, 0.2, 0.5])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_broken_ends_everything_once_and_nothing_more_is_sent(at_s: float, stage: int) -> None:
    world = RingWorld(head_config(3, max_in_flight=3), script(99, 0, prefill_ms_per_token=5))
    outcomes = [world.open(request(f"r{i}", GOOD, 20)) for i in range(5)]
    world.run_until(at_s)
    world.lose_link(stage)
    world.lose_link(stage)
    told_s = world.now_s + 0.1
    world.run_until_quiet()
    assert all(len(o.ends) == 1 for o in outcomes)
    assert [event.why for event in world.broken] == [f"stage {stage} lost its neighbour"], "said once"
    lost = [refused(o) for o in outcomes if isinstance(o.end, Refused)]
    assert lost
    assert {e.code for e in lost} == {"stage_lost"}
    assert f"stage {stage}" in lost[0].message
    assert not [at for at, by, _ in world.sent if by == 0 and at > told_s]
    assert world.head.admission.budget.used_tokens == 0
    assert world.head.snapshot() | {"kv_budget_tokens": 0} == dict.fromkeys(world.head.snapshot(), 0)
    later = world.open(request("later", GOOD))
    world.run_until_quiet()
    assert refused(later).code == "stage_lost"


def test_a_step_nobody_answers_stalls_at_the_deadline_and_the_end_breaks_the_ring() -> None:
    """A hung stage: the client is told, the reservation is not held for ever, and nobody waits behind it."""
    world = RingWorld(head_config(2, max_in_flight=1), script(99, 0))
    running, waiting = world.open(request("running", GOOD)), world.open(request("waiting", GOOD))
    world.run_until(0.1)
    world.nodes[1].hung = True
    world.run_until_quiet()
    last_token_s = max(at for at, e in running.events if isinstance(e, Sampled))
    stalled_s = running.seconds_of(Refused)
    assert refused(running).code == "stalled"
    assert STEP_FLOOR_S <= stalled_s - last_token_s < STEP_FLOOR_S + 0.1
    assert refused(waiting).code == "stalled"
    assert waiting.seconds_of(Refused) <= stalled_s + END_SLACK * PIECE_FLOOR_S
    assert "did not come round" in world.broken[0].why, "so that the coordinator learns of it without another request"
    assert world.head.admission.budget.used_tokens == 0


def test_before_anything_was_seen_a_first_piece_may_take_a_minute() -> None:
    world = RingWorld(head_config(2), script(99, 0))
    world.lose_link(0, tell_head=False)
    outcome = world.open(request("a", GOOD))
    world.run_until_quiet()
    assert refused(outcome).code == "stalled"
    assert outcome.seconds_of(Refused) == pytest.approx(PIECE_FLOOR_S)
    assert "60 s" in refused(outcome).message


def test_a_slow_ring_is_not_a_stalled_one() -> None:
    """Pieces of 20 s after a short one of 1 s, six prompts in turn, someone decoding meanwhile: nobody is stalled."""
    slow = Script(default=(9,), then="repeat", prefill_ms_per_token=5000, decode_ms=100)
    world = RingWorld(head_config(2, prefill_chunk=4), slow)
    outcomes = [world.open(Request("short", (1,), 200))]
    outcomes += [world.open(Request(f"r{i}", tuple(range(40)), 3), at_s=12.0) for i in range(6)]
    world.run_until_quiet()
    assert [type(o.end) for o in outcomes] == [Finished] * 7


def test_the_deadline_is_the_larger_of_floor_and_four_times_the_longest_seen() -> None:
    deadline = ProgressDeadline()
    assert deadline.limit_s(pieces_in_flight=False) == PIECE_FLOOR_S
    deadline.observe(1.0)
    assert deadline.limit_s(pieces_in_flight=False) == STEP_FLOOR_S
    assert deadline.limit_s(pieces_in_flight=True) == PIECE_FLOOR_S
    deadline.observe(20.0)
    assert deadline.limit_s(pieces_in_flight=False) == deadline.limit_s(pieces_in_flight=True) == SLACK * 20.0
    for _ in range(WINDOW):
        deadline.observe(0.1)
    assert deadline.limit_s(pieces_in_flight=False) == STEP_FLOOR_S


def test_late_and_doubled_answers_change_nothing() -> None:
    """An old generation's answer, a position already taken, a session long ended, an answer nobody asked for."""
    told = script(99, 0)
    world = RingWorld(head_config(2), told, links=[Link(0.02)] * 2)
    asked = request("a", GOOD)
    outcome = world.open(asked)

    seen = 0

    def again(world: RingWorld) -> None:
        nonlocal seen
        for _, stage, envelope in world.sent[seen:]:
            if stage == 1:
                world.inject(0, envelope)
                world.inject(0, envelope)
        seen = len(world.sent)

    world.watch = again
    world.run_until(0.1)
    for message in (PieceDone(SessionId(1), 0, 0, 4, 5), PieceDone(SessionId(9), 0, 0, 4, 5)):
        world.inject(0, Envelope("tok", message))
    world.run_until_quiet()
    assert outcome.tokens == tokens_alone(told, asked)
    assert len(outcome.ends) == 1
    assert not world.leftovers()


def test_an_engine_that_returns_no_hidden_states_is_a_bug_not_a_sessions_fault() -> None:
    head = Head(head_config(2))
    head.receive(Open(RequestId("a"), (1, 2), 4, GREEDY), 0.0)
    work = head.next_work(0.0)
    assert work is not None
    with pytest.raises(RuntimeError, match="no hidden states"):
        head.complete(work, WorkResult(), 0.0)


def test_broken_goes_on_to_the_head_from_any_stage() -> None:
    world = RingWorld(head_config(4), script(99, 0))
    outcome = world.open(request("a", GOOD))
    world.run_until(0.1)
    world.inject(2, Envelope("act", Broken(1)))
    world.run_until_quiet()
    assert refused(outcome).message.startswith("stage 1 lost its neighbour")
    relayed = [(stage, e.lane) for _, stage, e in world.sent if isinstance(e.message, Broken)]
    assert relayed == [(2, "act"), (3, "tok")]


def test_only_rows_that_did_not_fail_go_on() -> None:
    world = RingWorld(head_config(2), script(3, 0))
    for i in range(3):
        world.open(request(f"g{i}", GOOD))
    world.open(request("bad", FAILING))
    world.run_until_quiet()
    groups = [e.message for _, _, e in world.sent if isinstance(e.message, Group)]
    assert all(g.hidden.shape[0] == len(g.rows) for g in groups)
    assert max(row.pos for g in groups for row in g.rows if row.session == 4) == 5 + 1
    assert sum(isinstance(e.message, Piece) for _, _, e in world.sent) > 0
