"""A ring whose coordinator was away: its stages are asked nothing but to link anew, or lost with a reason."""

from __future__ import annotations

from swarmnode.cluster.ring_life import ADOPT_S, RingLife, RingState
from swarmnode.cluster.ring_life_messages import (
    ProbeReturned,
    RingLost,
    RingOver,
    RingParted,
    RingRelinked,
    SendLink,
    SendLoad,
    SendProbe,
    SendUnload,
    StageDown,
    StageLinked,
    StageReady,
    StageUnloaded,
    UnloadAsked,
)
from swarmnode.ids import NodeId

NODES = [NodeId("a"), NodeId("b")]
BROKEN = StageDown(1, "stage_lost", "saw a link end", symptom=True, links=3)


def adopted() -> RingLife:
    return RingLife(NODES, 0.0, adopted=True)


def returned(life: RingLife, links: int = 3) -> None:
    for stage in range(len(NODES)):
        life.receive(StageReady(stage, f"host:{stage}", 4096, links - stage), 5.0)


def test_nothing_is_loaded_again() -> None:
    life = adopted()
    assert life.outgoing() == []
    assert life.state is RingState.ADOPTING
    returned(life)
    assert not [command for command in life.outgoing() if isinstance(command, SendLoad)]


def test_once_all_stages_are_back_they_are_linked_under_a_link_epoch_nobody_has_seen() -> None:
    life = adopted()
    returned(life, links=3)
    assert life.outgoing() == [SendLink(0, "host:1", 4), SendLink(1, "host:0", 4)]
    for stage in range(2):
        life.receive(StageLinked(stage, 4), 6.0)
    assert life.outgoing() == [SendProbe()]
    life.receive(ProbeReturned(), 6.0)
    assert life.state is RingState.READY
    assert [type(event) for event in life.events()] == [RingParted, RingRelinked]
    assert life.kv_tokens == 4096


def test_a_stage_that_does_not_come_back_loses_the_ring_by_name() -> None:
    life = adopted()
    life.receive(StageReady(0, "host:0", 4096, 0), 5.0)
    assert life.next_timer() == ADOPT_S
    life.handle_timer(ADOPT_S)
    (lost,) = life.events()
    assert isinstance(lost, RingLost)
    assert (lost.was_ready, lost.message) == (True, f"stage 1 did not come back within {ADOPT_S:.0f} s")
    assert life.outgoing() == [SendUnload(0)], "the other is not there to be told"
    life.receive(StageUnloaded(0), 61.0)
    assert life.events() == [RingOver()]


def test_what_its_links_went_through_meanwhile_is_no_loss() -> None:
    life = adopted()
    life.receive(BROKEN, 1.0)
    assert life.state is RingState.ADOPTING
    returned(life)
    assert life.state is RingState.RELINKING


def test_a_stage_that_failed_meanwhile_loses_it_at_once() -> None:
    life = adopted()
    life.receive(StageDown(1, "stage_lost", "its worker ended"), 1.0)
    lost, _ = life.events()
    assert isinstance(lost, RingLost)
    assert lost.message == "its worker ended"


def test_it_can_be_unloaded_before_it_is_whole() -> None:
    life = adopted()
    life.receive(StageReady(1, "host:1", 4096, 0), 0.5)
    life.receive(UnloadAsked(), 1.0)
    assert life.outgoing() == [SendUnload(1)]


def test_one_of_which_nothing_came_back_is_over_as_soon_as_it_is_lost() -> None:
    life = adopted()
    life.receive(StageDown(0, "stage_lost", "its peer was started anew", gone=True), 1.0)
    assert [type(event) for event in life.events()] == [RingLost, RingOver]
