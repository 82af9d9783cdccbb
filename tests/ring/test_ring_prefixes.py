"""K5: conversations that ended are parked on every stage, and continued by move or copy with the same tokens."""

from __future__ import annotations

from random import Random

import pytest
from chain_world import ChainWorld
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_world import Link, Request, head_config

from swarmnode.ids import SessionId
from swarmnode.ring.head_messages import Finished, Started
from swarmnode.ring.messages import Drop, End, Envelope, Failed, Piece
from swarmnode.ring.parking import MAX_PARKED, PARK_MIN
from swarmnode.ring.work import Continuation, Sampling

NEVER = 1 << 40
SYSTEM = tuple(range(1, 41))


def reusing(num_stages: int, **changes: object) -> ChainWorld:
    settings = {"prefix_reuse": True, "prefill_chunk": 16}
    return ChainWorld(head_config(num_stages, **(settings | changes)), eos_every=NEVER)


def request(name: str, prompt: tuple[int, ...], new: int | None = 4, seed: int = 0) -> Request:
    return Request(name, prompt, new, Sampling(seed=seed))


def chat(world: ChainWorld, name: str, prompt: tuple[int, ...], new: int = 4, seed: int = 0) -> tuple[int, ...]:
    """Ask and wait; the conversation so far."""
    world.ask(request(name, prompt, new, seed))
    world.run_until_quiet()
    return prompt + tuple(world.outcomes[name].tokens)


def finished(world: ChainWorld, name: str) -> Finished:
    end = world.outcomes[name].end
    assert isinstance(end, Finished)
    return end


def starts(world: ChainWorld) -> list[Continuation | None]:
    """Of every first piece, in the order they left stage 0."""
    pieces = [e.message for _, stage, e in world.sent if stage == 0 and isinstance(e.message, Piece)]
    return [piece.start for piece in pieces if piece.sampling is not None]


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_second_turn_reads_only_what_is_new(num_stages: int) -> None:
    world = reusing(num_stages)
    first = chat(world, "first", SYSTEM)
    assert world.head.snapshot()["parked"] == 1
    assert [stage.snapshot()["parked"] for stage in world.stages] == [1] * (num_stages - 1)
    before = [chain.ran_positions for chain in world.chains]
    chat(world, "second", (*first, 77, 78), 1)
    ran = [chain.ran_positions - b for chain, b in zip(world.chains, before, strict=True)]
    assert ran == [3] * num_stages, "the last token of the reply has no KV yet, and two are new"
    assert finished(world, "second").cached_tokens == len(first) - 1
    assert finished(world, "first").cached_tokens == 0
    assert world.head.snapshot()["parked"] == 1, "it was taken over, and parked again as it is now"
    assert sum(chain.copied for chain in world.chains) == 0
    world.check_the_end()


def test_many_chats_with_one_system_prompt_each_keep_their_own() -> None:
    world = reusing(3)
    chat(world, "warm", (*SYSTEM, 1), 1)
    before = world.chains[2].ran_positions
    for i in range(5):
        world.ask(request(f"chat{i}", (*SYSTEM, 100 + i, 200 + i), 3, seed=i))
    world.run_until_quiet()
    assert [finished(world, f"chat{i}").cached_tokens for i in range(5)] == [len(SYSTEM)] * 5
    assert world.chains[2].ran_positions - before == 5 * (2 + 2)
    assert [chain.copied for chain in world.chains] == [5 * len(SYSTEM)] * 3
    assert all(start == Continuation(1, len(SYSTEM), move=False) for start in starts(world)[1:])
    assert world.head.snapshot()["parked"] == 6
    world.check_the_end()


