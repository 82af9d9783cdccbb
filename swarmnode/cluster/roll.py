"""A coordinator's roll of members: who is there, the table that everybody gets, and what a beat is answered."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from swarmnode.cluster.member_table import MemberTable, Row
from swarmnode.cluster.membership import Expected, Forgotten, Membership
from swarmnode.machine import drain

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from swarmnode.cluster.member_table import Mark, Update
    from swarmnode.cluster.membership import Heard, MembershipEvent, MembershipInput
    from swarmnode.ids import NodeId


@dataclass(frozen=True, slots=True)
class Answer:
    """To one beat. `above`: the node counts as dead at this incarnation, or as an earlier process, and comes back with
    a higher one. `update`: what its copy of the table lacks."""

    above: int | None
    update: Update | None


class Roll:
    """A `Machine[MembershipInput, Never, MembershipEvent]`: `Membership`, and every change of it in the table."""

    def __init__(self, term: int, membership: Membership | None = None) -> None:
        self.members = membership or Membership()
        self.table = MemberTable(term)
        self._events: list[MembershipEvent] = []

    def inherit(self, rows: Iterable[Row], now: float) -> None:
        """What this node was told as a member, before it coordinated: who is awaited, and who was dead."""
        for row in rows:
            self.members.receive(Expected(row.node, row.state.gone), now)
            self.table.put(replace(row, state=self.members.state(row.node)))

    def awaited(self) -> Sequence[Row]:
        """Those of them that may still come."""
        return [row for node, row in self.table.rows.items() if self.members.awaits(node)]

    def introduce(self, node: NodeId, name: str, address: str) -> None:
        """Who a node is that is about to connect."""
        self.table.put(Row(node, name, address, self.members.state(node)))

    def answer(self, beat: Heard, held: Mark) -> Answer:
        """What to say to a beat that was received, of a node whose copy of the table is `held`."""
        return Answer(self.members.above(beat), self.table.since(held))

    def receive(self, message: MembershipInput, now: float) -> None:
        self.members.receive(message, now)
        self._write_down()

    def handle_timer(self, now: float) -> None:
        self.members.handle_timer(now)
        self._write_down()

    def next_timer(self) -> float | None:
        return self.members.next_timer()

    def outgoing(self) -> list[object]:
        return self.members.outgoing()

    def events(self) -> list[MembershipEvent]:
        return drain(self._events)

    def _write_down(self) -> None:
        for event in self.members.events():
            self._events.append(event)
            row = self.table.row(event.node)
            if isinstance(event, Forgotten):
                self.table.drop(event.node)
            elif row is not None:
                self.table.put(replace(row, state=event.state))
