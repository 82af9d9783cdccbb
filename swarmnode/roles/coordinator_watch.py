"""A member's view of its coordinator: silence is judged by the same rules as the coordinator's of its members."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from swarmnode.cluster.local_health import TICK_S
from swarmnode.cluster.membership import Heard, Late, Membership, NodeState, StateChanged
from swarmnode.driver import Driver
from swarmnode.errors import LinkBroken
from swarmnode.ids import BootId, NodeId
from swarmnode.wire.nursery import open_flat_nursery

if TYPE_CHECKING:
    from swarmnode.cluster.local_health import LocalHealth
    from swarmnode.cluster.membership import MembershipEvent, MembershipInput

_IT = Heard(NodeId("coordinator"), BootId("as it answered here"), 0)
"""There is one on a connection, whoever it is."""


class CoordinatorWatch:
    """For the life of one connection. A member that was stopped, or whose loop is late, does not accuse."""

    def __init__(self, health: LocalHealth) -> None:
        self._health = health
        self._silent = trio.Event()
        self._membership = Membership()
        self._driver: Driver[MembershipInput, object, MembershipEvent] = Driver(
            self._membership, lambda _: None, self._changed
        )

    def heard(self) -> None:
        """Whatever came of it."""
        self._driver.feed(_IT)

    async def run(self) -> None:
        """Raises LinkBroken once the coordinator was silent for as long as it would let a member be."""
        self.heard()
        async with open_flat_nursery() as nursery:
            nursery.start_soon(self._driver.run)
            while not self._silent.is_set():
                self._driver.feed(Late(self._health.score))
                with trio.move_on_after(TICK_S):
                    await self._silent.wait()
            silence_s = self._membership.silence_s(_IT.node, trio.current_time())
            raise LinkBroken(f"the coordinator answered no beat for {silence_s:.0f} s")

    def _changed(self, event: MembershipEvent) -> None:
        if isinstance(event, StateChanged) and event.state is NodeState.DEAD:
            self._silent.set()