def test_a_session_counts_as_parked_only_when_its_end_came_round() -> None:
    world = reusing(2)
    world.ask(request("first", SYSTEM, 1))
    while not any(isinstance(e.message, End) for _, _, e in world.sent):
        world._step()
    assert [e.message.park for _, _, e in world.sent if isinstance(e.message, End)] == [len(SYSTEM)] * 2
    world.ask(request("at-once", (*SYSTEM, 5)))
    world.ask(request("other", (*SYSTEM[1:], 5)))
    world.run_until(world.now_s + 0.001)
    assert not {"at-once", "other"} & set(world.started), "it waits for the end, and nobody overtakes it"
    world.run_until_quiet()
    assert finished(world, "at-once").cached_tokens == len(SYSTEM)
    assert finished(world, "other").cached_tokens == 0
    world.check_the_end()


def test_reservations_shrink_to_what_is_parked_and_move_with_it() -> None:
    world = reusing(2, kv_tokens=200, context_tokens=200)
    first = chat(world, "first", SYSTEM, 30)
    budget = world.head.admission.budget
    assert budget.used_tokens == world.head.snapshot()["kv_parked_tokens"] == len(first) - 1
    assert world.head.snapshot()["kv_reserved_tokens"] == 0
    seen = set()

    def note(world: ChainWorld) -> None:
        seen.add(world.head.admission.budget.used_tokens)

    world.watch = note  # type: ignore[assignment]
    chat(world, "second", (*first, 7), 9)
    assert max(seen) == len(first) + 1 + 9, "moved, not added"
    world.check_the_end()


def test_a_copy_is_memory() -> None:
    world = reusing(2, kv_tokens=200, context_tokens=200)
    chat(world, "first", (*SYSTEM, 1, 2, 3), 1)
    world.ask(request("second", (*SYSTEM, 9), 9))
    world.run_until(world.now_s)
    assert world.head.admission.budget.used_tokens == len(SYSTEM) + 3 + len(SYSTEM) + 1 + 9
    world.check_the_end()


def test_where_a_copy_has_no_room_the_parked_one_is_taken_over() -> None:
    world = reusing(2, kv_tokens=100, context_tokens=100)
    chat(world, "first", (*SYSTEM, 1, 2, 3), 1)
    chat(world, "second", (*SYSTEM, 9), 30)
    assert starts(world)[1] == Continuation(1, len(SYSTEM), move=True)
    assert not any(isinstance(e.message, Drop) for _, _, e in world.sent)
    assert finished(world, "second").cached_tokens == len(SYSTEM)
    world.check_the_end()


def test_others_leave_for_a_copy_not_its_source() -> None:
    world = reusing(2, kv_tokens=130, context_tokens=130)
    chat(world, "source", (*SYSTEM, 1, 2, 3), 1)
    chat(world, "other", tuple(range(500, 540)), 1)
    chat(world, "copies", (*SYSTEM, 9), 30)
    assert starts(world)[-1] == Continuation(1, len(SYSTEM), move=False)
    assert {e.message.session for _, _, e in world.sent if isinstance(e.message, Drop)} == {2}
    world.check_the_end()


def test_what_was_taken_over_beyond_the_need_is_given_back() -> None:
    world = reusing(2, kv_tokens=100, context_tokens=100)
    chat(world, "first", (*SYSTEM, *range(500, 550)), 1)
    world.ask(request("second", (*SYSTEM, 9), 9))
    world.run_until(world.now_s)
    assert world.head.admission.budget.used_tokens == len(SYSTEM) + 50
    while not world.outcomes["second"].tokens:
        world._step()
    assert world.head.admission.budget.used_tokens == len(SYSTEM) + 1 + 9
    world.check_the_end()


def test_one_that_is_being_copied_from_is_neither_taken_over_nor_sent_away() -> None:
    world = reusing(2, kv_tokens=200, context_tokens=200)
    first = chat(world, "first", SYSTEM, 3)
    world.ask(request("copies", (*SYSTEM, 90), 9))
    world.ask(request("goes-on", (*first, 91), 9))
    world.ask(request("waits", tuple(range(500, 550)), 60))
    world.run_until_quiet()
    assert starts(world)[1:3] == [Continuation(1, 40, move=False), Continuation(1, 42, move=False)]
    copied_s = max(world.outcomes[name].token_times_s[0] for name in ("copies", "goes-on"))
    assert min(at for at, _, e in world.sent if isinstance(e.message, Drop)) >= copied_s
    world.check_the_end()


