"""What a node shows of its swarm while it is without a coordinator: the members as they were told last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarmnode.cluster.member_table import KnownMembers


def last_known(known: KnownMembers, now: float) -> dict[str, Any] | None:
    """`GET /api/v1/nodes?last_known=1` without a coordinator; None where none ever told anything. Times are Unix's."""
    if known.as_of_s is None:
        return None
    rows = sorted(known.rows.values(), key=lambda row: row.name)
    return {
        "coordinator": None,
        "last_coordinator": known.heading.coordinator,
        "as_of": round(known.as_of_s, 3),
        "age_s": round(max(0.0, now - known.as_of_s), 1),
        "term": known.mark[0],
        "voters": list(known.heading.voters),
        "peers": [
            {"node": row.node, "name": row.name, "state": row.state.value, "address": row.address or None}
            for row in rows
        ],
        "rings": [],
    }
