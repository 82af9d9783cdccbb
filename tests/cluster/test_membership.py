"""Who is alive: silence, goodbyes, reboots, stalls and nodes that come back; time is a row of the table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.cluster.membership import (
    BEAT_INTERVAL_S,
    DEAD_S,
    FORGET_S,
    RETURN_S,
    SUSPECT_S,
    Connected,
    Forgotten,
    Heard,
    Late,
    Left,
    Membership,
    NodeState,
    Parted,
    StateChanged,
)
from swarmnode.ids import BootId, NodeId

ATTIC, CELLAR = NodeId("attic"), NodeId("cellar")
B1, B2, B3 = BootId("boot-1"), BootId("boot-2"), BootId("boot-3")
INCARNATIONS = {B1: 1, B2: 2, B3: 3}
"""Every start of a node counts one up."""
ALIVE, SUSPECT, DEAD, LEFT = NodeState.ALIVE, NodeState.SUSPECT, NodeState.DEAD, NodeState.LEFT


class Watch:
    """Membership with a clock that stops at every timer."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.members = Membership()
        self.changes: list[tuple[float, StateChanged]] = []
        self.forgotten: list[NodeId] = []

    def hear(self, node: NodeId = ATTIC, boot: BootId = B1, incarnation: int | None = None) -> int | None:
        """Returns what the node is told: the incarnation that it has to pass."""
        heard = Heard(node, boot, INCARNATIONS[boot] if incarnation is None else incarnation)
        self.take(heard)
        return self.members.above(heard)

    def leave(self, node: NodeId = ATTIC, boot: BootId = B1) -> None:
        self.take(Left(node, boot))

    def take(self, message: Heard | Connected | Parted | Left | Late) -> None:
        self.members.receive(message, self.now_s)
        self._drain()

    def wait(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while (at_s := self.members.next_timer()) is not None and at_s <= end_s:
            self.now_s = max(at_s, self.now_s)
            self.members.handle_timer(self.now_s)
            self._drain()
        self.now_s = end_s

    def stall(self, seconds: float) -> None:
        """The process is stopped; it looks at its timers first when it goes on."""
        self.now_s += seconds
        at_s = self.members.next_timer()
        if at_s is not None and at_s <= self.now_s:
            self.members.handle_timer(self.now_s)
            self._drain()

    def talk(self, seconds: float, *nodes: NodeId) -> None:
        """All of them, twice a second."""
        for _ in range(round(2 * seconds)):
            for node in nodes:
                self.hear(node)
            self.wait(0.5)

    def said(self) -> list[tuple[str, str, NodeState]]:
        return [(c.node, c.boot, c.state) for _, c in self.changes]

    def states(self) -> list[NodeState]:
        return [state for *_, state in self.said()]

    def _drain(self) -> None:
        for event in self.members.events():
            if isinstance(event, Forgotten):
                self.forgotten.append(event.node)
            else:
                self.changes.append((self.now_s - 50.0, event))
        assert self.members.outgoing() == []


def test_a_node_never_heard_of_is_dead_and_has_no_silence() -> None:
    members = Membership()
    assert members.state(ATTIC) is DEAD
    assert members.silence_s(ATTIC, 1.0) is None
    assert members.next_timer() is None


def test_silence_makes_suspect_then_dead_each_once() -> None:
    watch = Watch()
    watch.hear()
    watch.wait(100)
    assert [(at, c.state) for at, c in watch.changes] == [(0, ALIVE), (SUSPECT_S, SUSPECT), (DEAD_S, DEAD)]
    assert watch.members.silence_s(ATTIC, watch.now_s) == 100
    assert watch.members.next_timer() == 50.0 + FORGET_S, "only to forget it"


@pytest.mark.parametrize("gap_s", [BEAT_INTERVAL_S, SUSPECT_S - 0.01])
def test_beats_in_time_say_nothing(gap_s: float) -> None:
    watch = Watch()
    for _ in range(50):
        watch.hear()
        watch.wait(gap_s)
    assert watch.said() == [(ATTIC, B1, ALIVE)]


def test_a_stalled_uplink_of_some_seconds_is_suspected_and_forgiven() -> None:
    watch = Watch()
    watch.hear()
    watch.wait(DEAD_S - 0.01)
    watch.hear()
    assert watch.said() == [(ATTIC, B1, ALIVE), (ATTIC, B1, SUSPECT), (ATTIC, B1, ALIVE)]


def test_a_goodbye_counts_at_once() -> None:
    watch = Watch()
    watch.hear()
    watch.leave()
    watch.leave()
    watch.wait(100)
    assert [(at, c.state) for at, c in watch.changes] == [(0, ALIVE), (0, LEFT)]


def test_who_left_is_back_with_its_next_start_and_was_not_lost_in_between() -> None:
    watch = Watch()
    watch.hear(boot=B1)
    watch.leave()
    assert watch.hear(boot=B1) == INCARNATIONS[B1], "what was on its way when it left"
    watch.hear(boot=B2)
    assert watch.said() == [(ATTIC, B1, ALIVE), (ATTIC, B1, LEFT), (ATTIC, B2, ALIVE)]


def test_a_goodbye_of_an_older_boot_says_nothing_about_the_new_one() -> None:
    watch = Watch()
    watch.hear(boot=B1)
    watch.hear(boot=B2)
    watch.leave(boot=B1)
    assert watch.members.state(ATTIC) is ALIVE


def test_a_reboot_declares_the_old_boot_dead_first() -> None:
    watch = Watch()
    watch.hear(boot=B1)
    watch.wait(1)
    watch.hear(boot=B2)
    assert watch.said() == [(ATTIC, B1, ALIVE), (ATTIC, B1, DEAD), (ATTIC, B2, ALIVE)]


def test_a_reboot_after_death_does_not_kill_twice() -> None:
    watch = Watch()
    watch.hear(boot=B1)
    watch.wait(20)
    watch.hear(boot=B2)
    assert [state for *_, state in watch.said()] == [ALIVE, SUSPECT, DEAD, ALIVE]


def test_what_is_still_read_from_an_old_boots_connection_does_not_kill_the_new_one() -> None:
    watch = Watch()
    for boot in (B1, B2, B3):
        watch.hear(boot=boot)
    before = watch.said()
    assert watch.hear(boot=B1) == watch.hear(boot=B2) == INCARNATIONS[B3]
    assert watch.said() == before
    assert watch.members.state(ATTIC) is ALIVE


def test_a_dead_node_comes_back_by_saying_so_and_not_by_what_it_said_before() -> None:
    watch = Watch()
    assert watch.hear() is None
    watch.wait(20)
    assert watch.hear() == 1, "a late frame, or a node that does not know yet"
    assert watch.members.state(ATTIC) is DEAD
    assert watch.hear(incarnation=2) is None
    watch.wait(3)
    assert watch.states() == [ALIVE, SUSPECT, DEAD, ALIVE]


def test_after_it_came_back_its_other_connection_may_still_name_what_it_began_with() -> None:
    watch = Watch()
    watch.hear()
    watch.leave()
    watch.hear(incarnation=2)
    watch.wait(SUSPECT_S - 1)
    assert watch.hear(incarnation=1) is None
    watch.wait(SUSPECT_S - 1)
    assert watch.states() == [ALIVE, LEFT, ALIVE]


def test_a_node_whose_disk_went_back_in_time_passes_what_is_known_of_it() -> None:
    watch = Watch()
    watch.hear(boot=B3, incarnation=40)
    watch.leave(boot=B3)
    assert watch.hear(boot=B1, incarnation=7) == 40
    assert watch.members.state(ATTIC) is LEFT
    assert watch.hear(boot=B1, incarnation=41) is None
    assert watch.said()[-1] == (ATTIC, B1, ALIVE)


def test_a_connection_that_ended_is_given_some_seconds_to_come_back() -> None:
    watch = Watch()
    watch.hear()
    watch.take(Parted(ATTIC, B1))
    watch.wait(RETURN_S - 0.01)
    watch.take(Connected(ATTIC, B1, 1))
    watch.wait(RETURN_S)
    assert watch.states() == [ALIVE]
    watch.take(Parted(ATTIC, B1))
    watch.wait(RETURN_S - 0.01)
    watch.hear()
    assert watch.members.state(ATTIC) is ALIVE
    watch.wait(0.01)
    assert watch.states() == [ALIVE, DEAD], "what came over another one is no return"


def test_the_end_of_an_old_boots_connection_says_nothing_about_the_new_one() -> None:
    watch = Watch()
    watch.hear(boot=B1)
    watch.take(Connected(ATTIC, B2, 2))
    watch.take(Parted(ATTIC, B1))
    watch.wait(RETURN_S)
    assert watch.states() == [ALIVE, DEAD, ALIVE]


@pytest.mark.parametrize("stall_s", [2.0, DEAD_S, 100.0])
@pytest.mark.parametrize("before_s", [0.0, 1.5, SUSPECT_S - 0.5])
def test_a_stall_of_ones_own_is_nobodys_silence(before_s: float, stall_s: float) -> None:
    watch = Watch()
    watch.hear()
    watch.wait(before_s)
    watch.stall(stall_s)
    assert watch.states() == [ALIVE], "what arrived meanwhile is read first"
    watch.wait(DEAD_S)
    assert watch.states() == [ALIVE, SUSPECT, DEAD]
    assert watch.changes[-1][0] - stall_s <= DEAD_S


def test_a_loop_that_is_always_late_still_judges() -> None:
    watch = Watch()
    watch.hear()
    for _ in range(60):
        watch.stall(2.0)
    assert watch.states() == [ALIVE, SUSPECT, DEAD]


def test_every_stall_is_followed_by_a_tick_to_read_in_however_much_is_heard() -> None:
    """Messages oftener than every tick leave the timer nothing but deadlines."""
    watch = Watch()
    for _ in range(3):
        watch.talk(30.0, ATTIC, CELLAR)
        watch.take(Parted(ATTIC, B1))
        watch.talk(2.5, CELLAR)
        watch.stall(12.5)
        assert watch.states() == [ALIVE, ALIVE], "its return is not read yet"
        watch.wait(0.9)
        watch.take(Connected(ATTIC, B1, 1))
    watch.talk(10.0, ATTIC, CELLAR)
    assert watch.states() == [ALIVE, ALIVE]


def test_a_stall_does_not_shorten_a_return() -> None:
    watch = Watch()
    watch.hear()
    watch.take(Parted(ATTIC, B1))
    watch.stall(60)
    watch.take(Connected(ATTIC, B1, 1))
    watch.wait(RETURN_S)
    assert watch.states() == [ALIVE]


@pytest.mark.parametrize(("score", "factor"), [(0, 1), (1, 2), (7, 8), (100, 8)])
def test_a_late_loop_waits_longer_before_it_judges(score: int, factor: int) -> None:
    watch = Watch()
    watch.hear()
    watch.take(Late(score))
    watch.wait(500)
    assert [at for at, _ in watch.changes] == [0, factor * SUSPECT_S, factor * DEAD_S]


def test_patience_ends_when_the_loop_is_in_time_again() -> None:
    watch = Watch()
    watch.hear()
    watch.take(Late(7))
    watch.wait(2 * DEAD_S)
    assert watch.states() == [ALIVE]
    watch.take(Late(0))
    watch.wait(0.0)
    assert watch.states() == [ALIVE, DEAD]


def test_nodes_do_not_touch_each_other() -> None:
    watch = Watch()
    watch.hear(ATTIC)
    watch.wait(4)
    watch.hear(CELLAR)
    watch.wait(5)
    watch.leave(CELLAR)
    assert watch.members.state(ATTIC) is SUSPECT
    assert watch.members.state(CELLAR) is LEFT
    watch.wait(DEAD_S - 9)
    assert watch.changes[-1] == (DEAD_S, StateChanged(ATTIC, B1, DEAD))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["hear", "leave"]),
            st.sampled_from([ATTIC, CELLAR]),
            st.sampled_from([B1, B2, B3]),
            st.sampled_from([0.0, 1.0, 5.0, 7.0, 20.0]),
        ),
        max_size=30,
    )
)
def test_changes_alternate_and_timers_always_move(history: list[tuple[str, NodeId, BootId, float]]) -> None:
    watch = Watch()
    for what, node, boot, seconds in history:
        (watch.hear if what == "hear" else watch.leave)(node, boot)
        watch.wait(seconds)
    for node in (ATTIC, CELLAR):
        changes = [(c.boot, c.state) for _, c in watch.changes if c.node == node]
        alive_boot: BootId | None = None
        for boot, state in changes:
            assert alive_boot in (None, boot)
            alive_boot = None if state.gone else boot
        boots = [boot for boot, state in changes if state is ALIVE]
        assert boots == sorted(boots), "no boot comes back after a later one"
    watch.wait(DEAD_S)
    assert all(watch.members.state(node).gone for node in (ATTIC, CELLAR))


def test_a_dead_node_is_forgotten_after_a_while_and_may_come_back() -> None:
    watch = Watch()
    watch.hear()
    watch.wait(FORGET_S - 1)
    assert watch.members.silence_s(ATTIC, watch.now_s) == FORGET_S - 1
    assert watch.forgotten == []
    watch.wait(1)
    assert watch.members.silence_s(ATTIC, watch.now_s) is None
    assert watch.forgotten == [ATTIC]
    assert watch.members.next_timer() is None
    watch.hear()
    assert watch.members.state(ATTIC) is ALIVE


def test_made_up_boots_leave_nothing_behind() -> None:
    watch = Watch()
    for number in range(1000):
        watch.hear(boot=B1 if number % 2 else B2, incarnation=number)
    assert len(watch.members._entries) == 1
    watch.leave(boot=B1)
    watch.wait(FORGET_S)
    assert watch.members._entries == {}