def test_parked_ones_leave_for_who_waits_the_least_recently_used_first() -> None:
    world = reusing(3, kv_tokens=160, context_tokens=160)
    for i in range(3):
        chat(world, f"old{i}", tuple(range(100 * i, 100 * i + 40)), 1)
    assert world.head.admission.parking.ids == (1, 2, 3)
    chat(world, "again", (*range(100, 140), 7), 2)
    assert world.head.admission.parking.ids == (1, 3, 4)
    world.ask(request("new", tuple(range(500, 550)), 20))
    world.run_until_quiet()
    dropped = [e.message.session for _, stage, e in world.sent if stage == 0 and isinstance(e.message, Drop)]
    assert dropped == [1, 1]
    assert world.head.admission.parking.ids == (3, 4, 5)
    world.check_the_end()


def test_parked_ones_leave_before_anyone_is_paused() -> None:
    world = reusing(2, kv_tokens=150, context_tokens=140, typical_tokens=5)
    chat(world, "parked", SYSTEM, 1)
    world.ask(request("growing", (500, 501), 120))
    world.ask(request("too", (600, 601), None))
    world.run_until_quiet()
    dropped = [e.message.session for _, _, e in world.sent if isinstance(e.message, Drop)]
    assert dropped[0] == 1
    world.check_the_end()


@pytest.mark.parametrize("num_stages", [1, 3])
@pytest.mark.parametrize("at_ms", range(0, 330, 15))
def test_a_cancel_at_any_moment_of_a_continuation_leaves_nothing(num_stages: int, at_ms: int) -> None:
    """Pieces are slow, ends are not: moved on some stages, still parked on others; both are told to go."""
    world = reusing(num_stages, prefill_chunk=32)
    world.links = [Link(0.01, bytes_per_s=2000)] * num_stages
    first = chat(world, "first", SYSTEM, 3)
    chat(world, "other", (*SYSTEM, 3), 3)
    begin_s = world.now_s
    world.ask(request("moves", (*first, *range(300, 340)), 5), begin_s)
    world.ask(request("copies", (*SYSTEM, *range(300, 340)), 5), begin_s)
    world.cancel("moves", begin_s + at_ms / 1e3)
    world.cancel("copies", begin_s + at_ms / 1e3)
    world.check_the_end()


def test_what_was_under_way_at_a_cancel_is_reserved_but_not_continued() -> None:
    world = reusing(2)
    world.ask(request("leaving", tuple(range(1, 200)), 5))
    world.run_until(0.1)
    world.cancel("leaving")
    world.run_until_quiet()
    (parked,) = world.head.admission.parking
    assert PARK_MIN <= parked.length < parked.held_tokens < 199
    assert parked.length % 16 == 0
    chat(world, "again", tuple(range(1, 200)), 2)
    assert finished(world, "again").cached_tokens == parked.length
    world.check_the_end()


@pytest.mark.parametrize("changes", [{"prefix_reuse": False}, {}])
def test_nothing_is_parked_where_that_is_off_or_too_short(changes: dict[str, object]) -> None:
    world = reusing(2, **changes)
    chat(world, "a", SYSTEM if changes else SYSTEM[: PARK_MIN - 2], 2 if changes else 1)
    assert not world.leftovers()


def test_a_recurrent_model_parks_only_what_stands_still_and_continues_it_whole() -> None:
    world = reusing(2, exact_prefix=True)
    first = chat(world, "first", SYSTEM, 3)
    chat(world, "shorter", (*first[:-2], 9), 1)
    assert finished(world, "shorter").cached_tokens == 0
    chat(world, "longer", (*first, 9), 1)
    assert finished(world, "longer").cached_tokens == len(first) - 1
    world.ask(request("leaving", tuple(range(500, 600)), 90))
    world.run_until(world.now_s + 0.3)
    parked = world.head.snapshot()["parked"]
    assert world.head._by_request["leaving"].in_flight
    world.cancel("leaving")
    world.run_until_quiet()
    assert world.head.snapshot()["parked"] == parked
    world.check_the_end()


