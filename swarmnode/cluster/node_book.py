"""The nodes that were ever let in: what they are called, how long they are certified, which were removed. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from swarmnode.errors import Conflict, InvalidRequest, NodeRemoved, PeerNotFound
from swarmnode.ids import NodeId, parse_node_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LEAST_ID_CHARS = 4
"""Of an id that stands for the whole: lists show eight."""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """Times are Unix seconds."""

    node: NodeId
    name: str
    expires_s: float
    removed_s: float | None = None

    def called_by_id(self, text: str) -> bool:
        """Whether `text` is its id, or enough of its beginning."""
        return len(text) >= LEAST_ID_CHARS and self.node.startswith(text)


class NodeBook:
    """What the coordinator's document says about members. A removed node stays listed: its key is out for good."""

    def __init__(self, records: Sequence[NodeRecord] = ()) -> None:
        self._records = {record.node: record for record in records}

    def issued(self, node: NodeId, name: str, expires_s: float, keeper: NodeRecord | None = None) -> None:
        """A certificate was made for `node`. Raises what `check` raises."""
        self.check(node, name, keeper)
        self._records[node] = NodeRecord(node, name, expires_s)

    def check(self, node: NodeId, name: str, keeper: NodeRecord | None = None) -> None:
        """Raise what forbids `node` to be in the swarm under `name`: the one rule, whenever a node says its name.

        `keeper` is the coordinator itself, which is not listed. NodeRemoved for a removed node, InvalidRequest for
        what is no name, Conflict for one that is another's, or that reads like another's id.
        """
        self.is_member(node)
        try:
            parse_node_name(name)
        except ValueError as error:
            raise InvalidRequest(f"{error}; give --name") from None
        there = [record for record in self._records.values() if record.removed_s is None]
        for other in [*there, *([] if keeper is None else [keeper])]:
            if other.node == node:
                continue
            if other.name == name:
                raise Conflict(f"another node is already called {name!r}; give --name, or remove that node first")
            if other.called_by_id(name):
                raise Conflict(f"{name!r} is the beginning of another node's id; give --name")

    def is_member(self, node: NodeId) -> bool:
        """Whether a certificate was ever made for it. Raises NodeRemoved for a removed node."""
        known = self._records.get(node)
        if known is not None and known.removed_s is not None:
            raise NodeRemoved(
                f"node {node[:8]} ({known.name}) was removed from this swarm, and its key with it; to join as a new "
                "node, start it with an empty --data-dir"
            )
        return known is not None

    def renamed(self, node: NodeId, name: str, keeper: NodeRecord | None = None) -> bool:
        """Note the name a node goes by now; returns whether that was news. Raises what `check` raises."""
        self.check(node, name, keeper)
        known = self._records.get(node)
        if known is None or known.name == name:
            return False
        self._records[node] = replace(known, name=name)
        return True

    def remove(self, name: str, now: float) -> NodeRecord:
        """Revoke by name, id or a unique beginning of it; raises PeerNotFound that lists the names, Conflict where
        `name` could mean several."""
        members = [record for record in self._records.values() if record.removed_s is None]
        found = [r for r in members if r.node == name] or [r for r in members if r.name == name or r.called_by_id(name)]
        if not found:
            names = ", ".join(sorted(record.name for record in members)) or "none"
            raise PeerNotFound(f"no node is called {name[:120]!r}; there are: {names}")
        if len(found) > 1:
            which = ", ".join(f"{record.name} ({record.node})" for record in found)
            raise Conflict(f"{name[:120]!r} could be any of {which}; give the whole id")
        removed = replace(found[0], removed_s=now)
        self._records[removed.node] = removed
        return removed

    def records(self) -> tuple[NodeRecord, ...]:
        return tuple(self._records.values())

    def revoked(self) -> frozenset[NodeId]:
        return frozenset(record.node for record in self._records.values() if record.removed_s is not None)

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {"node": r.node, "name": r.name, "expires_s": r.expires_s, "removed_s": r.removed_s}
            for r in self._records.values()
        ]

    @classmethod
    def from_json(cls, records: Sequence[Mapping[str, Any]]) -> NodeBook:
        """Raises KeyError, TypeError or ValueError for what `as_json` did not write."""
        return cls(
            [
                NodeRecord(
                    NodeId(str(r["node"])),
                    str(r["name"]),
                    float(r["expires_s"]),
                    None if r["removed_s"] is None else float(r["removed_s"]),
                )
                for r in records
            ]
        )
