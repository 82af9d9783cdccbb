"""A ring that was lost and linked anew (DESIGN section 7, broken/reset): what every stage has parked goes on."""

from __future__ import annotations

import pytest
from chain_world import ChainWorld
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_world import Link, Request, head_config

from swarmnode.ids import SessionId
from swarmnode.ring.head_messages import Finished, Refused
from swarmnode.ring.messages import Broken, Drop, Envelope, Probe, Reset
from swarmnode.ring.work import Sampling

NEVER = 1 << 40
SYSTEM = tuple(range(1, 41))


def ring(num_stages: int, **changes: object) -> ChainWorld:
    settings = {"prefix_reuse": True, "prefill_chunk": 16}
    world = ChainWorld(head_config(num_stages, **(settings | changes)), eos_every=NEVER)
    world.probe()
    world.run_until_quiet()
    return world


def chat(world: ChainWorld, name: str, prompt: tuple[int, ...], new: int = 4) -> tuple[int, ...]:
    world.ask(Request(name, prompt, new, Sampling()))
    world.run_until_quiet()
    return prompt + tuple(world.outcomes[name].tokens)


def refusal(world: ChainWorld, name: str) -> Refused:
    end = world.outcomes[name].end
    assert isinstance(end, Refused)
    return end


def cached(world: ChainWorld, name: str) -> int:
    end = world.outcomes[name].end
    assert isinstance(end, Finished)
    return end.cached_tokens


def from_head(world: ChainWorld, since_s: float) -> list[Envelope]:
    return [e for at, stage, e in world.sent if stage == 0 and at >= since_s]


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_everything_ends_once_and_what_was_parked_goes_on_after_the_reset(num_stages: int) -> None:
    world = ring(num_stages)
    first = chat(world, "first", SYSTEM)
    for i in range(3):
        world.ask(Request(f"running{i}", tuple(range(100 * i, 100 * i + 60)), 50, Sampling()))
    world.run_until(world.now_s + 0.2)
    world.lose_link(num_stages - 1)
    world.run_until_quiet()
    assert {refusal(world, f"running{i}").code for i in range(3)} == {"stage_lost"}
    assert "being linked anew" in refusal(world, "running0").message
    assert world.head.snapshot()["kv_reserved_tokens"] == 0
    assert world.head.snapshot()["parked"] == 1
    chat(world, "too-early", SYSTEM)
    assert refusal(world, "too-early").code == "stage_lost"
    assert "being linked anew" in refusal(world, "too-early").message
    since_s = world.now_s
    world.relink()
    world.run_until_quiet()
    sent = from_head(world, since_s)
    assert [type(e.message) for e in sent] == [Probe, Probe, Reset]
    assert sent[2] == Envelope("act", Reset(SessionId(5), (SessionId(1),)))
    assert [p.nonce for p in world.probes] == [1, 2]
    assert [chain.kv_tokens() for chain in world.chains] == [len(first) - 1] * num_stages
    chat(world, "second", (*first, 7))
    assert cached(world, "second") == len(first) - 1
    world.check_the_end()


def test_new_links_are_measured_anew_and_what_steps_cost_stays_known() -> None:
    world = ring(2)
    chat(world, "first", SYSTEM, 20)
    costs = world.head.costs
    steps_ms, pieces_ms = costs.group_ms(1), costs.piece_ms(16)
    assert costs.road_ms < 100
    assert min(steps_ms) > 0
    world.lose_link(0)
    world.links[:] = [Link(0.2), Link(0.1)]
    world.relink()
    world.run_until_quiet()
    assert costs.road_ms == pytest.approx(300)
    assert (costs.group_ms(1), costs.piece_ms(16)) == (steps_ms, pieces_ms)


def test_nothing_but_the_reset_is_sent_until_it_is_back_and_only_then_is_it_probed() -> None:
    world = ring(3)
    chat(world, "first", SYSTEM)
    world.lose_link(0)
    world.run_until_quiet()
    world.relink()
    while not any(isinstance(e.message, Reset) for e in from_head(world, 0.0)):
        world._step()
    since_s = world.now_s
    assert len(world.probes) == 1
    world.ask(Request("between", SYSTEM, 1))
    world.run_until(world.now_s + 0.001)
    assert refusal(world, "between").code == "stage_lost"
    world.run_until_quiet()
    assert [type(e.message) for e in from_head(world, since_s)] == [Reset]
    assert len(world.probes) == 2


@pytest.mark.parametrize("lacking", [1, 2, 3])
def test_what_a_stage_lost_is_parked_nowhere_afterwards(lacking: int) -> None:
    """The stages before it hear of it by a second reset."""
    world = ring(4)
    kept, lost = chat(world, "kept", SYSTEM), chat(world, "lost", tuple(range(500, 550)))
    world.lose_link(lacking)
    world.run_until_quiet()
    del world.stages[lacking - 1]._parked[SessionId(2)]
    world.stages[lacking - 1]._freed.append(SessionId(2))
    world.relink()
    world.run_until_quiet()
    assert [e.message.keep for e in from_head(world, 0.0) if isinstance(e.message, Reset)] == [(1, 2), (1,)]
    assert [chain.kv_tokens() for chain in world.chains] == [len(kept) - 1] * 4
    assert world.head.admission.budget.used_tokens == len(kept) - 1
    chat(world, "again", (*lost, 1))
    assert cached(world, "again") == 0
    world.check_the_end()


