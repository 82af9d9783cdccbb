"""Who is alive: silence, goodbyes, reboots and nodes that come back; time is a row of the table."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.cluster.membership import (
    BEAT_INTERVAL_S,
    DEAD_S,
    FORGET_S,
    MAX_REPLACED,
    SUSPECT_S,
    Heard,
    Left,
    Membership,
    NodeState,
    StateChanged,
)
from swarmnode.ids import BootId, NodeId

ATTIC, CELLAR = NodeId("attic"), NodeId("cellar")
B1, B2, B3 = BootId("boot-1"), BootId("boot-2"), BootId("boot-3")
ALIVE, SUSPECT, DEAD = NodeState.ALIVE, NodeState.SUSPECT, NodeState.DEAD


class Watch:
    """Membership with a clock that stops at every timer."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.members = Membership()
        self.changes: list[tuple[float, StateChanged]] = []

    def hear(self, node: NodeId = ATTIC, boot: BootId = B1) -> None:
        self.members.receive(Heard(node, boot), self.now_s)
        self._drain()

    def leave(self, node: NodeId = ATTIC, boot: BootId = B1) -> None:
        self.members.receive(Left(node, boot), self.now_s)
        self._drain()

    def wait(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while (at_s := self.members.next_timer()) is not None and at_s <= end_s:
            self.now_s = at_s
            self.members.handle_timer(at_s)
            self._drain()
        self.now_s = end_s

    def said(self) -> list[tuple[str, str, NodeState]]:
        return [(c.node, c.boot, c.state) for _, c in self.changes]

    def _drain(self) -> None:
        self.changes += [(self.now_s - 50.0, change) for change in self.members.events()]
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


def test_a_goodbye_is_death_at_once() -> None:
    watch = Watch()
    watch.hear()
    watch.leave()
    watch.leave()
    watch.wait(100)
    assert [(at, c.state) for at, c in watch.changes] == [(0, ALIVE), (0, DEAD)]


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
    watch.hear(boot=B1)
    watch.hear(boot=B2)
    assert watch.said() == before
    assert watch.members.state(ATTIC) is ALIVE


def test_a_dead_boot_that_is_heard_again_is_back() -> None:
    watch = Watch()
    watch.hear()
    watch.wait(20)
    watch.hear()
    watch.wait(3)
    assert [state for *_, state in watch.said()] == [ALIVE, SUSPECT, DEAD, ALIVE]


def test_nodes_do_not_touch_each_other() -> None:
    watch = Watch()
    watch.hear(ATTIC)
    watch.wait(4)
    watch.hear(CELLAR)
    watch.wait(5)
    watch.leave(CELLAR)
    assert watch.members.state(ATTIC) is SUSPECT
    assert watch.members.state(CELLAR) is DEAD
    assert watch.members.next_timer() == 50 + DEAD_S


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
            alive_boot = None if state is DEAD else boot
        boots = [boot for boot, state in changes if state is ALIVE]
        assert boots == sorted(boots, key=boots.index)
    watch.wait(DEAD_S)
    assert watch.members.state(ATTIC) is watch.members.state(CELLAR) is DEAD


def test_a_dead_node_is_forgotten_after_a_while_and_may_come_back() -> None:
    watch = Watch()
    watch.hear()
    watch.wait(FORGET_S - 1)
    assert watch.members.silence_s(ATTIC, watch.now_s) == FORGET_S - 1
    watch.wait(1)
    assert watch.members.silence_s(ATTIC, watch.now_s) is None
    assert watch.members.next_timer() is None
    watch.hear()
    assert watch.members.state(ATTIC) is ALIVE


def test_boots_that_others_followed_are_forgotten_too() -> None:
    watch = Watch()
    watch.hear(boot=B1)
    watch.hear(boot=B2)
    watch.hear(boot=B1)
    assert watch.said()[-1] == (ATTIC, B2, ALIVE), "what is still read from the old one's connections"
    watch.leave(boot=B2)
    watch.wait(FORGET_S)
    assert (watch.members._entries, watch.members._replaced) == ({}, {})


def test_made_up_boots_are_bounded() -> None:
    watch = Watch()
    for number in range(3 * MAX_REPLACED):
        watch.hear(boot=BootId(f"made-up-{number}"))
    assert len(watch.members._replaced) == MAX_REPLACED
    watch.hear(boot=BootId(f"made-up-{3 * MAX_REPLACED - 2}"))
    assert watch.said()[-1][1] == f"made-up-{3 * MAX_REPLACED - 1}", "the newest of them still count for nothing"
