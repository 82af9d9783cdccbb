"""What uneven steps cost: the two PCs with every step and every frame varied, over several seeds.

With jitter a stage at the bound now and then waits for a late group; nothing gives that time back.
"""

from __future__ import annotations

from typing import Any

from sims.ring import RingSpec
from sims.scenarios.decode import bound_of, steady
from sims.scenarios.two_pcs import TwoPcs
from sims.world import Link

STEP_JITTERS = (0.0, 0.1, 0.3)
FRAME_JITTER_MS = 5.0
USERS = (2, 8)
SEEDS = 3


def run(seed: int = 0) -> dict[str, Any]:
    rows = []
    for users in USERS:
        for jitter in STEP_JITTERS:
            ratios = [_ratio(_spec(jitter, seed + i), users) for i in range(SEEDS)]
            rows.append({"users": users, "step_jitter": jitter, "worst_ratio": min(ratios), "best_ratio": max(ratios)})
    return {"frame_jitter_ms": FRAME_JITTER_MS, "seeds": SEEDS, "rows": rows}


def _ratio(spec: RingSpec, users: int) -> float:
    ratio: float = steady(spec.build(), users, bound_of(spec, users))["ratio"]
    return ratio


def _spec(jitter: float, seed: int) -> RingSpec:
    flags = TwoPcs(jitter=jitter, seed=seed)
    link = Link(flags.rtt_ms / 2e3, jitter_s=FRAME_JITTER_MS / 1e3 if jitter else 0.0)
    return RingSpec(flags.tables(), (link, link), jitter=jitter, seed=seed)
