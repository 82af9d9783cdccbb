"""What the coordinator remembers of machines: newest wins, kinds compare with their own, all of it bounded."""

from __future__ import annotations

import math
from statistics import median

import pytest

from swarmnode.cluster.machine_book import (
    LASTS_S,
    MOST_KINDS,
    MOST_LINKS,
    MOST_NODES,
    MOST_WHY_CHARS,
    STRAGGLES,
    MachineBook,
    StragglerChanged,
    Weights,
)
from swarmnode.cluster.measured import LinkSeen
from swarmnode.ids import BootId, NodeId

A, B, C, D = (NodeId(name) for name in "abcd")
BF16, INT8, OTHER = Weights("m", "bfloat16", "none"), Weights("m", "bfloat16", "int8"), Weights("o", "float32", "none")


def book(*steps: tuple[NodeId, Weights, float]) -> MachineBook:
    """Steps over one GiB each, a second apart."""
    made = MachineBook()
    for second, (node, weights, ms) in enumerate(steps):
        made.note_step(node, weights, ms, 1.0, float(second))
    return made


def test_a_step_counts_by_what_it_reads_and_the_newest_wins() -> None:
    machines = MachineBook()
    machines.note_step(A, BF16, 30.0, 0.5, 0.0)
    assert machines.seen(BF16, 1.0).paces == {A: 60.0}
    machines.note_step(A, BF16, 10.0, 2.0, 1.0)
    assert machines.seen(BF16, 1.0).paces == {A: 5.0}


def test_who_was_never_measured_is_as_fast_as_the_median() -> None:
    seen = book((A, BF16, 10.0), (B, BF16, 20.0), (C, BF16, 90.0)).seen(BF16, 5.0)
    assert (seen.pace_ms(B), seen.pace_ms(D)) == (20.0, 20.0)
    assert D not in seen.paces


def test_steps_over_other_weights_count_by_how_they_compare_there() -> None:
    """B is three times as slow as the median over the other model; its milliseconds there mean nothing here."""
    machines = book((A, OTHER, 100.0), (B, OTHER, 300.0), (C, OTHER, 100.0), (A, BF16, 8.0), (C, BF16, 12.0))
    assert machines.seen(BF16, 9.0).paces == {A: 8.0, C: 12.0, B: 30.0}


def test_weights_that_nobody_ran_are_compared_by_those_that_were_run_last() -> None:
    machines = book((A, OTHER, 100.0), (B, OTHER, 300.0), (A, INT8, 5.0), (B, INT8, 20.0))
    seen = machines.seen(BF16, 9.0)
    assert seen.ordinary_ms == 12.5
    assert seen.paces == {A: 5.0, B: 20.0}


def test_one_machine_alone_compares_with_nobody() -> None:
    assert book((A, OTHER, 100.0)).seen(BF16, 1.0).paces == {}
    assert MachineBook().seen(BF16, 1.0).nothing


def test_what_was_measured_hours_ago_counts_no_more() -> None:
    machines = book((A, BF16, 10.0), (B, BF16, 90.0))
    assert machines.seen(BF16, LASTS_S - 1.0).paces
    assert machines.seen(BF16, LASTS_S).paces == {B: 90.0}
    assert machines.seen(BF16, LASTS_S + 1.0).nothing


def test_a_node_that_starts_anew_may_use_another_device() -> None:
    machines = book((A, BF16, 10.0), (B, BF16, 90.0))
    machines.note_link(B, A, 3.0, None, 1.0)
    machines.came(B, BootId("first"))
    assert machines.seen(BF16, 2.0).paces == {A: 10.0}
    machines.note_step(B, BF16, 90.0, 1.0, 2.0)
    machines.came(B, BootId("first"))
    assert machines.seen(BF16, 2.0).paces == {A: 10.0, B: 90.0}, "it was only connected anew"
    assert machines.seen(BF16, 2.0).links == {(B, A): LinkSeen(3.0)}, "the way to it is the same"


def test_kernels_that_failed_over_some_weights_are_not_tried_again_before_the_node_starts_anew() -> None:
    machines = MachineBook()
    machines.came(A, BootId("first"))
    machines.note_failed(A, INT8, "no such kernel" + "x" * 1000)
    assert {node: why[:14] for node, why in machines.seen(INT8, LASTS_S + 1).failed.items()} == {A: "no such kernel"}
    assert len(machines.seen(INT8, 0.0).failed[A]) == MOST_WHY_CHARS
    assert not machines.seen(BF16, 0.0).failed, "other weights are none of its concern"
    machines.note_step(B, BF16, 1.0, 1.0, 0.0)
    machines.came(A, BootId("first"))
    assert set(machines.seen(INT8, 0.0).failed) == {A}, "it was only connected anew"
    machines.came(A, BootId("second"))
    assert not machines.seen(INT8, 0.0).failed
    for number in range(MOST_KINDS + 1):
        machines.note_failed(A, Weights(str(number), "", "int8"), "no")
    assert not machines.seen(Weights("0", "", "int8"), 0.0).failed
    assert machines.seen(Weights("1", "", "int8"), 0.0).failed == {A: "no"}


