"""The driver: one machine, its effects in order, and one timer; all under virtual time."""

from __future__ import annotations

import pytest
import trio

from swarmnode.cluster.membership import DEAD_S, SUSPECT_S, Heard, Membership, NodeState
from swarmnode.driver import Driver
from swarmnode.ids import BootId, NodeId


class Recorder:
    """A machine that answers each number with two messages and an event, and rings at the times it is told."""

    def __init__(self) -> None:
        self.alarms: list[float] = []
        self.rang: list[float] = []
        self._outgoing: list[str] = []
        self._events: list[str] = []

    def receive(self, message: float, now: float) -> None:
        if message > 0:
            self.alarms = sorted([*self.alarms, now + message])
        self._outgoing += [f"a{message:g}", f"b{message:g}"]
        self._events.append(f"took {message:g}")

    def handle_timer(self, now: float) -> None:
        due = [at for at in self.alarms if at <= now]
        self.alarms = [at for at in self.alarms if at > now]
        self.rang += [now] * len(due)
        self._events += ["rang"] * len(due)

    def next_timer(self) -> float | None:
        return self.alarms[0] if self.alarms else None

    def outgoing(self) -> list[str]:
        drained, self._outgoing = self._outgoing, []
        return drained

    def events(self) -> list[str]:
        drained, self._events = self._events, []
        return drained


@pytest.fixture
def machine() -> Recorder:
    return Recorder()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def driver(machine: Recorder, said: list[str]) -> Driver[float, str, str]:
    return Driver(machine, said.append, said.append)


async def test_effects_are_carried_out_at_once_and_in_order(driver: Driver[float, str, str], said: list[str]) -> None:
    driver.feed(0)
    driver.feed(-1)
    assert said == ["a0", "b0", "took 0", "a-1", "b-1", "took -1"]


async def test_what_a_machine_wants_at_its_birth_is_sent_when_it_runs(
    machine: Recorder, driver: Driver[float, str, str], said: list[str], autojump_clock: trio.testing.MockClock
) -> None:
    machine.receive(0, 0.0)
    with trio.move_on_after(1):
        await driver.run()
    assert said == ["a0", "b0", "took 0"]


async def test_timers_ring_at_their_moment(
    machine: Recorder, driver: Driver[float, str, str], autojump_clock: trio.testing.MockClock
) -> None:
    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(driver.run)
        driver.feed(5)
        driver.feed(2)
        await trio.sleep(3)
        driver.feed(0.5)  # earlier than the one it waits for
        await trio.sleep(100)
        driver.feed(1)  # after a long time without any
        await trio.sleep(10)
        nursery.cancel_scope.cancel()
    assert [at - start for at in machine.rang] == pytest.approx([2, 3.5, 5, 104])


async def test_a_timer_that_was_already_due_rings_now(
    machine: Recorder, driver: Driver[float, str, str], autojump_clock: trio.testing.MockClock
) -> None:
    machine.alarms = [trio.current_time() - 7]
    start = trio.current_time()
    with trio.move_on_after(1):
        await driver.run()
    assert machine.rang == [start]


async def test_a_machine_fed_by_its_own_effects_keeps_their_order(machine: Recorder, said: list[str]) -> None:
    def send(message: str) -> None:
        said.append(message)
        if message == "a0":
            driver.feed(7)

    driver: Driver[float, str, str] = Driver(machine, send, said.append)
    driver.feed(0)
    assert [word for word in said if word[0] in "ab"] == ["a0", "b0", "a7", "b7"]
    assert [word for word in said if word[0] == "t"] == ["took 0", "took 7"]


async def test_a_real_machine_on_the_driver(autojump_clock: trio.testing.MockClock) -> None:
    start, changes = trio.current_time(), list[tuple[float, NodeState]]()
    members = Membership()
    driver = Driver(
        members, lambda message: None, lambda change: changes.append((trio.current_time() - start, change.state))
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(driver.run)
        driver.feed(Heard(NodeId("attic"), BootId("b"), 1))
        await trio.sleep(4)
        driver.feed(Heard(NodeId("attic"), BootId("b"), 1))
        await trio.sleep(60)
        nursery.cancel_scope.cancel()
    states = [state for _, state in changes]
    assert states == [NodeState.ALIVE, NodeState.SUSPECT, NodeState.DEAD]
    assert [at for at, _ in changes] == pytest.approx([0, 4 + SUSPECT_S, 4 + DEAD_S])
