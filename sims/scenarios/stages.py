"""Rings of 2 to 8 stages: how much of the bound is reached as the ring grows and its links get longer.

All stages alike: a group costs 40 ms plus 8 ms a row (a weight-bound card); 1, 4 and 12 users.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sims.engines import StageTable
from sims.ring import RingSpec, links_of
from sims.scenarios.decode import against_source

if TYPE_CHECKING:
    from collections.abc import Sequence

STAGE = StageTable({rows: 40.0 + 8.0 * rows for rows in (1, 2, 4, 8, 16)})
USERS = (1, 4, 12)
"""The brute-force bound grows with the number of partitions: 77 for 12 users, 231 for 16."""


def run(
    stages: Sequence[int] = range(2, 9), rtt_ms: float = 20.0, jitter: float = 0.0, seed: int = 0
) -> dict[str, Any]:
    """`rtt_ms` is between neighbours: a ring of n stages has a road of n / 2 of it."""
    rows = []
    for n in stages:
        for users in USERS:
            spec = RingSpec((STAGE,) * n, links_of(n, n * rtt_ms / 2), jitter=jitter, seed=seed)
            rows.append({"stages": n, "users": users, **against_source(spec, users)})
    return {"rtt_ms": rtt_ms, "worst_ratio": min(row["ratio"] for row in rows), "rows": rows}
