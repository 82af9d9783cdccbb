"""One later stage alone (DESIGN section 7): generations, positions, floors, and what it answers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.ids import SessionId
from swarmnode.ring.messages import (
    Drop,
    End,
    Ended,
    Envelope,
    Failed,
    Group,
    Piece,
    Probe,
    Reset,
    RingMessage,
    Row,
    Tokens,
)
from swarmnode.ring.stage import Stage
from swarmnode.ring.work import Activation, Continuation, Failure, GroupWork, PieceWork, WorkResult

ONE, TWO = SessionId(1), SessionId(2)


THREE = SessionId(3)
EMPTY = {"sessions": 0, "parked": 0, "floors": 0, "queued": 0}


def rows(count: int) -> Activation:
    return Activation("float32", (count, 1), bytes(range(4 * count)))


def piece(session: SessionId, pos: int, n: int, gen: int = 0, last: bool = False) -> Piece:
    return Piece(session, gen, pos, (5,) * n, last, rows(n))


def group(*parts: tuple[SessionId, int, int]) -> Group:
    return Group(tuple(Row(session, gen, pos) for session, gen, pos in parts), rows(len(parts)))


def run(stage: Stage, *messages: RingMessage) -> list[GroupWork | PieceWork]:
    """Hand the messages over and run everything; what ran."""
    for message in messages:
        lane = "pre" if isinstance(message, Piece) else "act"
        stage.receive(Envelope(lane, message), 0.0)
    works = []
    while (work := stage.next_work(0.0)) is not None:
        works.append(work)
        count = len(work.ids) if isinstance(work, PieceWork) else len(work.rows)
        result = WorkResult(tokens=(7,) * count) if stage.is_last else WorkResult(hidden=rows(count))
        stage.complete(work, result, 0.0)
    return works


def failures(stage: Stage) -> list[Failed]:
    return [e.message for e in stage.outgoing() if isinstance(e.message, Failed)]


@pytest.mark.parametrize(
    ("pos", "gen", "runs"),
    [
        pytest.param(6, 0, True, id="equal gen, next position: appends"),
        pytest.param(3, 0, True, id="equal gen, lower position: crops"),
        pytest.param(6, 1, True, id="higher gen: crops to its position"),
        pytest.param(2, 2, True, id="higher gen, lower position: crops"),
        pytest.param(0, 1, True, id="higher gen from the start"),
        pytest.param(7, 0, False, id="beyond the cache: a gap"),
        pytest.param(7, 1, False, id="higher gen beyond the cache: a gap"),
    ],
)
def test_gen_and_pos_decide(pos: int, gen: int, runs: bool) -> None:
    stage = Stage(1, 3)
    run(stage, piece(ONE, 0, 4), piece(ONE, 4, 2, last=True))
    stage.outgoing()
    works = run(stage, group((ONE, gen, pos)))
    assert bool(works) is runs
    failed = failures(stage)
    assert [f.code for f in failed] == ([] if runs else ["cache_gap"])
    if not runs:
        assert failed[0].message == f"stage 1: position {pos} follows a cache of 6"
        assert failed[0].gen == gen


def test_a_lower_gen_is_dropped_without_a_word() -> None:
    stage = Stage(1, 2)
    run(stage, piece(ONE, 0, 4, gen=2))
    stage.outgoing()
    assert run(stage, piece(ONE, 4, 2, gen=1), group((ONE, 1, 4))) == []
    assert stage.outgoing() == []
    assert stage.snapshot() == {"sessions": 1, "parked": 0, "floors": 0, "queued": 0}


def test_a_session_that_failed_here_waits_for_its_end_and_a_higher_gen_starts_it_anew() -> None:
    stage = Stage(1, 2)
    run(stage, group((ONE, 0, 3)))
    assert [f.code for f in failures(stage)] == ["cache_gap"]
    assert run(stage, piece(ONE, 0, 2), group((ONE, 0, 3))) == []
    assert failures(stage) == []
    assert len(run(stage, piece(ONE, 0, 2, gen=1))) == 1


def test_what_failed_is_freed_and_reported_once() -> None:
    stage = Stage(1, 2)
    run(stage, piece(ONE, 0, 3), piece(TWO, 0, 3))
    stage.outgoing()
    stage.receive(Envelope("act", group((ONE, 0, 3), (TWO, 0, 3))), 0.0)
    work = stage.next_work(0.0)
    assert work is not None
    stage.complete(work, WorkResult(tokens=(8,), failed={ONE: Failure("stage_failed", "no")}), 0.0)
    assert stage.freed() == [ONE]
    assert [e.message for e in stage.outgoing()] == [
        Failed(ONE, 0, "stage_failed", "stage 1: no"),
        Tokens((Row(TWO, 0, 3),), (8,), (0.0,)),
    ]


@pytest.mark.parametrize("order", [("act", "pre"), ("pre", "act")])
def test_the_floor_stands_until_the_end_came_on_both_lanes(order: tuple[str, str]) -> None:
    stage = Stage(1, 2)
    run(stage, piece(ONE, 0, 4))
    stage.outgoing()
    first, second = order
    stage.receive(Envelope(first, End(ONE)), 0.0)
    assert stage.freed() == [ONE]
    assert stage.snapshot() == {"sessions": 0, "parked": 0, "floors": 1, "queued": 0}
    late = piece(ONE, 4, 2) if second == "pre" else group((ONE, 0, 4))
    assert run(stage, late) == []
    assert stage.outgoing() == []
    stage.receive(Envelope(second, End(ONE)), 0.0)
    assert stage.snapshot() == {"sessions": 0, "parked": 0, "floors": 0, "queued": 0}
    assert stage.outgoing() == [Envelope("tok", Ended(ONE))]


@pytest.mark.parametrize("order", [("act", "pre"), ("pre", "act")])
def test_what_stands_in_the_queue_when_both_ends_came_is_never_run(order: tuple[str, str]) -> None:
    stage = Stage(1, 2)
    run(stage, piece(TWO, 0, 2))
    stage.receive(Envelope("pre", piece(ONE, 0, 4)), 0.0)
    stage.receive(Envelope("act", group((ONE, 0, 4), (TWO, 0, 2))), 0.0)
    for lane in order:
        stage.receive(Envelope(lane, End(ONE)), 0.0)
    works = run(stage)
    assert [[r.session for r in w.rows] for w in works if isinstance(w, GroupWork)] == [[TWO]]
    assert len(works) == 1
    assert stage.snapshot() == {"sessions": 1, "parked": 0, "floors": 0, "queued": 0}


def test_an_end_during_the_forward_drops_its_result() -> None:
    stage = Stage(1, 2)
    run(stage, piece(ONE, 0, 4), piece(TWO, 0, 4))
    stage.outgoing()
    stage.receive(Envelope("act", group((ONE, 0, 4), (TWO, 0, 4))), 0.0)
    work = stage.next_work(0.0)
    assert work is not None
    stage.receive(Envelope("act", End(ONE)), 0.0)
    stage.complete(work, WorkResult(tokens=(8, 9)), 0.0)
    assert stage.outgoing() == [Envelope("tok", Tokens((Row(TWO, 0, 4),), (9,), (0.0,)))]


def both_lanes(stage: Stage, message: RingMessage) -> None:
    for lane in ("act", "pre"):
        stage.receive(Envelope(lane, message), 0.0)


def continuing(session: SessionId, start: Continuation, n: int = 2, gen: int = 0) -> Piece:
    return Piece(session, gen, start.length, (5,) * n, False, rows(n), start=start)


@pytest.mark.parametrize("order", [("act", "pre"), ("pre", "act")])
def test_a_drop_frees_up_to_its_gen_and_is_answered_with_it(order: tuple[str, str]) -> None:
    stage = Stage(1, 2)
    run(stage, piece(ONE, 0, 4))
    stage.outgoing()
    stage.receive(Envelope("pre", piece(ONE, 4, 2)), 0.0)
    stage.receive(Envelope(order[0], Drop(ONE, 0)), 0.0)
    assert stage.freed() == [ONE]
    assert run(stage, group((ONE, 0, 4))) == []
    stage.receive(Envelope(order[1], Drop(ONE, 0)), 0.0)
    assert stage.outgoing() == [Envelope("tok", Ended(ONE, 0))]
    assert stage.snapshot() == EMPTY
    assert len(run(stage, piece(ONE, 0, 3, gen=1))) == 1
    assert ONE not in stage.freed()


def test_a_drop_that_is_late_leaves_the_next_gen_alone() -> None:
    stage = Stage(1, 2)
    run(stage, piece(ONE, 0, 4))
    stage.receive(Envelope("pre", Drop(ONE, 0)), 0.0)
    stage.freed()
    assert len(run(stage, piece(ONE, 0, 3, gen=1))) == 1, "the floor is that of the generation before"
    stage.receive(Envelope("act", Drop(ONE, 0)), 0.0)
    assert stage.freed() == []
    assert len(run(stage, group((ONE, 1, 3)))) == 1


def test_a_drop_of_an_earlier_gen_frees_nothing() -> None:
    stage = Stage(1, 2)
    run(stage, piece(ONE, 0, 4, gen=1))
    both_lanes(stage, Drop(ONE, 0))
    assert stage.freed() == []
    assert len(run(stage, group((ONE, 1, 4)))) == 1


@pytest.mark.parametrize("move", [True, False])
def test_a_parked_session_is_continued_once_moved_as_often_as_copied(move: bool) -> None:
    stage = Stage(1, 3)
    run(stage, piece(ONE, 0, 6))
    both_lanes(stage, End(ONE, park=5))
    assert stage.freed() == []
    assert stage.snapshot() == EMPTY | {"parked": 1}
    stage.outgoing()
    start = Continuation(ONE, 4, move)
    (work,) = run(stage, continuing(TWO, start))
    assert isinstance(work, PieceWork)
    assert (work.start, work.pos) == (start, 4)
    (sent,) = stage.outgoing()
    assert isinstance(sent.message, Piece)
    assert sent.message.start == start
    assert len(run(stage, group((TWO, 0, 6)))) == 1
    stage.outgoing()
    again = run(stage, continuing(THREE, start))
    assert [f.code for f in failures(stage)] == (["cache_gap"] if move else [])
    assert len(again) == (not move)
    assert stage.snapshot()["parked"] == (not move)


@pytest.mark.parametrize("park", [0, 7])
def test_what_is_not_there_as_long_as_was_said_is_freed_not_parked(park: int) -> None:
    stage = Stage(1, 2)
    run(stage, piece(ONE, 0, 6))
    both_lanes(stage, End(ONE, park))
    assert stage.freed() == [ONE]
    assert stage.snapshot() == EMPTY


def test_a_start_beyond_what_is_parked_is_a_gap() -> None:
    stage = Stage(1, 2)
    run(stage, piece(ONE, 0, 6))
    both_lanes(stage, End(ONE, park=5))
    stage.outgoing()
    assert run(stage, continuing(TWO, Continuation(ONE, 6, True))) == []
    (failed,) = failures(stage)
    assert failed.code == "cache_gap"
    assert failed.message == "stage 1: position 6 follows session 1, of which 5 are parked"
    assert stage.snapshot()["parked"] == 1


def test_parked_ones_are_dropped_and_nothing_runs_for_them() -> None:
    stage = Stage(1, 2)
    run(stage, piece(ONE, 0, 6))
    both_lanes(stage, End(ONE, park=6))
    assert run(stage, group((ONE, 0, 6)), piece(ONE, 6, 2, gen=1)) == []
    both_lanes(stage, Drop(ONE, 0))
    assert stage.freed() == [ONE]
    assert [e.message for e in stage.outgoing()][-2:] == [Ended(ONE), Ended(ONE, 0)]
    assert stage.snapshot() == EMPTY


def test_a_reset_keeps_what_is_parked_strikes_what_is_not_and_forgets_the_rest() -> None:
    stage = Stage(1, 3)
    for session in (ONE, TWO, THREE):
        run(stage, piece(session, 0, 6))
    both_lanes(stage, End(ONE, park=6))
    both_lanes(stage, End(TWO, park=6))
    stage.receive(Envelope("act", group((THREE, 0, 6))), 0.0)
    stage.receive(Envelope("act", End(SessionId(4))), 0.0)
    stage.outgoing()
    stage.receive(Envelope("act", Reset(SessionId(6), (ONE, SessionId(5)))), 0.0)
    assert stage.outgoing() == [Envelope("act", Reset(SessionId(6), (ONE,)))]
    assert sorted(stage.freed()) == [TWO, THREE]
    assert stage.snapshot() == EMPTY | {"parked": 1}
    stage.receive(Envelope("pre", End(SessionId(4))), 0.0)
    assert run(stage, piece(THREE, 0, 6, gen=3), piece(TWO, 0, 6, gen=3), group((THREE, 3, 0))) == []
    assert stage.outgoing() == [], "late frames of sessions before the reset"
    assert stage.snapshot() == EMPTY | {"parked": 1}
    assert len(run(stage, continuing(SessionId(6), Continuation(ONE, 6, True)))) == 1
    stage.outgoing()
    both_lanes(stage, Drop(ONE, 0))
    assert len(stage.outgoing()) == 2, "one that was kept may still be told to go"
    assert stage.snapshot() == EMPTY | {"sessions": 1}


def test_a_middle_stage_passes_ends_on_and_never_answers_them() -> None:
    stage = Stage(1, 3)
    for lane in ("act", "pre"):
        stage.receive(Envelope(lane, End(ONE)), 0.0)
    assert stage.outgoing() == [Envelope("act", End(ONE)), Envelope("pre", End(ONE))]
    assert stage.snapshot() == {"sessions": 0, "parked": 0, "floors": 0, "queued": 0}


def test_rows_that_are_skipped_take_their_hidden_states_with_them() -> None:
    stage = Stage(1, 3)
    run(stage, piece(ONE, 0, 1), piece(TWO, 0, 1))
    stage.receive(Envelope("act", End(ONE)), 0.0)
    (work,) = run(stage, group((ONE, 0, 1), (TWO, 0, 1)))
    assert isinstance(work, GroupWork)
    assert work.hidden is not None
    assert (work.hidden.shape, bytes(work.hidden.data)) == ((1, 1), bytes([4, 5, 6, 7]))


def test_times_travel_with_the_message() -> None:
    stage = Stage(1, 3)
    message = Piece(ONE, 0, 0, (5,), True, rows(1), None, (3.0,), 0.5)
    stage.receive(Envelope("pre", message), 1.0)
    work = stage.next_work(1.25)
    assert work is not None
    stage.complete(work, WorkResult(hidden=rows(1), compute_ms=7.0), 2.0)
    (sent,) = stage.outgoing()
    assert isinstance(sent.message, Piece)
    assert sent.message.compute_ms == (3.0, 7.0)
    assert sent.message.queue_ms == 0.5 + 250.0


def test_a_probe_is_passed_on_with_its_hops() -> None:
    middle, last = Stage(1, 3), Stage(2, 3)
    middle.receive(Envelope("pre", Probe(4, "pre")), 0.0)
    (passed,) = middle.outgoing()
    last.receive(passed, 0.0)
    assert last.outgoing() == [Envelope("tok", Probe(4, "pre", 2))]


def test_a_message_no_stage_may_get_is_a_fault() -> None:
    with pytest.raises(ValueError, match="Ended on act"):
        Stage(1, 3).receive(Envelope("act", Ended(ONE)), 0.0)


def test_completing_what_does_not_run_is_a_bug() -> None:
    with pytest.raises(RuntimeError, match="not running"):
        Stage(1, 3).complete(GroupWork(()), WorkResult(), 0.0)


@st.composite
def frames(draw: st.DrawFn) -> list[Envelope]:
    """Any frames of three sessions, in any order: a hostile or confused neighbour."""
    session = st.sampled_from([SessionId(1), SessionId(2), SessionId(3)])
    gen, pos, n = st.integers(0, 2), st.integers(0, 6), st.integers(1, 3)
    part = st.tuples(session, gen, pos)
    message = st.one_of(
        st.builds(piece, session, pos, n, gen),
        st.lists(part, min_size=1, max_size=3, unique_by=lambda p: p[0]).map(lambda parts: group(*parts)),
        st.builds(End, session, st.integers(0, 6)),
        st.builds(Drop, session, gen),
        st.builds(Reset, session, st.lists(session, max_size=2).map(tuple)),
        st.builds(continuing, session, st.builds(Continuation, session, st.integers(1, 6), st.booleans()), n, gen),
    )
    lane = st.sampled_from(["act", "pre"])
    return draw(st.lists(st.builds(Envelope, lane, message), max_size=30))


@given(frames=frames(), takes=st.lists(st.booleans(), min_size=30, max_size=30), last=st.booleans())
@settings(deadline=None)
def test_works_never_leave_a_gap_whatever_the_frames(frames: list[Envelope], takes: list[bool], last: bool) -> None:
    """A slow, obvious cache: every work starts at or below what the engine holds, and ended sessions hold nothing."""
    stage, caches = Stage(2 if last else 1, 3), dict[SessionId, int]()

    def turn() -> bool:
        work = stage.next_work(0.0)
        for session in stage.freed():
            caches.pop(session, None)
        if work is None:
            return False
        parts = [(work.session, work.pos, len(work.ids))] if isinstance(work, PieceWork) else []
        parts += [(r.session, r.pos, 1) for r in work.rows] if isinstance(work, GroupWork) else []
        if isinstance(work, PieceWork) and work.start is not None:
            start = work.start
            caches[work.session] = min(start.length, caches.pop(start.source) if start.move else caches[start.source])
        for session, pos, n in parts:
            assert pos <= caches.get(session, 0)
            caches[session] = pos + n
        count = sum(n for *_, n in parts)
        stage.complete(work, WorkResult(tokens=(1,) * count, hidden=rows(count)), 0.0)
        return True

    for envelope, take in zip(frames, takes, strict=False):
        stage.receive(envelope, 0.0)
        for session in stage.freed():
            caches.pop(session, None)
        if take:
            turn()
    while turn():
        pass
    assert stage.snapshot()["queued"] == 0
    assert set(caches) <= set(stage._held) | set(stage._parked)
    assert all(caches[session] >= length for session, length in stage._parked.items())


def test_a_stage_gives_every_session_a_step_between_two_pieces() -> None:
    stage = Stage(1, 2)
    run(stage, piece(ONE, 0, 1), piece(THREE, 0, 1))
    for i in range(4):
        stage.receive(Envelope("pre", piece(TWO, i, 1)), 0.0)
    stage.receive(Envelope("act", group((ONE, 0, 1))), 0.0)
    stage.receive(Envelope("act", group((THREE, 0, 1))), 0.0)
    ran, pos = "", 2
    while (work := stage.next_work(0.0)) is not None:
        is_piece = isinstance(work, PieceWork)
        ran += "p" if is_piece else str(work.rows[0].session)
        if ran.endswith("1") and pos < 5:  # its next step is there at once: a ring of no distance
            stage.receive(Envelope("act", group((ONE, 0, pos))), 0.0)
            pos += 1
        stage.complete(work, WorkResult(tokens=(7,), compute_ms=10.0 if is_piece else 1.0), 0.0)
    assert ran == "1p3p1p1p1"
