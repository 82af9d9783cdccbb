"""How long a swarm is without a coordinator after it was killed: voters in virtual time, many failovers.

A voter notices by silence alone, so nearly all of it is the election timeout; what peers need to find the new one comes
on top.
"""

from __future__ import annotations

import statistics
from typing import Any

from sims.voters import VotersWorld

SETTLED_S = 30.0
"""After this a first coordinator is there."""
GIVEN_UP_S = 120.0


def run(voters: int = 3, failovers: int = 1000, seed: int = 0) -> dict[str, Any]:
    """Seconds from the kill to the successor's first safe entry."""
    took_s = sorted(_failover(voters, seed + number) for number in range(failovers))
    return {
        "voters": voters,
        "failovers": failovers,
        "p50_s": round(statistics.median(took_s), 2),
        "p99_s": round(took_s[int(0.99 * (failovers - 1))], 2),
        "worst_s": round(took_s[-1], 2),
    }


def _failover(voters: int, seed: int) -> float:
    world = VotersWorld(voters, seed)
    world.run_until(SETTLED_S + world.random.random())
    while (leader := world.coordinator()) is None:
        world.run_until(world.now_s + 1.0)
    killed_s = world.now_s
    world.crash(leader)
    while world.coordinator() is None and world.now_s - killed_s < GIVEN_UP_S:
        world.run_until(world.now_s + 0.1)
    return world.now_s - killed_s
