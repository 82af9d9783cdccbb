"""K1: growth that finds no room pauses the youngest, and it comes back as if nothing had been."""

from __future__ import annotations

from itertools import pairwise

import pytest
from chain_world import ChainWorld
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_world import Link, Request, head_config

from swarmnode.ring.head_messages import Finished, Sampled, Started
from swarmnode.ring.kv_budget import GROWTH_TOKENS
from swarmnode.ring.messages import Drop, Ended, Piece
from swarmnode.ring.work import Sampling

NEVER = 1 << 40


def request(name: str, length: int, new: int | None = None, seed: int = 0) -> Request:
    return Request(name, tuple(range(1, length + 1)), new, Sampling(seed=seed))


def tight(num_stages: int, total: int = 100, **changes: object) -> ChainWorld:
    """Two sessions of 20 start in `total` tokens and cannot both end there."""
    settings = {"kv_tokens": total, "context_tokens": 90, "typical_tokens": 10, "prefill_chunk": 8}
    return ChainWorld(head_config(num_stages, **(settings | changes)), eos_every=NEVER)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_the_youngest_is_paused_and_both_give_their_own_tokens(num_stages: int) -> None:
    world = tight(num_stages)
    for i, name in enumerate(["old", "young"]):
        world.ask(request(name, 20, seed=i))
    world.run_until_quiet()
    assert world.most_paused == 1
    old, young = world.outcomes["old"], world.outcomes["young"]
    assert [o.end.completion_tokens for o in (old, young) if isinstance(o.end, Finished)] == [70, 70]
    assert [o.end.reason for o in (old, young) if isinstance(o.end, Finished)] == ["length", "length"]
    assert [e for _, e in young.events if isinstance(e, Started)] == [Started("young")]
    assert old.seconds_of(Finished) < young.seconds_of(Finished)
    world.check_the_end()


def test_a_pause_drops_on_both_lanes_and_its_room_is_there_when_that_came_round() -> None:
    world = tight(3)
    world.ask(request("old", 20))
    world.ask(request("young", 20))
    world.run_until_quiet()
    drops = [(stage, e.lane, e.message) for _, stage, e in world.sent if isinstance(e.message, Drop)]
    assert sorted((stage, lane) for stage, lane, _ in drops) == [(s, lane) for s in (0, 1) for lane in ("act", "pre")]
    assert {message for *_, message in drops} == {Drop(2, 0)}
    (dropped_s, answered_s) = (
        next(at for at, _, e in world.sent if isinstance(e.message, kind)) for kind in (Drop, Ended)
    )
    (answer,) = [e.message for _, _, e in world.sent if isinstance(e.message, Ended) and e.message.gen is not None]
    assert answer == Ended(2, 0)
    between = [at for at, e in world.outcomes["old"].events if isinstance(e, Sampled) and dropped_s < at]
    assert between[1] > answered_s, "the old one waited without stepping"
    reread = [e.message for _, stage, e in world.sent if stage == 0 and isinstance(e.message, Piece)]
    again = [piece for piece in reread if piece.gen == 1]
    young = world.outcomes["young"].tokens
    told = sum((piece.ids for piece in again), ())
    assert told == (*range(1, 21), *young[: len(told) - 20])
    assert [piece.last for piece in again] == [False] * (len(again) - 1) + [True]
    assert again[0].sampling is not None


def test_the_one_that_grows_may_be_the_youngest_itself() -> None:
    world = tight(2, total=120)
    world.ask(request("fixed", 20, 60))
    world.ask(request("growing", 20))
    world.run_until_quiet()
    assert world.most_paused == 1
    fixed, growing = world.outcomes["fixed"].end, world.outcomes["growing"].end
    assert isinstance(fixed, Finished)
    assert isinstance(growing, Finished)
    assert (fixed.completion_tokens, growing.completion_tokens) == (60, 70)
    world.check_the_end()


def test_alone_and_without_room_a_reply_ends_with_length() -> None:
    world = tight(2, total=50)
    world.ask(request("alone", 20))
    world.run_until_quiet()
    end = world.outcomes["alone"].end
    assert isinstance(end, Finished)
    assert (end.reason, end.completion_tokens) == ("length", 30)
    assert world.most_paused == 0
    world.check_the_end()


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_paused_one_can_be_cancelled_and_leaves_nothing(num_stages: int) -> None:
    world = tight(num_stages)
    world.ask(request("old", 20))
    world.ask(request("young", 20))
    while not world.head.admission.paused:
        world._step()
    world.cancel("young")
    world.check_the_end()
    end = world.outcomes["young"].end
    assert isinstance(end, Finished)
    assert (end.reason, end.completion_tokens) == ("cancelled", len(world.outcomes["young"].tokens))


