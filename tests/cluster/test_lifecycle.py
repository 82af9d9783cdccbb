"""L2 and L3: which rings go without being asked to, and which never do."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.cluster.lifecycle import (
    IdleRings,
    IdleTooLong,
    ReplyEnded,
    ReplyStarted,
    RingGone,
    RingServes,
    RingUse,
    Use,
    find_room,
)
from swarmnode.errors import Conflict, LoadRefused, PeerNotFound
from swarmnode.ids import NodeId, RingId

A, B, C = RingId("a"), RingId("b"), RingId("c")
LIMIT_S = 900.0


def run_to(idle: IdleRings, now: float) -> list[IdleTooLong]:
    """Let all timers up to `now` fire."""
    found: list[IdleTooLong] = []
    while (at := idle.next_timer()) is not None and at <= now:
        idle.handle_timer(at)
        found += idle.events()
    return found


def test_l3_a_ring_without_replies_goes_after_the_limit() -> None:
    idle = IdleRings(LIMIT_S)
    idle.receive(RingServes(A), 10.0)
    assert idle.next_timer() == 910.0
    assert run_to(idle, 909.9) == []
    assert run_to(idle, 910.0) == [IdleTooLong(A, LIMIT_S)]
    assert idle.next_timer() is None, "it is said once"


def test_l3_a_reply_that_runs_is_never_reaped_however_long_it_takes() -> None:
    idle = IdleRings(LIMIT_S)
    idle.receive(RingServes(A), 0.0)
    idle.receive(ReplyStarted(A), 100.0)
    idle.receive(ReplyStarted(A), 200.0)
    idle.receive(ReplyEnded(A), 300.0)
    assert run_to(idle, 1e6) == [], "the other one runs still"
    idle.receive(ReplyEnded(A), 1e6)
    assert idle.next_timer() == 1e6 + LIMIT_S


def test_l3_zero_means_never() -> None:
    idle = IdleRings(0)
    idle.receive(RingServes(A), 0.0)
    assert idle.next_timer() is None
    assert idle.last_used_s(A) == 0.0


def test_a_ring_that_is_gone_is_forgotten_and_late_ends_of_its_replies_are_nothing() -> None:
    idle = IdleRings(LIMIT_S)
    idle.receive(RingServes(A), 0.0)
    idle.receive(ReplyStarted(A), 1.0)
    idle.receive(RingGone(A), 2.0)
    idle.receive(ReplyEnded(A), 3.0)
    assert idle.next_timer() is None
    assert idle.last_used_s(A) < 0


class SlowIdle:
    """The rule by its words: for every ring all that was said, read again at every question."""

    def __init__(self) -> None:
        self.said: dict[RingId, list[tuple[float, Use]]] = {}

    def receive(self, message: Use, now: float) -> None:
        self.said.setdefault(message.ring, []).append((now, message))

    def idle(self, now: float) -> set[RingId]:
        found = set()
        for ring, said in self.said.items():
            known, running, last_s = False, 0, 0.0
            for at, message in said:
                if isinstance(message, RingServes):
                    running, last_s, known = (running if known else 0), at, True
                elif isinstance(message, RingGone):
                    known = False
                elif known:
                    running = max(0, running + (1 if isinstance(message, ReplyStarted) else -1))
                    last_s = at
            if known and running == 0 and now - last_s >= LIMIT_S:
                found.add(ring)
        return found


MESSAGES = st.sampled_from([RingServes, ReplyStarted, ReplyEnded, RingGone])


@given(st.lists(st.tuples(MESSAGES, st.sampled_from([A, B]), st.integers(0, 700)), max_size=30))
def test_it_names_the_rings_that_the_rule_names_and_no_others(
    steps: list[tuple[type[RingServes], RingId, int]],
) -> None:
    idle, slow, now = IdleRings(LIMIT_S), SlowIdle(), 0.0
    for kind, ring, pause in steps:
        now += pause
        named = {event.ring for event in run_to(idle, now)}
        assert named == slow.idle(now)
        for gone in named:
            slow.receive(RingGone(gone), now)
        idle.receive(kind(ring), now)
        slow.receive(kind(ring), now)


@dataclass(frozen=True)
class Spot:
    """A fake plan: the peers it lies on."""

    nodes: frozenset[NodeId]


def nodes(text: str) -> frozenset[NodeId]:
    return frozenset(NodeId(letter) for letter in text)


OLD = RingUse(A, "old", nodes("12"), 10.0)
NEW = RingUse(B, "new", nodes("34"), 20.0)


class Peers:
    """Peers 1 to 4, of which each holds one ring; a plan takes the first free ones."""

    def __init__(self, rings: list[RingUse], wanted: int) -> None:
        self.rings, self.wanted = rings, wanted
        self.asked: list[frozenset[RingId]] = []

    def plan(self, gone: frozenset[RingId]) -> Spot:
        self.asked.append(gone)
        held = {node for ring in self.rings if ring.ring not in gone for node in ring.nodes}
        free = [node for node in "1234" if NodeId(node) not in held]
        if len(free) < self.wanted:
            raise LoadRefused(f"{len(free)} free of {self.wanted}")
        return Spot(nodes("".join(free[: self.wanted])))

    def find(self) -> tuple[Spot, tuple[RingId, ...]]:
        return find_room(self.rings, self.plan, lambda spot: spot.nodes)


def test_l2_free_peers_are_taken_and_nothing_is_evicted() -> None:
    assert Peers([OLD], 2).find() == (Spot(nodes("34")), ())


def test_l2_the_oldest_idle_ring_goes_first_and_only_as_many_as_it_takes() -> None:
    assert Peers([NEW, OLD], 2).find() == (Spot(nodes("12")), (A,))
    assert Peers([OLD, replace(NEW, last_used_s=5.0)], 2).find() == (Spot(nodes("34")), (B,))
    assert Peers([NEW, OLD], 3).find() == (Spot(nodes("123")), (A, B))


def test_l2_a_ring_with_running_replies_stays_and_the_next_oldest_goes() -> None:
    assert Peers([replace(OLD, kept_because="2 running there"), NEW], 2).find() == (Spot(nodes("34")), (B,))


def test_l2_where_only_running_rings_are_in_the_way_it_is_a_conflict_that_names_them() -> None:
    rings = [replace(OLD, kept_because="2 running there"), replace(NEW, kept_because="it is loading")]
    with pytest.raises(Conflict, match=r"old \(2 running there\), new \(it is loading\)"):
        Peers(rings, 2).find()


def test_a_load_that_fits_nowhere_is_refused_with_the_numbers_of_the_empty_peers() -> None:
    with pytest.raises(LoadRefused, match="4 free of 5"):
        Peers([OLD, NEW], 5).find()
    with pytest.raises(LoadRefused, match="4 free of 5"):
        Peers([replace(OLD, kept_because="1 running there"), NEW], 5).find()


def test_rings_that_a_plan_does_not_touch_stay() -> None:
    """Thinking the oldest one away did not help; the next one did."""
    third = RingUse(C, "third", nodes("1"), 1.0)
    rings = [third, RingUse(A, "old", nodes("2"), 2.0)]

    def plan(gone: frozenset[RingId]) -> Spot:
        if A not in gone:
            raise LoadRefused("peer 2 already serves old")
        return Spot(nodes("2"))

    assert find_room(rings, plan, lambda spot: spot.nodes) == (Spot(nodes("2")), (A,))


def test_a_mistake_in_the_request_is_told_at_once() -> None:
    def plan(gone: frozenset[RingId]) -> Spot:
        assert not gone
        raise PeerNotFound("no peer is called x")

    with pytest.raises(PeerNotFound):
        find_room([OLD], plan, lambda spot: spot.nodes)