@pytest.mark.parametrize("moment", ["probe", "reset"])
def test_a_second_loss_while_it_is_linked_anew_wedges_nothing(moment: str) -> None:
    world = ring(3)
    first = chat(world, "first", SYSTEM)
    world.lose_link(1)
    world.run_until_quiet()
    world.relink()
    kind = Probe if moment == "probe" else Reset
    while not any(isinstance(e.message, kind) for e in from_head(world, world.now_s)):
        world._step()
    world.lose_link(2)
    world.run_until_quiet()
    assert len(world.probes) == 1
    world.relink()
    world.run_until_quiet()
    assert [p.nonce for p in world.probes] == [1, 3]
    chat(world, "second", (*first, 7))
    assert cached(world, "second") == len(first) - 1
    world.check_the_end()


def test_a_probe_that_was_lost_without_a_word_is_followed_by_the_next() -> None:
    world = ring(2)
    world.lose_link(0)
    world.run_until_quiet()
    world.cut.add(0)
    world.probe(7)
    world.run_until_quiet()
    world.relink()
    world.run_until_quiet()
    chat(world, "a", SYSTEM)
    assert isinstance(world.outcomes["a"].end, Finished)
    assert [p.nonce for p in world.probes] == [1, 2]


def test_answers_to_an_earlier_probe_or_reset_are_not_taken_for_this_ones() -> None:
    world = ring(2)
    chat(world, "first", SYSTEM)
    for _ in range(2):
        world.lose_link(0)
        world.run_until_quiet()
        world.probe(7)
        world.probe(8)
        for lane in ("act", "pre"):
            world.inject(0, Envelope("tok", Probe(7, lane)))
        world.run_until_quiet()
    assert not [e for e in from_head(world, 0.0) if isinstance(e.message, Reset)]
    world.relink()
    resets: list[Reset] = []
    while not resets:
        world._step()
        resets = [e.message for e in from_head(world, 0.0) if isinstance(e.message, Reset)]
    world.lose_link(0)
    world.run_until_quiet()
    world.relink()
    while len([e for e in from_head(world, 0.0) if isinstance(e.message, Reset)]) < 2:
        world._step()
    world.inject(0, Envelope("tok", Reset(resets[0].below, ())))
    world.run_until_quiet()
    assert world.head.snapshot()["parked"] == 1
    world.check_the_end()


def test_a_conversation_that_was_about_to_be_parked_is_not() -> None:
    world = ring(3)
    world.ask(Request("first", SYSTEM, 1, Sampling()))
    while not world.head.admission.leaving:
        world._step()
    world.lose_link(0)
    world.relink()
    world.run_until_quiet()
    assert world.head.snapshot()["parked"] == 0
    assert all(chain.kv_tokens() == 0 for chain in world.chains)
    world.check_the_end()


def test_what_was_being_evicted_is_gone() -> None:
    world = ring(3, kv_tokens=100, context_tokens=100)
    chat(world, "first", SYSTEM)
    world.ask(Request("second", tuple(range(500, 560)), 30, Sampling()))
    world.run_until(world.now_s)
    assert any(isinstance(e.message, Drop) for e in from_head(world, 0.0))
    world.lose_link(0)
    world.run_until_quiet()
    world.relink()
    world.run_until_quiet()
    assert all(chain.kv_tokens() == 0 for chain in world.chains)
    chat(world, "third", tuple(range(500, 560)), 30)
    assert isinstance(world.outcomes["third"].end, Finished)
    world.check_the_end()


def test_a_ring_of_one_serves_again_at_the_next_probe() -> None:
    world = ring(1)
    first = chat(world, "first", SYSTEM)
    world.ask(Request("running", SYSTEM, 90, Sampling()))
    world.run_until(world.now_s + 0.1)
    world.inject(0, Envelope("tok", Broken(0)))
    world.run_until_quiet()
    assert refusal(world, "running").code == "stage_lost"
    world.relink()
    chat(world, "second", (*first, 7))
    assert cached(world, "second") == len(first) - 1
    assert world.sent == []
    world.check_the_end()


@given(
    num_stages=st.integers(1, 4),
    total=st.sampled_from([130, 250, 2000]),
    asks=st.lists(
        st.tuples(st.integers(0, 60), st.none() | st.integers(1, 25), st.integers(0, 400)), min_size=2, max_size=9
    ),
    breaks=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 1500), st.sampled_from([0, 3, 40, 300])), min_size=1, max_size=3
    ),
    latency_ms=st.lists(st.sampled_from([0, 1, 15, 120]), min_size=4, max_size=4),
    bytes_per_s=st.sampled_from([None, 2000]),
    max_in_flight=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_losses_at_any_moment_end_each_request_once_and_leave_nothing(
    num_stages: int,
    total: int,
    asks: list[tuple[int, int | None, int]],
    breaks: list[tuple[int, int, int]],
    latency_ms: list[int],
    bytes_per_s: float | None,
    max_in_flight: int,
) -> None:
    config = head_config(
        num_stages,
        kv_tokens=total,
        context_tokens=125,
        typical_tokens=8,
        prefill_chunk=16,
        max_in_flight=max_in_flight,
        prefix_reuse=True,
    )
    links = [Link(ms / 1e3, bytes_per_s=bytes_per_s) for ms in latency_ms[:num_stages]]
    world = ChainWorld(config, links=links, eos_every=40)
    for i, (n, new, at_ms) in enumerate(asks):
        world.ask(Request(f"r{i}", (*SYSTEM, *range(70, 70 + n % 13), *range(300 + i, 300 + i + n)), new), at_ms / 1e3)
    for stage, after_ms, down_ms in breaks:
        world.run_until(world.now_s + after_ms / 1e3)
        world.lose_link(stage % num_stages)
        world.run_until(world.now_s + down_ms / 1e3)
        world.relink()
    world.run_until_quiet()
    last = Request("last", (*SYSTEM, 9, 9), 3)
    world.ask(last)
    world.check_the_end()
    assert isinstance(world.outcomes["last"].end, Finished)
    assert all(len(outcome.ends) == 1 for outcome in world.outcomes.values())
