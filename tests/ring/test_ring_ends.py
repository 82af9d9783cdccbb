"""Cancel and end (DESIGN sections 2 and 7): freed at once on every stage, and nothing is left."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_world import Link, Request, RingWorld, head_config, tokens_alone

from swarmnode.compute.script import Script
from swarmnode.ring.head_messages import Finished, Sampled
from swarmnode.ring.messages import End, Ended, Group, Piece

ENDLESS = Script(default=(9,), then="repeat", prefill_ms_per_token=1, decode_ms=5)
SLOW = Script(default=(9,), then="repeat", prefill_ms_per_token=20, decode_ms=5)


def request(name: str, prompt: int, new: int | None = None) -> Request:
    return Request(name, tuple(range(1, prompt + 1)), new)


def test_cancel_in_the_waiting_room_leaves_nothing_and_lets_the_next_in() -> None:
    world = RingWorld(head_config(2, max_in_flight=1), ENDLESS)
    world.open(request("running", 4, 40))
    waiting, behind = world.open(request("waiting", 4, 4)), world.open(request("behind", 4, 4))
    world.cancel("waiting", at_s=0.05)
    world.run_until_quiet()
    assert waiting.end == Finished("waiting", "cancelled", 4, 0, waiting.end.timing)
    assert waiting.tokens == []
    assert isinstance(behind.end, Finished)
    assert {e.message.session for _, _, e in world.sent if isinstance(e.message, Piece)} == {1, 3}
    assert not world.leftovers()


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_cancel_in_prefill_frees_every_stage_within_one_step(num_stages: int) -> None:
    """The end overtakes queued pieces: a stage runs at most the piece it is in when the end reaches it."""
    world = RingWorld(head_config(num_stages, prefill_chunk=4), SLOW, links=[Link(0.010)] * num_stages)
    outcome = world.open(request("a", 400, 4))
    world.cancel("a", at_s=0.5)
    world.run_until(0.5 + 0.080)
    assert not world.engines[0].caches
    world.run_until(0.5 + 0.080 + 2 * 0.090 * num_stages)
    assert isinstance(outcome.end, Finished)
    assert (outcome.end.reason, outcome.tokens) == ("cancelled", [])
    assert not world.leftovers()
    done = [len(engine.works) for engine in world.engines]
    world.run_until_quiet()
    assert [len(engine.works) for engine in world.engines] == done


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_cancel_in_decode_frees_every_stage_within_one_step(num_stages: int) -> None:
    world = RingWorld(head_config(num_stages), ENDLESS, links=[Link(0.010)] * num_stages)
    outcome = world.open(request("a", 4))
    other = request("other", 6, 300)
    staying = world.open(other)
    world.cancel("a", at_s=0.7)
    world.run_until(0.7 + 0.016 * num_stages)
    assert isinstance(outcome.end, Finished)
    assert outcome.end.completion_tokens == len(outcome.tokens) > 0
    assert [engine.caches for engine in world.engines] == [{2}] * num_stages
    world.run_until_quiet()
    assert staying.tokens == tokens_alone(ENDLESS, other)
    assert not world.leftovers()


@pytest.mark.parametrize("num_stages", [2, 3])
def test_the_end_goes_out_on_both_lanes_and_its_answer_frees_the_reservation(num_stages: int) -> None:
    world = RingWorld(head_config(num_stages), ENDLESS)
    world.open(request("a", 4, 2))
    held_at: list[float] = []
    world.watch = lambda w: held_at.append(w.now_s) if w.head.admission.budget.used_tokens else None
    world.run_until_quiet()
    ends = [(stage, e.lane) for _, stage, e in world.sent if isinstance(e.message, End)]
    assert sorted(ends) == [(stage, lane) for stage in range(num_stages - 1) for lane in ("act", "pre")]
    (answered_s,) = [at for at, _, e in world.sent if isinstance(e.message, Ended)]
    assert answered_s <= max(held_at) < answered_s + 0.010
    assert not world.leftovers()


@pytest.mark.parametrize("slow_lane_s", [0.0, 0.5])
def test_an_end_that_overtakes_pieces_leaves_a_floor(slow_lane_s: float) -> None:
    """Both ends reach stage 1 while pieces of the session still stand in its queue: none of them may run."""
    world = RingWorld(head_config(3, prefill_chunk=4), SLOW, links=[Link(0.001), Link(slow_lane_s), Link(0.001)])
    world.open(request("other", 40, 4))
    world.open(request("a", 40, 4))
    world.cancel("a", at_s=0.25)
    world.run_until_quiet()
    assert not world.leftovers()


def test_a_cancelled_request_gets_no_further_token() -> None:
    world = RingWorld(head_config(3), ENDLESS, links=[Link(0.05)] * 3)
    outcome = world.open(request("a", 4))
    world.cancel("a", at_s=1.0)
    world.cancel("a", at_s=1.1)
    world.run_until_quiet()
    assert len(outcome.ends) == 1
    assert isinstance(outcome.events[-1][1], Finished)
    assert max(at for at, e in outcome.events if isinstance(e, Sampled)) <= 1.0


def test_cancel_of_someone_unknown_is_nothing() -> None:
    world = RingWorld(head_config(2), ENDLESS)
    world.cancel("nobody")
    world.run_until_quiet()
    assert world.sent == []


def test_a_group_goes_on_without_the_row_that_ended() -> None:
    """The cancel meets a group between stage 1 and 2: the others' rows go on, theirs is dropped, nobody waits."""
    world = RingWorld(head_config(2), Script(default=(9,), then="repeat", decode_ms=50), links=[Link(0.02)] * 2)
    outcomes = [world.open(request(f"r{i}", 4, 20)) for i in range(4)]
    world.cancel("r1", at_s=1.03)
    world.run_until_quiet()
    assert [len(o.tokens) for i, o in enumerate(outcomes) if i != 1] == [20] * 3
    after = [e.message for at, _, e in world.sent if isinstance(e.message, Group) and at > 1.05]
    assert after
    assert not any(row.session == 2 for group in after for row in group.rows)
    assert not world.leftovers()


@given(
    num_stages=st.integers(1, 4),
    cancel_ms=st.lists(st.integers(0, 600), min_size=4, max_size=4),
    prompts=st.lists(st.integers(1, 60), min_size=4, max_size=4),
    latency_ms=st.lists(st.sampled_from([0, 1, 30, 200]), min_size=4, max_size=4),
    max_in_flight=st.integers(1, 4),
)
@settings(max_examples=80, deadline=None)
def test_cancel_at_any_moment_leaves_nothing(
    num_stages: int, cancel_ms: list[int], prompts: list[int], latency_ms: list[int], max_in_flight: int
) -> None:
    links = [Link(ms / 1e3) for ms in latency_ms[:num_stages]]
    config = head_config(num_stages, max_in_flight=max_in_flight)
    world = RingWorld(config, Script(default=(9,), then="repeat", prefill_ms_per_token=3, decode_ms=7), links=links)
    outcomes = [world.open(request(f"r{i}", n, 25)) for i, n in enumerate(prompts)]
    for i, ms in enumerate(cancel_ms):
        world.cancel(f"r{i}", at_s=ms / 1e3)
    world.run_until_quiet()
    assert all(len(o.ends) == 1 for o in outcomes)
    assert not world.leftovers()
