"""P1, P2, B2, B3, R5: the tokens one machine would give, whatever the stages, the pieces and the company."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_world import EOS, Link, Request, RingWorld, head_config, tokens_alone

from swarmnode.compute.script import Reply, Script
from swarmnode.ids import RequestId
from swarmnode.ring import cost_schedule
from swarmnode.ring.head import Head
from swarmnode.ring.head_messages import Accepted, Finished, Open, Sampled, Started
from swarmnode.ring.messages import Envelope, Group, Piece, PieceDone, Row, Tokens
from swarmnode.ring.turns import LATE
from swarmnode.ring.work import GroupWork, PieceWork, Sampling

COUNTING = Script(default=tuple(range(101, 141)), prefill_ms_per_token=1, decode_ms=5, row_ms=1)
STAGES = (1, 2, 3, 4, 5)


def request(name: str, length: int, marker: int = 7, max_new_tokens: int | None = None) -> Request:
    return Request(name, (marker, *range(1, length)), max_new_tokens)


def take_groups(head: Head) -> list[GroupWork]:
    """Everything the head wants run; pieces are answered at once, groups not."""
    groups = []
    while (work := head.next_work(0.0)) is not None:
        if isinstance(work, GroupWork):
            groups.append(work)
        else:
            head.receive(Envelope("tok", PieceDone(work.session, 0, 0, 1, 9)), 0.0)
    return groups


def pieces_sent(world: RingWorld) -> list[Piece]:
    return [e.message for _, stage, e in world.sent if stage == 0 and isinstance(e.message, Piece)]


@pytest.mark.parametrize("num_stages", STAGES)
@pytest.mark.parametrize("chunk", [0, 1, 3, 4, 256])
def test_p1_pieces_of_any_size_give_the_single_engines_tokens(num_stages: int, chunk: int) -> None:
    world = RingWorld(head_config(num_stages, prefill_chunk=chunk), COUNTING)
    asked = request("a", 11)
    outcome = world.open(asked)
    world.run_until_quiet()
    assert outcome.tokens == tokens_alone(COUNTING, asked)
    assert len(outcome.tokens) == 41
    assert outcome.end == Finished(asked.name, "stop", 11, 41, outcome.end.timing)
    assert not world.leftovers()


@pytest.mark.parametrize("num_stages", STAGES)
def test_r5_interleaved_sessions_keep_their_own_tokens(num_stages: int) -> None:
    script = Script(
        replies=tuple(Reply(when=(200 + i,), ids=tuple(range(1000 * i + 1, 1000 * i + 5 + 3 * i))) for i in range(6)),
        prefill_ms_per_token=1,
        decode_ms=3,
    )
    world = RingWorld(head_config(num_stages), script, links=[Link(0.004, 0.02)] * num_stages, seed=num_stages)
    asked = [request(f"r{i}", 3 + 5 * i, 200 + i) for i in range(6)]
    outcomes = [world.open(one, 0.007 * i) for i, one in enumerate(asked)]
    world.run_until_quiet()
    assert [o.tokens for o in outcomes] == [tokens_alone(script, one) for one in asked]
    assert not world.leftovers()


@given(
    num_stages=st.integers(1, 5),
    chunk=st.integers(0, 9),
    max_group=st.integers(0, 3),
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    limits=st.lists(st.one_of(st.none(), st.integers(1, 12)), min_size=5, max_size=5),
    latency_ms=st.lists(st.integers(0, 40), min_size=5, max_size=5),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_tokens_are_the_single_engines_for_any_ring(
    num_stages: int,
    chunk: int,
    max_group: int,
    lengths: list[int],
    limits: list[int | None],
    latency_ms: list[int],
    seed: int,
) -> None:
    replies = tuple(Reply(when=(500 + i,), ids=tuple(range(600 + 50 * i, 607 + 51 * i))) for i in range(5))
    script = Script(replies=replies, prefill_ms_per_token=0.5, decode_ms=2)
    links = [Link(ms / 1e3, ms / 2e3) for ms in latency_ms[:num_stages]]
    world = RingWorld(head_config(num_stages, prefill_chunk=chunk, max_group=max_group), script, links=links, seed=seed)
    asked = [request(f"r{i}", n, 500 + i, limits[i]) for i, n in enumerate(lengths)]
    outcomes = [world.open(one) for one in asked]
    world.run_until_quiet()
    assert [o.tokens for o in outcomes] == [tokens_alone(script, one) for one in asked]
    assert not world.leftovers()


def test_events_come_in_order_and_end_once() -> None:
    world = RingWorld(head_config(2), Script(default=(11, 12)))
    outcome = world.open(request("a", 5))
    world.run_until_quiet()
    kinds = [type(event) for _, event in outcome.events]
    assert kinds == [Accepted, Started, Sampled, Sampled, Sampled, Finished]
    assert outcome.tokens == [11, 12, EOS]
    assert [at for at, _ in outcome.events] == sorted(at for at, _ in outcome.events)


def test_p1_pieces_are_of_the_chunks_size_and_carry_ids_and_sampling_once() -> None:
    world = RingWorld(head_config(3, prefill_chunk=4), COUNTING)
    asked = Request("a", tuple(range(50, 60)), 2, Sampling(temperature=0.7, seed=9))
    world.open(asked)
    world.run_until_quiet()
    pieces = pieces_sent(world)
    assert [(p.pos, len(p.ids), p.last) for p in pieces] == [(0, 4, False), (4, 4, False), (8, 2, True)]
    assert sum((p.ids for p in pieces), ()) == asked.prompt
    assert [p.sampling for p in pieces] == [asked.sampling, None, None]
    answers = [e.message for _, _, e in world.sent if isinstance(e.message, PieceDone)]
    assert [(a.pos, a.n, a.token) for a in answers] == [(0, 4, None), (4, 4, None), (8, 2, 101)]


@pytest.mark.parametrize("num_stages", STAGES)
def test_p2_pieces_overlap_and_never_more_than_one_per_stage(num_stages: int) -> None:
    world = RingWorld(head_config(num_stages), COUNTING)
    seen = []

    def count(world: RingWorld) -> None:
        seen.append(sum(len(s.pieces) for s in world.head._sessions.values()))

    world.watch = count
    for name in "abc":
        world.open(request(name, 40, max_new_tokens=1))
    world.run_until_quiet()
    assert max(seen) == num_stages


def test_p2_overlapping_stages_prefill_in_less_than_their_sum() -> None:
    """Virtual time: 10 pieces of 4 ms through 4 stages with no link time take 13 pieces' time, not 40."""
    world = RingWorld(head_config(4, prefill_chunk=4), COUNTING, links=[Link(0)] * 4)
    outcome = world.open(request("a", 40, max_new_tokens=1))
    world.run_until_quiet()
    assert outcome.seconds_of(Sampled) == pytest.approx(0.052)


