"""K1, K2, R6: what is refused at the door, who waits, and what a session may hold."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_world import GREEDY, Link, Outcome, Request, RingWorld, head_config

from swarmnode.compute.script import Script
from swarmnode.ids import RequestId, SessionId
from swarmnode.ring.head import Head
from swarmnode.ring.head_config import MAX_IN_FLIGHT
from swarmnode.ring.head_messages import Accepted, Finished, Open, Refused, Started
from swarmnode.ring.kv_budget import GROWTH_TOKENS, KvBudget

ENDLESS = Script(default=(9,), then="repeat", prefill_ms_per_token=1, decode_ms=5)


def request(name: str, prompt: int, new: int | None = None) -> Request:
    return Request(name, tuple(range(1, prompt + 1)), new)


def refusal(outcome: Outcome) -> Refused:
    assert isinstance(outcome.end, Refused)
    return outcome.end


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        (
            1500,
            501,
            "this conversation needs 2,001 tokens (1,500 of prompt + 501 of max_tokens); "
            "the ring serving this model holds 2,000",
        ),
        (
            2000,
            None,
            "this conversation needs 2,001 tokens (2,000 of prompt and its reply); "
            "the ring serving this model holds 2,000",
        ),
    ],
)
def test_k2_what_can_never_fit_is_refused_with_the_numbers(prompt: int, new: int | None, message: str) -> None:
    world = RingWorld(head_config(2, context_tokens=2000), ENDLESS)
    outcome = world.open(request("a", prompt, new))
    world.run_until_quiet()
    assert outcome.events == [(0.0, Refused("a", "context_too_long", message))]
    assert world.sent == []
    assert not world.leftovers()


@pytest.mark.parametrize(("context", "budget"), [(2000, 4000), (4000, 2000)])
def test_k2_the_smaller_of_context_and_budget_is_the_limit(context: int, budget: int) -> None:
    world = RingWorld(head_config(2, context_tokens=context, kv_tokens=budget, prefill_chunk=0), ENDLESS)
    fits, too_long = world.open(request("fits", 1990, 10)), world.open(request("long", 1990, 11))
    world.run_until_quiet()
    assert isinstance(fits.end, Finished)
    assert refusal(too_long).code == "context_too_long"


def test_k1_a_session_reserves_its_prompt_and_reply_until_it_ends() -> None:
    world = RingWorld(head_config(2), ENDLESS)
    seen = set()
    world.watch = lambda w: seen.add(w.head.admission.budget.used_tokens)
    world.open(request("a", 30, 12))
    world.run_until_quiet()
    assert seen == {42, 0}


def test_k1_the_next_in_line_waits_and_order_is_kept() -> None:
    """B does not fit beside A; C would, but waits behind B."""
    world = RingWorld(head_config(2, kv_tokens=100, context_tokens=100), ENDLESS)
    a = world.open(request("a", 40, 20))
    b = world.open(request("b", 40, 20))
    c = world.open(request("c", 4, 4))
    world.run_until_quiet()
    started = {name: o.seconds_of(Started) for name, o in (("a", a), ("b", b), ("c", c))}
    assert started["a"] == 0.0
    assert started["b"] > a.seconds_of(Finished)
    assert started["c"] == started["b"]
    assert max(o.seconds_of(Accepted) for o in (a, b, c)) < started["b"]


def test_r6_no_more_than_max_in_flight_run() -> None:
    world = RingWorld(head_config(2, max_in_flight=2), ENDLESS)
    most = []
    world.watch = lambda w: most.append(w.head.snapshot()["running"])
    outcomes = [world.open(request(f"r{i}", 4, 4)) for i in range(7)]
    world.run_until_quiet()
    assert max(most) == 2
    started = [o.seconds_of(Started) for o in outcomes]
    assert started == sorted(started)


def test_r6_more_than_a_group_can_name_never_run_whatever_was_configured() -> None:
    head = Head(head_config(2, max_in_flight=1 << 20, kv_tokens=1 << 20, max_waiting=4))
    head.receive(Open(RequestId("a"), (1, 2), 2, GREEDY), 0.0)
    (first,) = head._sessions.running()
    head.admission.waiting.append(first)
    assert head.admission.next_move([first] * MAX_IN_FLIGHT) is None
    assert head.admission.next_move([first] * (MAX_IN_FLIGHT - 1)) is not None


def test_r6_the_waiting_room_is_bounded() -> None:
    world = RingWorld(head_config(2, max_in_flight=1, max_waiting=2), ENDLESS)
    outcomes = [world.open(request(f"r{i}", 4, 4)) for i in range(5)]
    world.run_until_quiet()
    assert [type(o.end) for o in outcomes] == [Finished] * 3 + [Refused] * 2
    assert refusal(outcomes[3]) == Refused("r3", "overloaded", "2 requests are already waiting; try again later")
    assert len(outcomes[3].events) == 1


def test_r6_a_ring_without_a_waiting_room_still_serves_who_need_not_wait() -> None:
    world = RingWorld(head_config(2, max_in_flight=1, max_waiting=0), ENDLESS)
    first, second = world.open(request("first", 4, 4)), world.open(request("second", 4, 4))
    third = world.open(request("third", 4, 4), at_s=5.0)
    world.run_until_quiet()
    assert isinstance(first.end, Finished)
    assert refusal(second).code == "overloaded"
    assert isinstance(third.end, Finished)


def test_a_refusal_changes_nothing_for_the_others() -> None:
    def timeline(*extra: Request) -> list[tuple[float, object]]:
        world = RingWorld(head_config(2, context_tokens=500), ENDLESS)
        outcome = world.open(request("a", 9, 9))
        for one in extra:
            world.open(one, at_s=0.01)
        world.run_until_quiet()
        return list(outcome.events)

    assert timeline(request("long", 499, 9)) == timeline()


def test_k1_without_max_tokens_a_typical_chat_is_reserved_and_grows() -> None:
    world = RingWorld(head_config(2, typical_tokens=10, kv_tokens=2000, context_tokens=600), ENDLESS)
    seen: list[int] = []
    world.watch = lambda w: seen.append(w.head.admission.budget.used_tokens)
    outcome = world.open(request("a", 50))
    world.run_until_quiet()
    held = sorted(set(seen))
    assert held == [0, 60, 61 + GROWTH_TOKENS, 62 + 2 * GROWTH_TOKENS, 600]
    assert isinstance(outcome.end, Finished)
    assert (outcome.end.reason, outcome.end.completion_tokens) == ("length", 550)


def test_k1_growth_takes_what_is_left_and_ends_with_length_only_when_nothing_is() -> None:
    world = RingWorld(head_config(2, typical_tokens=10, kv_tokens=100, context_tokens=100), ENDLESS)
    outcome = world.open(request("a", 50))
    world.run_until_quiet()
    assert isinstance(outcome.end, Finished)
    assert (outcome.end.reason, outcome.end.completion_tokens) == ("length", 50)


def test_k1_growth_beside_others_ends_with_length_when_the_budget_is_full() -> None:
    world = RingWorld(head_config(2, typical_tokens=10, kv_tokens=200, context_tokens=200), ENDLESS)
    growing = world.open(request("growing", 50))
    fixed = world.open(request("fixed", 30, 90))
    world.run_until_quiet()
    assert isinstance(growing.end, Finished)
    assert growing.end.reason == "length"
    assert growing.end.completion_tokens >= 200 - 120 - 50
    assert isinstance(fixed.end, Finished)
    assert fixed.end.completion_tokens == 90
    assert not world.leftovers()


def test_an_explicit_max_tokens_never_ends_early_for_want_of_room() -> None:
    world = RingWorld(head_config(3, kv_tokens=300, context_tokens=300), ENDLESS, links=[Link(0.001)] * 3)
    outcomes = [world.open(request(f"r{i}", 20, 70)) for i in range(8)]
    world.run_until_quiet()
    assert [o.end.completion_tokens for o in outcomes if isinstance(o.end, Finished)] == [70] * 8


def test_stops_are_named() -> None:
    script = Script(default=(9, 9, 9, 0, 9, 9), decode_ms=5)
    world = RingWorld(head_config(2), script)
    by_model = world.open(request("model", 4))
    by_length = world.open(request("length", 4, 2))
    by_text = world.open(request("text", 4, 50))
    world.cancel("text", at_s=0.02, reason="stop")
    both = world.open(request("both", 4, 4))
    world.run_until_quiet()
    reasons = [o.end.reason for o in (by_model, by_length, by_text, both) if isinstance(o.end, Finished)]
    assert reasons == ["stop", "length", "stop", "stop"]
    assert by_model.tokens == [9, 9, 9, 0]


@given(
    total=st.integers(1, 500),
    asks=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 300), st.booleans()), max_size=40),
)
@settings(deadline=None)
def test_the_budget_is_the_sum_of_what_is_held(total: int, asks: list[tuple[int, int, bool]]) -> None:
    budget, held = KvBudget(total), dict.fromkeys(range(1, 6), 0)
    for session, tokens, release in asks:
        if release:
            budget.release(SessionId(session))
            held[session] = 0
            continue
        fits = sum(held.values()) - held[session] + max(tokens, held[session]) <= total
        assert budget.reserve(SessionId(session), tokens) is fits
        held[session] = max(tokens, held[session]) if fits else held[session]
        assert [budget.held_by(SessionId(s)) for s in held] == list(held.values())
        assert budget.used_tokens == sum(held.values()) == total - budget.free_tokens
