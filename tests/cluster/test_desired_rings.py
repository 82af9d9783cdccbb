"""When a model whose ring was lost is loaded again, on virtual time."""

from __future__ import annotations

import random

import pytest

from swarmnode.cluster.desired_rings import (
    LOOK_AGAIN_S,
    RETRY_MOST_S,
    RETURN_S,
    STEADY_S,
    DesiredRings,
    LetGo,
    LoadBegun,
    NoPlace,
    Remembered,
    RingEnded,
    RingUp,
    RoomChanged,
)
from swarmnode.ids import ModelId

A, B = ModelId("a"), ModelId("b")
SEEDS = 300


def due(desired: DesiredRings, until_s: float) -> list[tuple[float, ModelId]]:
    """The loads that fall due up to then, each with its time."""
    found = []
    while (at := desired.next_timer()) is not None and at <= until_s:
        desired.handle_timer(at)
        found += [(at, event.model) for event in desired.events()]
    return found


def up_at(now: float) -> DesiredRings:
    desired = DesiredRings()
    desired.receive(RingUp(A), now)
    assert desired.next_timer() is None
    return desired


def test_a_lost_ring_is_loaded_at_once() -> None:
    desired = up_at(0.0)
    desired.receive(RingEnded(A), 1.0)
    assert due(desired, 1.0) == [(1.0, A)]
    assert due(desired, 1e6) == [], "it is said once"


def test_failures_in_a_row_wait_twice_as_long_each_up_to_five_minutes() -> None:
    desired, now, pauses = up_at(0.0), 0.0, []
    for _ in range(10):
        desired.receive(RingEnded(A), now)
        ((at, _),) = due(desired, now + 1000)
        pauses.append(at - now)
        desired.receive(LoadBegun(A), at)
        now = at + 1
    assert pauses == [0, 5, 10, 20, 40, 80, 160, RETRY_MOST_S, RETRY_MOST_S, RETRY_MOST_S]


def test_what_was_lost_again_and_again_has_failed_no_load() -> None:
    """Only the pauses count both."""
    desired, now, counted = up_at(0.0), 0.0, []
    for came_up in (True, True, False, False, True):
        desired.receive(RingEnded(A), now)
        ((now, _),) = due(desired, now + 1000)
        desired.receive(LoadBegun(A), now)
        counted.append(desired.failed_loads(A))
        if came_up:
            desired.receive(RingUp(A), now)
    desired.receive(RingEnded(A), now)
    counted.append(desired.failed_loads(A))
    assert counted == [0, 0, 0, 1, 2, 0]
    assert desired.next_try_s(A) == now + 80


@pytest.mark.parametrize(("ran_s", "pause_s"), [(STEADY_S - 1, 5.0), (STEADY_S, 0.0)])
def test_a_ring_that_ran_for_a_while_begins_anew(ran_s: float, pause_s: float) -> None:
    desired = up_at(0.0)
    desired.receive(RingEnded(A), 100.0)
    assert len(due(desired, 100.0)) == 1
    desired.receive(LoadBegun(A), 100.0)
    desired.receive(RingUp(A), 110.0)
    desired.receive(RingUp(A), 110.0 + ran_s - 0.5)  # said again, it is no new beginning
    desired.receive(RingEnded(A), 110.0 + ran_s)
    assert due(desired, 1e4) == [(110.0 + ran_s + pause_s, A)]


def test_without_a_place_it_is_due_when_a_peer_comes_and_looks_again_by_itself() -> None:
    desired = up_at(0.0)
    desired.receive(RingEnded(A), 0.0)
    assert len(due(desired, 0.0)) == 1
    desired.receive(NoPlace(A), 0.0)
    assert desired.next_try_s(A) == LOOK_AGAIN_S
    desired.receive(RoomChanged(), 3.0)
    assert due(desired, 3.0) == [(3.0, A)]
    desired.receive(NoPlace(A), 3.0)
    assert due(desired, 100.0) == [(3.0 + LOOK_AGAIN_S, A)]


def test_a_peer_that_comes_does_not_shorten_the_wait_after_a_failure() -> None:
    desired = up_at(0.0)
    for now in (0.0, 1.0):
        desired.receive(RingEnded(A), now)
        due(desired, now)
    desired.receive(RoomChanged(), 2.0)
    assert due(desired, 100.0) == [(6.0, A)]


def test_what_is_let_go_or_was_never_up_is_not_loaded() -> None:
    desired = up_at(0.0)
    desired.receive(RingEnded(A), 0.0)
    desired.receive(LetGo(A), 0.0)
    desired.receive(RingEnded(A), 1.0)
    desired.receive(NoPlace(A), 1.0)
    desired.receive(RingEnded(B), 1.0)
    assert (desired.next_timer(), due(desired, 1e6)) == (None, [])


def test_a_load_that_somebody_asks_for_meanwhile_is_that_load() -> None:
    desired = up_at(0.0)
    desired.receive(RingEnded(A), 0.0)
    desired.receive(LoadBegun(A), 0.0)
    assert desired.next_timer() is None


def test_what_a_coordinator_before_wrote_down_waits_for_its_peers_to_return() -> None:
    desired = DesiredRings()
    desired.receive(Remembered(A), 0.0)
    desired.receive(Remembered(B), 0.0)
    desired.receive(RingUp(B), 0.0)  # taken over
    assert due(desired, 1e6) == [(RETURN_S, A)]


def test_seeded_worlds_never_load_twice_and_never_give_up() -> None:
    """Whatever happens in whatever order: a model that is wanted serves, loads, or has a time when it will."""
    loads = 0
    for seed in range(SEEDS):
        chance, desired, now = random.Random(seed), DesiredRings(), 0.0
        state = dict.fromkeys((A, B), "gone")
        for _ in range(80):
            now += chance.expovariate(1 / 20)
            for at, model in due(desired, now):
                assert state[model] == "lost", "neither loaded twice, nor against somebody's word"
                loads += 1
                if chance.random() < 0.4:
                    desired.receive(NoPlace(model), at)
                else:
                    desired.receive(LoadBegun(model), at)
                    state[model] = "loading"
            model = chance.choice([A, B])
            match state[model], chance.choice(["good", "bad", "asked", "let go", "peer"]):
                case _, "peer":
                    desired.receive(RoomChanged(), now)
                case _, "let go":
                    desired.receive(LetGo(model), now)
                    state[model] = "gone"
                case "loading", "good":
                    desired.receive(RingUp(model), now)
                    state[model] = "up"
                case "up" | "loading", "bad":
                    desired.receive(RingEnded(model), now)
                    state[model] = "lost"
                case "lost", "asked":
                    desired.receive(LoadBegun(model), now)
                    state[model] = "loading"
                case "gone", "asked":
                    desired.receive(RingUp(model), now)
                    state[model] = "up"
                case _:
                    pass
            for model, what in state.items():
                at = desired.next_try_s(model)
                assert (at is not None) == (what == "lost"), (seed, model, what)
                assert at is None or at <= now + RETRY_MOST_S
    assert loads > SEEDS
