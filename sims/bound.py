"""The limit of a ring, computed apart from the scheduler: all partitions of the sessions, nothing clever.

It holds for groups that stay as they are and all go round once a cycle. Leaving some sessions out of every cycle, in
turn, can pass it by a few percent where a row more is dear.

    bound(U) = max over partitions of U sessions into groups of
               U / max(max over stages of Σ cost, max over groups of (Σ stage costs + round trip))
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@cache
def partitions(total: int, largest: int) -> tuple[tuple[int, ...], ...]:
    """Every way to write `total` as a sum of parts of at most `largest`, order apart."""
    if total == 0:
        return ((),)
    return tuple((part, *rest) for part in range(min(total, largest), 0, -1) for rest in partitions(total - part, part))


def cycle_ms(groups: Sequence[int], stages: Sequence[Callable[[int], float]], road_ms: float) -> float:
    """How long one round of these groups takes at least."""
    busiest = max(sum(cost(rows) for rows in groups) for cost in stages)
    slowest = max(sum(cost(rows) for cost in stages) + road_ms for rows in groups)
    return max(busiest, slowest)


def bound_tokens_per_s(
    users: int, stages: Sequence[Callable[[int], float]], road_ms: float, max_group: int = 0
) -> float:
    """Tokens per second of the best partition; `max_group` 0: groups of any size."""
    remembered = [cache(cost) for cost in stages]
    shortest = min(cycle_ms(groups, remembered, road_ms) for groups in partitions(users, max_group or users))
    return users / shortest * 1e3
