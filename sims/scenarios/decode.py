"""Rings of table stages under users who never stop: the runs that several studies share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sims.bound import bound_tokens_per_s
from sims.report import latencies, run_window, tokens_per_s, utilisation
from sims.world import Request

if TYPE_CHECKING:
    from sims.ring import RingSpec
    from sims.world import World

FOR_EVER = 1 << 30
WARM_UP_S = 30.0
WINDOW_S = 90.0


def steady(world: World, users: int, bound: float) -> dict[str, Any]:
    """Tokens per second of `users` in steady decoding, beside the bound."""
    outcomes = [world.open(Request(f"user-{i}", (1,), FOR_EVER)) for i in range(users)]
    window = run_window(world, WARM_UP_S, WINDOW_S)
    rate = tokens_per_s(outcomes, window)
    return {
        "tokens_per_s": round(rate, 3),
        "bound_tokens_per_s": round(bound, 3),
        "ratio": round(rate / bound, 4),
        **latencies(outcomes, window),
        "utilisation": utilisation(world, window),
    }


def bound_of(spec: RingSpec, users: int) -> float:
    """The bound of a ring; the road is what a frame takes on average."""
    road_ms = sum(link.latency_s + link.jitter_s / 2 for link in spec.links) * 1e3
    return bound_tokens_per_s(users, [table.group_ms for table in spec.tables], road_ms, spec.max_group)


def against_source(spec: RingSpec, users: int) -> dict[str, Any]:
    """The same ring under both schedules: bound and both ratios."""
    bound, theirs = bound_of(spec, users), replace(spec, schedule="source")
    ours, source = steady(spec.build(), users, bound), steady(theirs.build(), users, bound)
    return {
        "tokens_per_s": ours["tokens_per_s"],
        "bound_tokens_per_s": ours["bound_tokens_per_s"],
        "ratio": ours["ratio"],
        "source_ratio": source["ratio"],
        "itl_p99_ms": ours["itl_p99_ms"],
        "utilisation": ours["utilisation"],
    }
