"""Predicted paces: hops that were measured or are estimated, and the search against every ring there is."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.cluster import ring_pace
from swarmnode.cluster.measured import LinkSeen, Measured
from swarmnode.cluster.ring_pace import MOST_TRIED, RingPace, fastest, predict
from swarmnode.ids import NodeId

HOME, A, B, C, D = (NodeId(name) for name in ("home", "a", "b", "c", "d"))


def trips(**known: float) -> Measured:
    """Round trips by the two letters of their ends; h is the coordinator."""
    ends = {"h": HOME, "a": A, "b": B, "c": C, "d": D}
    return Measured(links={(ends[way[0]], ends[way[1]]): LinkSeen(ms) for way, ms in known.items()})


@pytest.mark.parametrize(
    ("known", "hop_ms"),
    [
        ({"ab": 8.0, "ba": 100.0, "ah": 50.0}, 4.0),  # measured
        ({"ba": 100.0, "ah": 2.0}, 50.0),  # the way back
        ({"ah": 60.0, "bh": 2.0}, 30.0),  # who is far from the coordinator is far from this one
        ({"ac": 60.0, "ah": 2.0, "cb": 4.0}, 2.0),  # the peer at c is behind a slow way, a is not
        ({"ca": 90.0, "ah": 2.0}, 1.0),  # that c's way to a is slow may be c's fault
        ({"cb": 90.0, "ah": 2.0}, 45.0),  # whoever dials b needs as long
        ({"cd": 6.0, "dc": 10.0}, 4.0),  # nothing of either: as others
        ({}, 0.0),
    ],
)
def test_a_hop_is_half_a_round_trip_measured_or_estimated(known: dict[str, float], hop_ms: float) -> None:
    assert trips(**known).hop_ms(A, B, 0) == hop_ms


def test_a_slow_uplink_takes_its_time_for_the_bytes() -> None:
    slow = Measured(links={(A, B): LinkSeen(20.0, 1.0), (B, A): LinkSeen(20.0, 100.0)})
    assert slow.hop_ms(A, B, 1000) == 14.0  # 8 ms for the bytes, which the 20 hold, and 6 for the way
    assert slow.hop_ms(A, B, 10_000) == 80.0
    assert slow.hop_ms(A, C, 1000) == 14.0, "its uplink is the same for all"
    assert slow.hop_ms(B, A, 1000) == pytest.approx(10.04)


def test_a_ring_is_its_stages_and_the_ways_between_them() -> None:
    measured = Measured({A: 10.0, B: 40.0}, 25.0, {(A, B): LinkSeen(6.0), (B, A): LinkSeen(2.0)})
    pace = predict([A, B], [2.0, 1.0], 0, measured)
    assert pace == RingPace((20.0, 40.0), (3.0, 1.0))
    assert (pace.round_ms, pace.bottleneck_ms, pace.cost_ms) == (64.0, 40.0, 104.0)
    assert predict([C], [2.0], 0, measured) == RingPace((50.0,), ())


@settings(deadline=None, max_examples=60)
@given(
    paces=st.lists(st.floats(1, 100), min_size=4, max_size=6),
    work=st.lists(st.floats(0.1, 4), min_size=1, max_size=3),
    legs=st.lists(st.floats(0, 200), min_size=36, max_size=36),
)
def test_no_ring_of_a_few_peers_is_faster_than_the_one_found(
    paces: list[float], work: list[float], legs: list[float]
) -> None:
    nodes = [NodeId(str(number)) for number in range(len(paces))]
    ways = {(a, b): LinkSeen(legs[6 * i + j]) for i, a in enumerate(nodes) for j, b in enumerate(nodes) if a != b}
    measured = Measured(dict(zip(nodes, paces, strict=True)), 1.0, ways)
    found = fastest([nodes] * len(work), work, 0, measured, lambda _stage, _node: True)[0]
    best = min(predict(ring, work, 0, measured).cost_ms for ring in permutations(nodes, len(work)))
    assert predict(found, work, 0, measured).cost_ms == pytest.approx(best)


def test_who_does_not_fit_a_stage_is_not_put_there() -> None:
    measured = Measured({A: 1.0, B: 2.0, C: 3.0}, 2.0)
    rings = fastest([[A, B, C]] * 2, [1.0, 1.0], 0, measured, lambda stage, node: not (stage == 0 and node == A))
    assert rings[0] == (B, A)
    assert fastest([[A, B]] * 2, [1.0, 1.0], 0, measured, lambda stage, _node: stage == 0) == []


def test_a_stage_that_is_spoken_for_keeps_its_peer() -> None:
    measured = Measured({A: 1.0, B: 2.0, C: 30.0}, 2.0)
    assert fastest([[C], [A, B]], [1.0, 1.0], 0, measured, lambda _stage, _node: True)[0] == (C, A)


def test_a_large_swarm_is_searched_and_a_far_better_ring_is_found() -> None:
    """Twenty of five hundred machines are ten times as fast as the rest."""
    nodes = [NodeId(str(number)) for number in range(500)]
    measured = Measured({node: 1.0 if number % 25 == 0 else 10.0 for number, node in enumerate(nodes)}, 10.0)
    found = fastest([nodes] * 6, [1.0] * 6, 0, measured, lambda _stage, _node: True)[0]
    assert predict(found, [1.0] * 6, 0, measured).round_ms == 6.0


@pytest.mark.parametrize(("stages", "peers"), [(16, 40), (4, 500), (40, 60)])
def test_a_search_tries_a_bounded_number_of_beginnings(
    stages: int, peers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs on the coordinator's loop, which answers beats meanwhile."""
    nodes = [NodeId(str(number)) for number in range(peers)]
    measured = Measured({node: 10.0 + number * 7 % 13 for number, node in enumerate(nodes)}, 10.0)
    made: list[ring_pace._Begun] = []
    begun = ring_pace._Begun

    def counted(*values: Any) -> ring_pace._Begun:
        made.append(begun(*values))
        return made[-1]

    monkeypatch.setattr(ring_pace, "_Begun", counted)
    found = fastest([nodes] * stages, [1.0] * stages, 0, measured, lambda _stage, _node: True)[0]
    assert len(set(found)) == stages
    assert stages < len(made) <= MOST_TRIED + 1


def test_who_keeps_the_files_comes_first_however_slow() -> None:
    measured = Measured({A: 1.0, B: 2.0, C: 3.0, D: 90.0}, 2.0)
    kept = {(0, D): 0, (1, D): 2, (0, B): 1, (1, B): 1}
    rings = fastest(
        [[A, B, C, D]] * 2, [1.0] * 2, 0, measured, lambda *_: True, lambda stage, node: kept.get((stage, node), 4)
    )
    assert rings[0] == (D, B)
    assert fastest([[A, B, C, D]] * 2, [1.0] * 2, 0, measured, lambda *_: True)[0] == (A, B)