def test_what_a_stage_lacks_is_read_afresh_once_without_the_clients_notice() -> None:
    world = reusing(3)
    first = chat(world, "first", SYSTEM, 3)
    world.stages[1]._parked.clear()
    world.stages[1]._freed.append(1)
    again = (*first, *range(300, 340))
    chat(world, "second", again, 5)
    end = finished(world, "second")
    assert (end.completion_tokens, end.cached_tokens) == (5, 0)
    assert [start is None for start in starts(world)] == [True, False, True]
    assert [e for _, e in world.outcomes["second"].events if isinstance(e, Started)] == [Started("second")]
    world.check_the_end()


def test_all_who_copy_from_what_a_stage_lacks_read_afresh_and_it_goes() -> None:
    world = reusing(3)
    chat(world, "first", (*SYSTEM, 1), 1)
    world.stages[0]._parked.clear()
    world.stages[0]._freed.append(1)
    for i in range(4):
        world.ask(request(f"r{i}", (*SYSTEM, 50 + i), 5))
    world.run_until_quiet()
    assert all(finished(world, f"r{i}").completion_tokens == 5 for i in range(4))
    assert 1 not in world.head.admission.parking.ids
    world.check_the_end()


def test_a_ring_without_a_waiting_room_lets_parked_ones_leave_for_a_request() -> None:
    world = reusing(2, kv_tokens=100, context_tokens=100, max_waiting=0)
    chat(world, "first", tuple(range(500, 590)), 1)
    chat(world, "second", SYSTEM, 40)
    assert finished(world, "second").completion_tokens == 40
    world.check_the_end()


def test_what_a_stage_failed_after_its_end_was_sent_is_not_kept() -> None:
    world = reusing(3)
    world.ask(request("first", SYSTEM, 1))
    while not world.head.admission.leaving:
        world._step()
    world.inject(0, Envelope("tok", Failed(SessionId(1), 0, "stage_failed", "stage 1: late")))
    world.run_until_quiet()
    assert world.head.snapshot()["parked"] == 0
    assert not world.leftovers()
    assert finished(world, "first").completion_tokens == 1


def test_a_source_that_failed_one_goes_when_the_last_who_copies_has_its_copy() -> None:
    world = reusing(3)
    chat(world, "first", (*SYSTEM, 1), 1)
    world.ask(request("copies", (*SYSTEM, 50), 5))
    world.ask(request("fails", (*SYSTEM, 60), 5))
    while len(starts(world)) < 3:
        world._step()
    world.inject(0, Envelope("tok", Failed(SessionId(3), 0, "cache_gap", "stage 1: gone")))
    world.run_until_quiet()
    assert finished(world, "copies").cached_tokens == len(SYSTEM)
    assert finished(world, "fails").cached_tokens == 0
    assert 1 not in world.head.admission.parking.ids
    world.check_the_end()


def test_no_more_are_parked_than_a_reset_can_name() -> None:
    world = reusing(1, kv_tokens=1 << 20, max_waiting=1000)
    for i in range(MAX_PARKED + 9):
        world.ask(request(f"r{i}", (i, *SYSTEM), 1))
    world.run_until_quiet()
    assert len(world.head.admission.parking) == MAX_PARKED
    assert world.head.admission.parking.ids[0] == 10
    world.check_the_end()


def test_fewer_are_parked_where_each_costs_more_than_its_tokens() -> None:
    few = reusing(2, max_parked=2)
    for i in range(4):
        chat(few, f"chat{i}", (100 + i, *SYSTEM), 1)
    assert len(few.head.admission.parking) == 2
    few.check_the_end()