@pytest.mark.parametrize(("room_bytes", "most"), [(1, 2), (4 * 4 * 8 * 4, 4), (8 << 20, 6)])
def test_p2_pieces_under_way_are_bounded_by_their_bytes(
    room_bytes: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six pieces keep five alike stages busy; hidden states of so many bytes allow fewer, but never one alone."""
    monkeypatch.setattr(cost_schedule, "PIECE_BYTES_IN_FLIGHT", room_bytes)
    world = RingWorld(head_config(5, schedule="cost"), COUNTING, links=[Link(0)] * 5)
    under_way: list[int] = []
    world.watch = lambda w: under_way.append(sum(len(s.pieces) for s in w.head._sessions.values()))
    world.open(request("long", 200, max_new_tokens=1))
    world.run_until_quiet()
    later = under_way[len(under_way) // 2 :]
    assert max(later) == most, "once pieces came back, and their cost is known"


def test_sessions_take_turns_in_prefill() -> None:
    world = RingWorld(head_config(2, prefill_chunk=4), COUNTING)
    world.open(request("long", 24, max_new_tokens=1))
    world.open(request("short", 8, max_new_tokens=1))
    world.run_until_quiet()
    assert [p.session for p in pieces_sent(world)] == [1, 1, 2, 1, 2, 1, 1, 1]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 8])
def test_p2_a_step_waits_for_one_piece_on_its_whole_way_round(num_stages: int) -> None:
    """While a long prompt comes in, all the waiting of a step is one piece's compute on one stage, not on each."""
    script = COUNTING.model_copy(update={"prefill_ms_per_token": 10})
    world = RingWorld(head_config(num_stages, prefill_chunk=4), script, links=[Link(0)] * num_stages)
    chatting = world.open(request("chatting", 3, max_new_tokens=30))
    world.open(request("long", 80, max_new_tokens=1), at_s=0.06 * num_stages)
    world.run_until_quiet()
    tokens_at = [at for at, event in chatting.events if isinstance(event, Sampled)]
    one_step_s, one_piece_s = num_stages * 0.006, 0.040
    assert max(b - a for a, b in pairwise(tokens_at)) <= one_step_s * LATE + one_piece_s + 1e-9
    for engine in world.engines:
        order = "".join("p" if isinstance(work, PieceWork) else "g" for work in engine.works)
        busy = order[order.index("g") : order.rindex("g")]
        assert "gp" in busy


@pytest.mark.parametrize(
    ("num_stages", "sessions", "sizes"),
    [
        (1, 4, [4]),
        (2, 4, [2, 2]),
        (2, 5, [3, 2]),
        (3, 7, [3, 3, 1]),
        (4, 2, [1, 1]),
        (5, 1, [1]),
    ],
)
def test_b2_ready_sessions_are_split_so_that_every_stage_has_work(
    num_stages: int, sessions: int, sizes: list[int]
) -> None:
    """All tokens come back while stage 0 is busy: the groups are of ceil(sessions / stages)."""
    head = Head(head_config(num_stages))
    for i in range(sessions):
        head.receive(Open(RequestId(f"r{i}"), (1,), 9, Sampling()), 0.0)
    first = take_groups(head)
    for group in first:
        rows = tuple(Row(row.session, 0, row.pos) for row in group.rows)
        head.receive(Envelope("tok", Tokens(rows, (9,) * len(rows))), 0.0)
    groups = take_groups(head)
    assert [len(group.rows) for group in groups] == sizes


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_b2_no_group_takes_another_stages_share(num_stages: int) -> None:
    world = RingWorld(head_config(num_stages), Script(default=(9,), then="repeat", decode_ms=5, row_ms=1))
    for i in range(3 * num_stages + 1):
        world.open(request(f"r{i}", 2, max_new_tokens=20 + i))
    world.run_until_quiet()
    groups = [w for w in world.engines[0].works if isinstance(w, GroupWork)]
    assert 1 < max(len(group.rows) for group in groups) <= 4


def test_b2_all_stages_compute_at_once_when_sessions_suffice() -> None:
    """Virtual time: with 3 groups on 3 stages and no link time, no stage is ever idle between two groups."""
    world = RingWorld(head_config(3), Script(default=(9,), then="repeat", decode_ms=5), links=[Link(0)] * 3)
    outcomes = [world.open(request(f"r{i}", 2, max_new_tokens=20)) for i in range(3)]
    world.run_until_quiet()
    for outcome in outcomes:
        tokens_at = [at for at, event in outcome.events if isinstance(event, Sampled)]
        assert {round(b - a, 6) for a, b in pairwise(tokens_at[3:])} == {0.015}


def test_max_group_caps_a_group() -> None:
    world = RingWorld(head_config(2, max_group=1), COUNTING)
    for i in range(4):
        world.open(request(f"r{i}", 2, max_new_tokens=5))
    world.run_until_quiet()
    assert {len(w.rows) for engine in world.engines for w in engine.works if isinstance(w, GroupWork)} == {1}


def test_b3_a_group_is_one_frame_and_its_tokens_come_back_as_one() -> None:
    world = RingWorld(head_config(2), Script(default=(9,), then="repeat"))
    for i in range(4):
        world.open(request(f"r{i}", 2, max_new_tokens=9))
    world.run_until_quiet()
    groups = [e.message for _, _, e in world.sent if isinstance(e.message, Group)]
    answers = [e.message for _, _, e in world.sent if isinstance(e.message, Tokens)]
    assert [g.rows for g in groups] == [a.rows for a in answers]
    assert max(len(g.rows) for g in groups) == 2
    assert all(g.hidden.shape[0] == len(g.rows) for g in groups)


@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_r8_timing_adds_up_to_the_wall_time(num_stages: int) -> None:
    world = RingWorld(head_config(num_stages), COUNTING, links=[Link(0.02)] * num_stages)
    outcome = world.open(request("a", 8, max_new_tokens=11))
    world.run_until_quiet()
    timing = outcome.end.timing
    assert [timing[f"stage{i}_ms"] for i in range(num_stages)] == [6.0] * num_stages
    assert timing["link_ms"] == pytest.approx(20 * num_stages if num_stages > 1 else 0, abs=0.01)
    assert timing["queue_ms"] == pytest.approx(0, abs=0.01)
    assert timing["wait_ms"] == 0
    assert timing["prefill_ms"] == pytest.approx((outcome.seconds_of(Sampled) - outcome.seconds_of(Started)) * 1e3)
    assert timing["bytes_per_token"] == (0 if num_stages == 1 else COUNTING.hidden * 4)


def test_r8_waiting_behind_others_is_queue_and_all_parts_add_up() -> None:
    world = RingWorld(head_config(2, max_group=1), COUNTING, links=[Link(0.01)] * 2)
    outcomes = [world.open(request(f"r{i}", 4, max_new_tokens=20)) for i in range(6)]
    world.run_until_quiet()
    for outcome in outcomes:
        timing = outcome.end.timing
        tokens_at = [at for at, event in outcome.events if isinstance(event, Sampled)]
        per_token_ms = (tokens_at[-1] - tokens_at[0]) / (len(tokens_at) - 1) * 1e3
        parts_ms = timing["stage0_ms"] + timing["stage1_ms"] + timing["link_ms"] + timing["queue_ms"]
        assert timing["link_ms"] == pytest.approx(20, abs=0.01), "what waits at a stage is not on the links"
        # counted from arrival to arrival; the head takes a token in when the forward it arrived during is done
        assert parts_ms == pytest.approx(per_token_ms, abs=5.0 / (len(tokens_at) - 1))
    assert max(outcome.end.timing["queue_ms"] for outcome in outcomes) > 0


def test_the_probe_goes_round_both_lanes() -> None:
    world = RingWorld(head_config(3), COUNTING, links=[Link(0.01), Link(0.02), Link(0.03)])
    world.probe(5)
    world.run_until_quiet()
    (probed,) = world.probes
    assert (probed.nonce, round(probed.round_ms, 6)) == (5, 60.0)
    lanes = [(stage, e.lane) for _, stage, e in world.sent]
    assert lanes == [(0, "act"), (0, "pre"), (1, "act"), (1, "pre"), (2, "tok"), (2, "tok")]


def test_a_ring_of_one_needs_no_probe_and_sends_nothing() -> None:
    world = RingWorld(head_config(1), COUNTING)
    world.probe()
    world.open(request("a", 9))
    world.run_until_quiet()
    assert [p.round_ms for p in world.probes] == [0.0]
    assert world.sent == []


def test_the_same_calls_give_the_same_run() -> None:
    def run() -> str:
        world = RingWorld(head_config(3), COUNTING, links=[Link(0.01, 0.02)] * 3, seed=4)
        for i in range(4):
            world.open(request(f"r{i}", 9 + i, max_new_tokens=8), at_s=i / 100)
        world.cancel("r2", at_s=0.1)
        world.run_until_quiet()
        return world.trace()

    assert run() == run()
