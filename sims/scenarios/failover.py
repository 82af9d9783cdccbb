"""How long a swarm is without a coordinator after it was killed: voters and members in virtual time, many failovers.

A voter notices by silence alone, so nearly all of it is the election timeout. Then every node has to find the new one:
each dials again every few seconds, and whoever answers it coordinates (where it is, nodes know beforehand).
"""

from __future__ import annotations

import statistics
from typing import Any

from sims.members import MembersWorld
from sims.report import percentile
from sims.scenarios.churn import WEATHER
from sims.voters import VotersWorld

SETTLED_S = 30.0
"""After this a first coordinator is there, and everybody with it."""
GIVEN_UP_S = 120.0
RETURNS = 100
"""Failovers that are followed until every node is back; each takes longer to compute than an election."""


def run(voters: int = 3, failovers: int = 1000, seed: int = 0, nodes: int = 5) -> dict[str, Any]:
    """Seconds from the kill to the successor's first safe entry; and until all of `nodes` are with it."""
    took_s = [succession_s(voters, seed + number) for number in range(failovers)]
    whole_s = [took + _return(nodes, seed + number, took) for number, took in enumerate(took_s[:RETURNS])]
    return {
        "nodes": nodes,
        "voters": voters,
        "failovers": failovers,
        "p50_s": round(statistics.median(took_s), 2),
        "p99_s": round(percentile(took_s, 0.99), 2),
        "worst_s": round(max(took_s), 2),
        "all_back": {"p50_s": round(statistics.median(whole_s), 2), "p99_s": round(percentile(whole_s, 0.99), 2)},
    }


def succession_s(voters: int, seed: int) -> float:
    """From the kill of a coordinator to its successor's first safe entry."""
    world = VotersWorld(voters, seed)
    world.run_until(SETTLED_S + world.random.random())
    while (leader := world.coordinator()) is None:
        world.run_until(world.now_s + 1.0)
    killed_s = world.now_s
    world.crash(leader)
    while world.coordinator() is None and world.now_s - killed_s < GIVEN_UP_S:
        world.run_until(world.now_s + 0.1)
    return world.now_s - killed_s


def _return(nodes: int, seed: int, without_s: float) -> float:
    """Seconds from the successor's first until every node is with it and holds its table."""
    world = MembersWorld(nodes, seed, WEATHER)
    for node in world.hosts:
        world.start(node)
    world.run_until(SETTLED_S + world.random.random())
    world.kill_coordinator()
    world.run_until(world.now_s + without_s)
    world.succeed()
    there_s = world.now_s
    while world.differences() and world.now_s - there_s < GIVEN_UP_S:
        world.run_until(world.now_s + 0.1)
    return world.now_s - there_s
