"""A ring's life: the way in, every way out, deadlines in virtual time, and reports that come late."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.cluster.ring_life import (
    CAUSE_S,
    LINK_S,
    LOAD_PROGRESS_S,
    PROBE_S,
    RELINK_S,
    RELINK_TRIES,
    UNLOAD_S,
    RingLife,
    RingState,
)
from swarmnode.cluster.ring_life_messages import (
    ProbeReturned,
    Progress,
    RingCommand,
    RingEvent,
    RingInput,
    RingLost,
    RingOver,
    RingParted,
    RingReady,
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

WAY_IN = (RingState.PREPARING, RingState.LINKING, RingState.PROBING, RingState.READY)


class Swarm:
    """A life with its clock, and everything it ever said."""

    def __init__(self, stages: int = 3) -> None:
        self.now_s = 100.0
        self.stages = range(stages)
        self.life = RingLife([NodeId(f"node-{i}") for i in self.stages], self.now_s)
        self.commands: list[RingCommand] = []
        self.events: list[RingEvent] = []
        self._drain()

    def feed(self, *messages: RingInput) -> None:
        for message in messages:
            self.life.receive(message, self.now_s)
            self._drain()

    def wait(self, seconds: float) -> None:
        """Let time pass, with every timer at its moment."""
        end_s = self.now_s + seconds
        while (deadline_s := self.life.next_timer()) is not None and deadline_s <= end_s:
            self.now_s = max(self.now_s, deadline_s)
            before = (self.life.state, deadline_s)
            self.life.handle_timer(self.now_s)
            self._drain()
            assert (self.life.state, self.life.next_timer()) != before, "a timer that does nothing fires for ever"
        self.now_s = end_s

    def reach(self, state: RingState) -> None:
        steps = [
            [StageReady(i, f"host:{i}", 1000 + i) for i in self.stages],
            [StageLinked(i) for i in self.stages],
            [ProbeReturned()],
        ]
        for messages in steps[: WAY_IN.index(state)]:
            self.feed(*messages)
        assert self.life.state is state

    def unloads(self) -> list[int]:
        return [c.stage for c in self.commands if isinstance(c, SendUnload)]

    def _drain(self) -> None:
        self.commands += self.life.outgoing()
        self.events += self.life.events()
        assert self.life.outgoing() == []
        assert self.life.events() == []


def test_the_way_in() -> None:
    swarm = Swarm(3)
    assert swarm.commands == [SendLoad(0), SendLoad(1), SendLoad(2)]
    swarm.reach(RingState.LINKING)
    assert swarm.commands[3:] == [SendLink(0, "host:1"), SendLink(1, "host:2"), SendLink(2, "host:0")]
    swarm.feed(StageLinked(2), StageLinked(0), StageLinked(1))
    assert swarm.commands[6:] == [SendProbe()]
    assert swarm.events == []
    swarm.feed(ProbeReturned(), ProbeReturned())
    assert swarm.events == [RingReady()]
    assert swarm.life.kv_tokens == 1000
    assert swarm.life.next_timer() is None


def test_a_ring_of_one_links_to_itself() -> None:
    swarm = Swarm(1)
    swarm.reach(RingState.READY)
    assert swarm.commands == [SendLoad(0), SendLink(0, "host:0"), SendProbe()]


WAYS_OUT = {
    "asked": UnloadAsked(),
    "failed": StageDown(1, "load_failed", "no such tensor"),
    "unloaded by itself": StageUnloaded(1),
}


@pytest.mark.parametrize("state", WAY_IN)
@pytest.mark.parametrize("why", WAYS_OUT)
def test_every_way_out_unloads_every_stage_that_may_hold_something(state: RingState, why: str) -> None:
    swarm = Swarm(3)
    swarm.reach(state)
    swarm.feed(WAYS_OUT[why])
    assert swarm.life.state is RingState.ENDING
    held = [0, 2] if why == "unloaded by itself" else [0, 1, 2]
    assert swarm.unloads() == held
    for stage in held:
        assert RingOver() not in swarm.events
        swarm.feed(StageUnloaded(stage))
    assert swarm.events[-1] == RingOver()
    assert swarm.life.state is RingState.OVER
    assert swarm.life.next_timer() is None


@pytest.mark.parametrize("state", WAY_IN)
def test_a_fault_is_reported_once_and_says_whether_the_ring_served(state: RingState) -> None:
    swarm = Swarm(3)
    swarm.reach(state)
    swarm.feed(StageDown(2, "stage_lost", "killed"), StageDown(1, "link_broken", "neighbour gone"))
    swarm.feed(StageDown(0, "link_broken", "neighbour gone", gone=True))
    lost = [e for e in swarm.events if isinstance(e, RingLost)]
    assert lost == [RingLost("stage_lost", "killed", 2, state is RingState.READY)]
    assert swarm.life.error == lost[0]


def test_an_unload_that_was_asked_for_is_no_fault() -> None:
    swarm = Swarm(2)
    swarm.reach(RingState.READY)
    swarm.feed(UnloadAsked(), StageDown(0, "stage_lost", "its worker ended"), StageUnloaded(0), StageUnloaded(1))
    assert swarm.events == [RingReady(), RingOver()]
    assert swarm.life.error is None


def test_whoever_names_the_cause_is_right_about_a_symptom() -> None:
    swarm = Swarm(3)
    swarm.reach(RingState.READY)
    swarm.feed(StageDown(0, "stage_lost", "stage 0 lost its link", symptom=True))
    swarm.feed(StageDown(1, "stage_lost", "stage 1's worker was killed"))
    swarm.feed(StageDown(2, "load_failed", "an echo of it"))
    assert sum(isinstance(e, RingLost) for e in swarm.events) == 1
    assert swarm.life.error is not None
    assert (swarm.life.error.message, swarm.life.error.stage) == ("stage 1's worker was killed", 1)


def test_a_stage_that_is_gone_is_not_asked_to_unload() -> None:
    swarm = Swarm(3)
    swarm.reach(RingState.READY)
    swarm.feed(StageDown(1, "stage_lost", "its node is dead", gone=True))
    assert swarm.unloads() == [0, 2]
    swarm.feed(StageUnloaded(0), StageDown(2, "stage_lost", "dead as well", gone=True))
    assert swarm.life.state is RingState.OVER


def test_a_stage_is_ready_only_while_it_is_there() -> None:
    swarm = Swarm(3)
    assert swarm.life.condition(0) is None
    swarm.reach(RingState.READY)
    assert [swarm.life.condition(stage) for stage in swarm.stages] == ["ready"] * 3
    swarm.feed(StageDown(1, "stage_lost", "its node is dead", gone=True))
    swarm.feed(StageDown(2, "stage_lost", "dead as well", gone=True))
    assert [swarm.life.condition(stage) for stage in swarm.stages] == ["ready", "lost", "ended"]
    swarm.feed(StageUnloaded(0))
    assert swarm.life.condition(0) == "ended"


def test_a_stage_whose_worker_failed_is_lost_before_it_is_unloaded() -> None:
    swarm = Swarm(2)
    swarm.reach(RingState.READY)
    swarm.feed(StageDown(1, "stage_lost", "its worker was killed"))
    assert [swarm.life.condition(stage) for stage in swarm.stages] == ["ready", "lost"]


def test_a_ring_whose_only_node_dies_is_over_at_once() -> None:
    swarm = Swarm(1)
    swarm.reach(RingState.READY)
    swarm.feed(StageDown(0, "stage_lost", "dead", gone=True))
    assert [type(e) for e in swarm.events] == [RingReady, RingLost, RingOver]


@pytest.mark.parametrize(
    ("state", "limit_s", "code", "stage", "words"),
    [
        (RingState.PREPARING, LOAD_PROGRESS_S, "stalled", 0, "stage 0 reported no progress for 60 s"),
        (RingState.LINKING, LINK_S, "link_broken", 0, "stage 0 could not reach its neighbour in 10 s"),
        (RingState.PROBING, PROBE_S, "link_broken", None, "the probe did not come round the ring in 10 s"),
    ],
)
def test_every_phase_has_a_deadline(state: RingState, limit_s: float, code: str, stage: int | None, words: str) -> None:
    swarm = Swarm(2)
    swarm.reach(state)
    swarm.wait(limit_s - 0.001)
    assert swarm.life.state is state
    swarm.wait(0.001)
    assert swarm.events == [RingLost(code, words, stage, False)]
    assert swarm.unloads() == [0, 1]
    swarm.wait(UNLOAD_S)
    assert swarm.life.state is RingState.OVER


def test_a_ready_ring_waits_for_nothing() -> None:
    swarm = Swarm(2)
    swarm.reach(RingState.READY)
    swarm.wait(1e6)
    assert swarm.life.state is RingState.READY


def test_bytes_that_still_come_keep_a_load_alive_and_the_silent_stage_is_named() -> None:
    swarm = Swarm(3)
    swarm.feed(StageReady(0, "host:0", 10))
    for done in range(10):
        swarm.wait(LOAD_PROGRESS_S / 2)
        swarm.feed(Progress(1, "fetching", done, 10), Progress(2, "loading", done, 10))
    swarm.feed(StageReady(1, "host:1", 10))
    swarm.wait(LOAD_PROGRESS_S)
    assert [e.stage for e in swarm.events if isinstance(e, RingLost)] == [2]
    assert swarm.life.progress[1] == Progress(1, "fetching", 9, 10)


def test_the_link_that_is_missing_is_named() -> None:
    swarm = Swarm(3)
    swarm.reach(RingState.LINKING)
    swarm.feed(StageLinked(0), StageLinked(2))
    swarm.wait(LINK_S)
    assert [e.stage for e in swarm.events if isinstance(e, RingLost)] == [1]


def test_the_unload_that_is_never_answered_ends_at_its_deadline() -> None:
    swarm = Swarm(3)
    swarm.reach(RingState.READY)
    swarm.feed(UnloadAsked(), StageUnloaded(1))
    swarm.wait(UNLOAD_S - 0.001)
    assert swarm.life.state is RingState.ENDING
    swarm.wait(0.001)
    assert swarm.events[-1] == RingOver()


# -- linking anew


def symptom(stage: int, links: int = 0, message: str = "stage lost its link") -> StageDown:
    return StageDown(stage, "stage_lost", message, symptom=True, links=links)


def relinked(swarm: Swarm, links: int) -> None:
    """Answer a round of links and its probe."""
    swarm.feed(*(StageLinked(stage, links) for stage in swarm.stages))
    assert swarm.commands[-1] == SendProbe()
    swarm.feed(ProbeReturned())


def ready(stages: int = 3) -> Swarm:
    swarm = Swarm(stages)
    swarm.reach(RingState.READY)
    swarm.commands.clear()
    swarm.events.clear()
    return swarm


def test_a_broken_link_is_made_anew_and_nothing_is_unloaded() -> None:
    swarm = ready(3)
    swarm.feed(symptom(1), symptom(2))
    assert (swarm.life.state, swarm.commands, swarm.events) == (RingState.RELINKING, [], [])
    swarm.wait(CAUSE_S)
    assert swarm.events == [RingParted("stage lost its link")]
    assert swarm.commands == [SendLink(0, "host:1", 1), SendLink(1, "host:2", 1), SendLink(2, "host:0", 1)]
    relinked(swarm, 1)
    assert swarm.events[1:] == [RingRelinked()]
    assert swarm.life.state is RingState.READY
    assert swarm.unloads() == []
    swarm.wait(1e6)
    assert swarm.life.state is RingState.READY


@pytest.mark.parametrize("gone", [True, False])
def test_a_cause_that_follows_makes_it_the_loss_it_is(gone: bool) -> None:
    swarm = ready(3)
    swarm.feed(symptom(0))
    swarm.wait(CAUSE_S / 2)
    swarm.feed(StageDown(1, "stage_lost", "stage 1's worker was killed", gone=gone))
    assert swarm.events == [RingLost("stage_lost", "stage 1's worker was killed", 1, True)]
    assert swarm.unloads() == ([0, 2] if gone else [0, 1, 2])


def test_a_cause_that_comes_while_it_links_too() -> None:
    swarm = ready(2)
    swarm.feed(symptom(0))
    swarm.wait(CAUSE_S)
    swarm.feed(StageLinked(0, 1), StageDown(1, "stage_lost", "its node is dead", gone=True))
    assert swarm.events == [RingParted("stage lost its link"), RingLost("stage_lost", "its node is dead", 1, True)]
    assert swarm.unloads() == [0]


def test_what_an_earlier_link_epoch_says_is_history() -> None:
    swarm = ready(2)
    swarm.feed(symptom(0))
    swarm.wait(CAUSE_S)
    swarm.feed(StageLinked(0, 0), StageLinked(1, 0), symptom(1, 0), ProbeReturned())
    assert SendProbe() not in swarm.commands
    relinked(swarm, 1)
    swarm.feed(symptom(0, 0), symptom(1, 0))
    assert swarm.life.state is RingState.READY


def test_a_ring_that_breaks_again_is_linked_again() -> None:
    swarm = ready(2)
    for links in range(1, 6):
        swarm.feed(symptom(0, links - 1))
        swarm.wait(CAUSE_S)
        relinked(swarm, links)
    assert [type(event) for event in swarm.events] == [RingParted, RingRelinked] * 5


def test_tries_are_bounded_and_the_first_symptom_is_what_it_is_lost_by() -> None:
    swarm = ready(2)
    swarm.feed(symptom(1, message="stage 1 lost its link"))
    swarm.wait(CAUSE_S)
    for links in range(1, RELINK_TRIES + 1):
        assert swarm.commands[-1] == SendLink(1, "host:0", links)
        swarm.feed(symptom(0, links, "the dial was refused"), symptom(0, links, "the dial was refused"))
        swarm.wait(CAUSE_S)
    parted, lost = swarm.events
    assert parted == RingParted("stage 1 lost its link")
    assert isinstance(lost, RingLost)
    assert lost.was_ready
    assert lost.message.startswith("stage 1 lost its link; linking it anew failed 3 times")
    assert lost.message.endswith("the dial was refused")
    assert swarm.unloads() == [0, 1]


@pytest.mark.parametrize("probes", [True, False])
def test_linking_anew_has_a_deadline(probes: bool) -> None:
    """Whether the links never come up or the probe never comes back."""
    swarm = ready(2)
    began_s = swarm.now_s
    swarm.feed(symptom(0))
    while swarm.life.state is RingState.RELINKING:
        if probes:
            swarm.feed(*(StageLinked(stage, swarm.life.links) for stage in swarm.stages))
        swarm.wait(0.5)
        assert swarm.now_s - began_s <= RELINK_S + 0.5
    assert [type(event) for event in swarm.events] == [RingParted, RingLost]


def test_an_unload_ends_it() -> None:
    swarm = ready(2)
    swarm.feed(symptom(0), UnloadAsked())
    assert swarm.unloads() == [0, 1]
    swarm.feed(StageUnloaded(0), StageUnloaded(1))
    assert [type(event) for event in swarm.events] == [RingOver]


@pytest.mark.parametrize("state", [RingState.LINKING, RingState.PROBING])
def test_a_ring_that_never_was_ready_is_not_linked_anew(state: RingState) -> None:
    swarm = Swarm(2)
    swarm.reach(state)
    swarm.feed(symptom(0))
    assert [type(event) for event in swarm.events] == [RingLost]


STAGES = st.integers(0, 2)
SYMPTOMS = st.builds(symptom, STAGES, st.integers(0, 3))
REPORTS = st.one_of(
    st.builds(Progress, STAGES, st.just("loading"), st.integers(0, 5), st.just(5)),
    st.builds(StageReady, STAGES, st.just("host:1"), st.integers(1, 99)),
    st.builds(StageReady, STAGES, st.just("host:1"), st.integers(1, 99)),
    st.builds(StageLinked, STAGES, st.integers(0, 3)),
    st.builds(StageLinked, STAGES, st.just(0)),
    SYMPTOMS,
    st.builds(ProbeReturned),
    st.builds(StageDown, STAGES, st.just("stage_lost"), st.just("gone"), st.booleans(), st.booleans()),
    st.builds(StageUnloaded, STAGES),
    st.builds(UnloadAsked),
)


@given(
    history=st.lists(st.tuples(REPORTS, st.sampled_from([0.0, 1.0, 9.0, 30.0])), max_size=25),
    late=st.lists(REPORTS, max_size=10),
    way_in=st.sampled_from(WAY_IN),
)
@settings(max_examples=300, deadline=None)
def test_whatever_is_reported_an_unload_brings_it_to_over(
    history: list[tuple[RingInput, float]], late: list[RingInput], way_in: RingState
) -> None:
    swarm = Swarm(3)
    swarm.reach(way_in)
    for report, seconds in history:
        swarm.feed(report)
        swarm.wait(seconds)
    swarm.feed(UnloadAsked())
    asked = set(swarm.unloads())
    unasked = {r.stage for r, _ in history if isinstance(r, StageUnloaded) or (isinstance(r, StageDown) and r.gone)}
    assert asked | unasked == {0, 1, 2}
    swarm.feed(*late)
    swarm.wait(UNLOAD_S)
    swarm.feed(*late)
    assert swarm.life.state is RingState.OVER
    assert swarm.life.next_timer() is None
    assert sum(isinstance(e, RingOver) for e in swarm.events) == 1
    assert sum(isinstance(e, RingLost) for e in swarm.events) <= 1
    assert sum(isinstance(e, RingReady) for e in swarm.events) <= 1
    assert isinstance(swarm.events[-1], RingOver)
    parted, again = (sum(isinstance(e, kind) for e in swarm.events) for kind in (RingParted, RingRelinked))
    assert again <= parted <= again + 1
    links = [(command.links, command.stage) for command in swarm.commands if isinstance(command, SendLink)]
    assert links == sorted(set(links)), "every round is under a link epoch of its own"
    assert sorted(swarm.unloads()) == sorted(set(swarm.unloads()))