@pytest.mark.parametrize(("ms", "gib"), [(0.0, 1.0), (-1.0, 1.0), (math.inf, 1.0), (math.nan, 1.0), (1.0, 0.0)])
def test_numbers_that_are_no_measure_are_none(ms: float, gib: float) -> None:
    machines = MachineBook()
    machines.note_step(A, BF16, ms, gib, 0.0)
    assert machines.seen(BF16, 0.0).nothing


def test_links_keep_what_a_later_report_did_not_measure() -> None:
    machines = MachineBook()
    machines.note_link(A, B, 20.0, 50.0, 0.0)
    machines.note_link(A, B, 30.0, None, 1.0)
    machines.note_link(A, B, None, None, 2.0)
    machines.note_link(A, A, 1.0, None, 2.0)
    assert machines.seen(BF16, LASTS_S).links == {(A, B): LinkSeen(30.0, 50.0)}
    assert machines.seen(BF16, LASTS_S + 1.0).nothing, "it may go another way by now"


def test_who_was_removed_is_forgotten_at_both_ends() -> None:
    machines = book((A, BF16, 10.0), (B, BF16, 90.0))
    for sender, receiver in ((A, B), (B, A), (A, C)):
        machines.note_link(sender, receiver, 5.0, None, 2.0)
    machines.forget(B)
    seen = machines.seen(BF16, 3.0)
    assert (seen.paces, set(seen.links)) == ({A: 10.0}, {(A, C)})


def test_everything_is_bounded_and_the_oldest_goes() -> None:
    machines = MachineBook()
    for number in range(MOST_NODES + 10):
        machines.note_step(NodeId(str(number)), BF16, 1.0, 1.0, 0.0)
    paces = machines.seen(BF16, 0.0).paces
    assert (len(paces), NodeId("9") in paces, NodeId("10") in paces) == (MOST_NODES, False, True)
    for number in range(MOST_KINDS + 1):
        machines.note_step(A, Weights(str(number), "", ""), 1.0, 1.0, 0.0)
    assert A not in machines.seen(Weights("0", "", ""), 0.0).paces
    assert A in machines.seen(Weights("1", "", ""), 0.0).paces
    for number in range(MOST_LINKS + 1):
        machines.note_link(A, NodeId(f"far-{number}"), 1.0, None, 0.0)
    ways = machines.seen(BF16, 0.0).links
    assert (len(ways), (A, NodeId("far-0")) in ways) == (MOST_LINKS, False)


def test_a_straggler_is_told_of_once_and_so_is_its_recovery() -> None:
    machines = book((A, BF16, 10.0), (B, BF16, 19.0))
    assert machines.events() == []
    for second, ms in enumerate((25.0, 17.0, 25.0), start=2):  # between the marks nothing changes
        machines.note_step(B, BF16, ms, 1.0, float(second))
    assert machines.events() == [StragglerChanged(B, True, 2.5)]
    assert (machines.straggles(B), machines.straggles(A)) == (True, False)
    machines.note_step(B, BF16, 14.0, 1.0, 6.0)
    assert machines.events() == [StragglerChanged(B, False, 1.4)]
    assert not machines.straggles(B)


def test_a_straggler_that_nobody_measures_any_more_is_none() -> None:
    machines = book((A, BF16, 10.0), (B, BF16, 90.0))
    machines.events()
    machines.note_step(C, BF16, 10.0, 1.0, 2 * LASTS_S)
    assert machines.events() == [StragglerChanged(B, False, 1.0)]


@pytest.mark.parametrize(
    "paces", [[1.0, 10.0], [1.0, 2.0, 9.0], [1.0, 4.0, 4.5, 30.0], [9.0, 1.0, 2.0, 3.0, 4.0, 70.0]]
)
def test_a_machine_is_compared_with_the_median_of_the_others(paces: list[float]) -> None:
    nodes = [NodeId(str(number)) for number in range(len(paces))]
    machines = book(*((node, BF16, ms) for node, ms in zip(nodes, paces, strict=True)))
    machines.note_step(nodes[0], BF16, paces[0], 1.0, 9.0)
    for place, node in enumerate(nodes):
        others = paces[:place] + paces[place + 1 :]
        assert machines.straggles(node) == (paces[place] / median(others) >= STRAGGLES)
