"""The nodes that were ever let in: their certificates' serials, and which of them were removed. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from swarmnode.errors import Conflict, JoinRefused, PeerNotFound
from swarmnode.ids import NodeId

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KEPT_SERIALS = 4
"""Of a node's renewals, the latest: the earlier ones have expired by then."""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """`serials` are those of its certificates, newest last; times are Unix seconds."""

    node: NodeId
    name: str
    serials: tuple[int, ...]
    expires_s: float
    removed_s: float | None = None


class NodeBook:
    """What the coordinator's document says about members. A removed node stays listed: its key is out for good."""

    def __init__(self, records: Sequence[NodeRecord] = ()) -> None:
        self._records = {record.node: record for record in records}

    def issued(self, node: NodeId, name: str, serial: int, expires_s: float) -> None:
        """A certificate was made for `node`. Raises JoinRefused for a removed node, Conflict for a name in use."""
        self.check(node, name)
        earlier = self._records.get(node)
        serials = (*(earlier.serials if earlier else ()), serial)[-KEPT_SERIALS:]
        self._records[node] = NodeRecord(node, name, serials, expires_s)

    def check(self, node: NodeId, name: str) -> None:
        """Raise what would forbid a certificate for `node` under `name`."""
        known = self._records.get(node)
        if known is not None and known.removed_s is not None:
            raise JoinRefused(
                f"node {node[:8]} ({known.name}) was removed from this swarm, and its key with it; to join as a new "
                "node, start it with an empty --data-dir"
            )
        for other in self._records.values():
            if other.name == name and other.node != node and other.removed_s is None:
                raise Conflict(f"another node is already called {name!r}; give --name, or remove that node first")

    def renamed(self, node: NodeId, name: str) -> bool:
        """Note the name a known node goes by now; returns whether that was news."""
        known = self._records.get(node)
        if known is None or known.name == name:
            return False
        self._records[node] = replace(known, name=name)
        return True

    def remove(self, name: str, now: float) -> NodeRecord:
        """Revoke by name or id; raises PeerNotFound that lists the names."""
        members = [record for record in self._records.values() if record.removed_s is None]
        found = next((r for r in members if r.node == name), None) or next((r for r in members if r.name == name), None)
        if found is None:
            names = ", ".join(sorted(record.name for record in members)) or "none"
            raise PeerNotFound(f"no node is called {name[:120]!r}; there are: {names}")
        removed = replace(found, removed_s=now)
        self._records[found.node] = removed
        return removed

    def records(self) -> tuple[NodeRecord, ...]:
        return tuple(self._records.values())

    def revoked(self) -> frozenset[NodeId]:
        return frozenset(record.node for record in self._records.values() if record.removed_s is not None)

    def as_json(self) -> list[dict[str, Any]]:
        """Serials as hex: they have up to 159 bits, more than a JSON number is read as."""
        return [
            {
                "node": r.node,
                "name": r.name,
                "serials": [f"{serial:x}" for serial in r.serials],
                "expires_s": r.expires_s,
                "removed_s": r.removed_s,
            }
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
                    tuple(int(serial, 16) for serial in r["serials"]),
                    float(r["expires_s"]),
                    None if r["removed_s"] is None else float(r["removed_s"]),
                )
                for r in records
            ]
        )