@pytest.mark.parametrize("seed", range(3))
def test_forty_requests_up_to_sixteen_at_once_with_long_prompts_and_cancels(seed: int) -> None:
    """Room for three or four of them: everything pauses, parks and leaves, and at the end nothing is left."""
    random = Random(seed)
    world = ChainWorld(
        head_config(
            3,
            kv_tokens=900,
            context_tokens=500,
            typical_tokens=16,
            prefill_chunk=64,
            max_in_flight=16,
            max_waiting=40,
            prefix_reuse=True,
        ),
        links=[Link(0.01, 0.01)] * 3,
        seed=seed,
        eos_every=60,
    )
    for i in range(40):
        own = tuple(range(1000 * i, 1000 * i + random.choice([1, 9, 250])))
        new = random.choice([None, None, None, 5, 100])
        at_s = random.uniform(0, 4)
        world.ask(request(f"r{i}", SYSTEM * random.randrange(1, 4) + own, new, seed=i), at_s)
        if i % 5 == 0:
            world.cancel(f"r{i}", at_s + random.uniform(0, 3))
    world.check_the_end()
    assert world.most_paused > 0
    assert any(start is not None for start in starts(world))
    assert any(isinstance(e.message, Drop) for _, _, e in world.sent)


@given(
    num_stages=st.integers(1, 4),
    total=st.integers(150, 500),
    turns=st.lists(
        st.tuples(
            st.integers(0, 3),  # which conversation goes on, or begins anew
            st.booleans(),
            st.integers(1, 30),
            st.none() | st.integers(1, 25),
            st.integers(0, 900),
        ),
        min_size=2,
        max_size=9,
    ),
    cancels=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 1500)), max_size=3),
    latency_ms=st.lists(st.sampled_from([0, 1, 15, 120]), min_size=4, max_size=4),
    jitter_ms=st.sampled_from([0, 25]),
    bytes_per_s=st.sampled_from([None, 2000]),
    chunk=st.sampled_from([0, 7, 32]),
    max_in_flight=st.integers(1, 5),
    schedule=st.sampled_from(["cost", "source"]),
    exact=st.booleans(),
    eos_every=st.sampled_from([15, NEVER]),
)
@settings(max_examples=80, deadline=None)
def test_conversations_of_any_kind_keep_their_tokens_and_the_memory_its_bounds(
    num_stages: int,
    total: int,
    turns: list[tuple[int, bool, int, int | None, int]],
    cancels: list[tuple[int, int]],
    latency_ms: list[int],
    jitter_ms: int,
    bytes_per_s: float | None,
    chunk: int,
    max_in_flight: int,
    schedule: str,
    exact: bool,
    eos_every: int,
) -> None:
    config = head_config(
        num_stages,
        kv_tokens=total,
        context_tokens=140,
        typical_tokens=8,
        prefill_chunk=chunk,
        max_in_flight=max_in_flight,
        schedule=schedule,
        prefix_reuse=True,
        exact_prefix=exact,
    )
    links = [Link(ms / 1e3, jitter_ms / 1e3, bytes_per_s) for ms in latency_ms[:num_stages]]
    world = ChainWorld(config, links=links, eos_every=eos_every)
    for i, at_ms in cancels:
        world.cancel(f"r{i}", at_ms / 1e3)
    said: dict[int, tuple[int, ...]] = {}
    for i, (which, anew, n, new, after_ms) in enumerate(turns):
        past = SYSTEM if anew else said.get(which, SYSTEM)
        prompt = (*past, *range(1000 * which, 1000 * which + n))[-110:]
        world.ask(request(f"r{i}", prompt, new, seed=i))
        world.run_until(world.now_s + after_ms / 1e3)
        said[which] = prompt + tuple(world.outcomes[f"r{i}"].tokens)
    world.check_the_end()
    order = [f"r{i}" for i in range(len(turns))]
    assert world.started == [name for name in order if name in world.started], "nobody overtakes"