def test_paused_ones_come_back_before_anyone_who_waits_oldest_first() -> None:
    world = tight(2, total=130, max_in_flight=3)
    names = ["a", "b", "c", "d"]
    for i, name in enumerate(names):
        world.ask(request(name, 20, seed=i))
    world.check_the_end()
    assert world.most_paused == 2
    assert world.started == names
    ended = [world.outcomes[name].seconds_of(Finished) for name in names]
    assert ended == sorted(ended)


def test_no_deadline_runs_while_paused() -> None:
    """The old one goes on for longer than any step may take; the young one waits and is not stalled."""
    world = ChainWorld(
        head_config(2, kv_tokens=1100, context_tokens=1000, typical_tokens=10),
        links=[Link(0.5)] * 2,
        eos_every=NEVER,
    )
    world.ask(request("old", 20))
    world.ask(request("young", 500))
    world.check_the_end()
    assert world.most_paused == 1
    assert max(b - a for a, b in pairwise(world.outcomes["young"].token_times_s)) > 300
    assert all(isinstance(o.end, Finished) for o in world.outcomes.values())


def test_who_comes_back_gets_room_for_real_progress() -> None:
    world = ChainWorld(head_config(2, kv_tokens=1200, context_tokens=1000, typical_tokens=10), eos_every=NEVER)
    for i in range(3):
        world.ask(request(f"r{i}", 20, seed=i))
    back: list[tuple[int, int]] = []
    paused: set[int] = set()

    def note(world: ChainWorld) -> None:
        now = {s.id for s in world.head.admission.paused}
        budget = world.head.admission.budget
        back.extend(
            (budget.held_by(s), world.head._sessions[s].needed_tokens)
            for s in paused - now
            if s in world.head._sessions
        )
        paused.clear()
        paused.update(now)

    world.watch = note  # type: ignore[assignment]
    world.run_until_quiet()
    assert back
    assert all(held >= min(needed + GROWTH_TOKENS, 1000) for held, needed in back)
    world.check_the_end()


@given(
    num_stages=st.integers(1, 4),
    total=st.integers(60, 200),
    asks=st.lists(
        st.tuples(st.integers(1, 50), st.none() | st.integers(1, 40), st.integers(0, 400)), min_size=2, max_size=7
    ),
    cancels=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 1500)), max_size=3),
    latency_ms=st.lists(st.sampled_from([0, 1, 15, 120]), min_size=4, max_size=4),
    jitter_ms=st.sampled_from([0, 25]),
    chunk=st.sampled_from([0, 3, 16]),
    max_in_flight=st.integers(1, 6),
    schedule=st.sampled_from(["cost", "source"]),
    eos_every=st.sampled_from([20, 80, NEVER]),
)
@settings(max_examples=80, deadline=None)
def test_any_ring_too_small_for_its_users_serves_them_all(
    num_stages: int,
    total: int,
    asks: list[tuple[int, int | None, int]],
    cancels: list[tuple[int, int]],
    latency_ms: list[int],
    jitter_ms: int,
    chunk: int,
    max_in_flight: int,
    schedule: str,
    eos_every: int,
) -> None:
    config = head_config(
        num_stages,
        kv_tokens=total,
        context_tokens=100,
        typical_tokens=5,
        prefill_chunk=chunk,
        max_in_flight=max_in_flight,
        schedule=schedule,
    )
    links = [Link(ms / 1e3, jitter_ms / 1e3) for ms in latency_ms[:num_stages]]
    world = ChainWorld(config, links=links, eos_every=eos_every)
    for i, (length, new, at_ms) in enumerate(asks):
        world.ask(request(f"r{i}", length, new, seed=i), at_ms / 1e3)
    for i, at_ms in cancels:
        world.cancel(f"r{i}", at_ms / 1e3)
    world.check_the_end()
    opened = sorted(range(len(asks)), key=lambda i: (asks[i][2], i))
    order = [f"r{i}" for i in opened]
    assert world.started == [name for name in order if name in world.started], "nobody overtakes"
