"""Why the source's first relay gave 4.5 tokens/s whatever was in flight: two round trips on the compute thread.

Two stages of 180 ms, 21 ms to the relay and back. Unpipelined, a stage pops a frame, computes and pushes on one
thread: 1 / (compute + 2 × round trip). Pipelined, frames travel while stages compute: 1 / compute.
"""

from __future__ import annotations

from typing import Any

from sims.engines import StageTable
from sims.report import run_window, tokens_per_s
from sims.ring import RingSpec, links_of
from sims.source_transport import PollingWorld
from sims.world import Request, World

COMPUTE_MS = 180.0
RTT_MS = 21.0
IN_FLIGHT = (1, 2, 4, 8)
FOR_EVER = 1 << 30
WARM_UP_S = 30.0
WINDOW_S = 120.0


def run(seed: int = 0) -> dict[str, Any]:
    """Both relays at 1 to 8 sessions in flight, one session a frame as the source had it; figures are those of 4."""
    rows = [
        {
            "in_flight": n,
            "unpipelined": round(_rate(n, PollingWorld, seed), 3),
            "pipelined": round(_rate(n, World, seed), 3),
        }
        for n in IN_FLIGHT
    ]
    at_four = rows[IN_FLIGHT.index(4)]
    return {
        "unpipelined": {
            "tokens_per_s": at_four["unpipelined"],
            "formula_tokens_per_s": round(1e3 / (COMPUTE_MS + 2 * RTT_MS), 3),
        },
        "pipelined": {"tokens_per_s": at_four["pipelined"], "formula_tokens_per_s": round(1e3 / COMPUTE_MS, 3)},
        "rows": rows,
    }


def _rate(in_flight: int, world_type: type[World], seed: int) -> float:
    table = StageTable({1: COMPUTE_MS, 8: 8 * COMPUTE_MS})
    links = links_of(2, 2 * RTT_MS)  # to the relay and on from it: half a round trip each, on both of the ring's links
    spec = RingSpec((table, table), links, schedule="source", max_group=1, seed=seed)
    world = spec.build(world=world_type)
    users = [world.open(Request(f"user-{i}", (1,), FOR_EVER)) for i in range(in_flight)]
    return tokens_per_s(users, run_window(world, WARM_UP_S, WINDOW_S))
