"""Which nodes may coordinate the swarm, where they are reached, and how many of them vote. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swarmnode.errors import Conflict
from swarmnode.ids import NodeId

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

MAX_VOTERS = 5
"""Two of them may be gone at once; more would only make every change wait for more disks."""
MAX_SEATED = 16
"""Voters, and nodes that wait to become one."""


@dataclass(frozen=True, slots=True)
class Seated:
    """A node that holds the swarm's key; `places` are where it answers (`wire.address`). A coordinator dialled it back
    at the first of them, and found the others fit to be dialled."""

    node: NodeId
    name: str
    places: tuple[str, ...]


class VoterBook:
    """What the swarm's document says of them. Who votes now stands beside the document, in its entry."""

    def __init__(self, records: Sequence[Seated] = ()) -> None:
        self._records = {record.node: record for record in records}

    def seat(self, record: Seated) -> bool:
        """Note a node, or where it moved; returns whether that was news. Raises Conflict for one too many."""
        if self._records.get(record.node) == record:
            return False
        if record.node not in self._records and len(self._records) >= MAX_SEATED:
            raise Conflict(
                f"{MAX_SEATED} nodes may coordinate this swarm already; remove one with `swarmnode node-remove`"
            )
        self._records[record.node] = record
        return True

    def remove(self, node: NodeId) -> None:
        self._records.pop(node, None)

    def get(self, node: NodeId) -> Seated | None:
        return self._records.get(node)

    def records(self) -> tuple[Seated, ...]:
        return tuple(self._records.values())

    def as_json(self) -> list[dict[str, Any]]:
        return [{"node": r.node, "name": r.name, "places": list(r.places)} for r in self._records.values()]

    @classmethod
    def from_json(cls, records: Sequence[Mapping[str, Any]]) -> VoterBook:
        """Raises KeyError, TypeError or ValueError for what `as_json` did not write."""
        return cls([Seated(NodeId(str(r["node"])), str(r["name"]), tuple(map(str, r["places"]))) for r in records])


def lacking_without(leaving: NodeId, voters: Collection[NodeId], connected: Collection[NodeId]) -> tuple[NodeId, ...]:
    """The voters that are away while `leaving` may not go: without it no majority would be connected, nothing could be
    decided, and nobody would coordinate. Empty where it may go. `connected` includes the coordinator."""
    staying = [voter for voter in voters if voter != leaving]
    if leaving not in voters or not staying:
        return ()
    away = tuple(voter for voter in staying if voter not in connected)
    return away if 2 * len(away) >= len(staying) else ()


def next_voters(
    voters: tuple[NodeId, ...], coordinator: NodeId, seated: Collection[NodeId], ready: Collection[NodeId]
) -> tuple[NodeId, ...] | None:
    """The voters after the next change, or None where they are as they should be.

    An odd number votes: 1, 3 or 5, since an even one survives no more losses and stops at more. `seated` are all that
    may; `ready` those that hold everything and answered a moment ago, and only they come in. They come and go one at a
    time, but for the step from one to three: a lone voter is the majority of both.
    """
    for voter in voters:
        if voter not in seated and voter != coordinator:
            return _without(voters, voter)
    waiting = sorted(node for node in ready if node in seated and node not in voters)
    if len(voters) % 2 == 0:
        return (*voters, waiting[0]) if waiting else _without(voters, _least_use(voters, coordinator, ready))
    if len(waiting) < 2 or len(voters) >= MAX_VOTERS:
        return None
    return (*voters, *waiting[:2]) if voters == (coordinator,) else (*voters, waiting[0])


def _without(voters: tuple[NodeId, ...], gone: NodeId) -> tuple[NodeId, ...]:
    return tuple(voter for voter in voters if voter != gone)


def _least_use(voters: tuple[NodeId, ...], coordinator: NodeId, ready: Collection[NodeId]) -> NodeId:
    others = [voter for voter in voters if voter != coordinator]
    return next((voter for voter in others if voter not in ready), others[-1])
