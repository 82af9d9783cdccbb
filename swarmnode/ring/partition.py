"""How to split sessions into groups: the partition whose steady cycle gives the most tokens per second.

Groups go round a ring one behind the other. A cycle, in which every session gets one token, takes as long as the
busiest stage needs for all groups, and no less than one group needs to go all the way round.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

Parts = tuple[tuple[int, int], ...]
MANY_SESSIONS = 17
"""16 sessions have 231 partitions, 32 have 8,349."""
EVEN_MS = 1e-6
"""Cycles closer than this are equal."""


@dataclass(frozen=True)
class Partition:
    """Groups as (size, how many); `stage_ms` and `longest_ms` are what the cycle is made of."""

    parts: Parts
    stage_ms: float
    """What the busiest stage computes in one cycle."""
    longest_ms: float
    """The slowest group's way round: all stages and the road."""

    @property
    def cycle_ms(self) -> float:
        return max(self.stage_ms, self.longest_ms)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The groups' sizes, largest first."""
        return tuple(sorted((size for size, count in self.parts for _ in range(count)), reverse=True))

    @classmethod
    def of(cls, sizes: Sequence[int], group_ms: Callable[[int], Sequence[float]], road_ms: float) -> Partition:
        """Groups of these sizes; `group_ms(rows)` gives each stage's cost."""
        return cls(tuple(Counter(sizes).items()), 0.0, 0.0).at_costs(group_ms, road_ms)

    def at_costs(self, group_ms: Callable[[int], Sequence[float]], road_ms: float) -> Partition:
        """The same groups at other costs."""
        return _partition(self.parts, {size: group_ms(size) for size, _ in self.parts}, road_ms)


def best_partition(
    sessions: int, group_ms: Callable[[int], Sequence[float]], road_ms: float, max_group: int = 0
) -> Partition:
    """The shortest cycle over all partitions; among equals the one with most slack in the other term.

    From `MANY_SESSIONS` on only partitions of at most two sizes are looked at: nearly as good, and a plan for 32
    sessions stays a matter of milliseconds. `group_ms(rows)` gives each stage's cost.
    """
    largest = min(sessions, max_group or sessions)
    costs = {rows: group_ms(rows) for rows in range(1, largest + 1)}
    splits = _two_sizes(sessions, largest) if sessions >= MANY_SESSIONS else _all_sizes(sessions, largest)
    found = (_partition(parts, costs, road_ms) for parts in splits)
    return min(found, key=lambda p: (round(p.cycle_ms / EVEN_MS), min(p.stage_ms, p.longest_ms), len(p.sizes)))


def _all_sizes(sessions: int, largest: int) -> Iterator[Parts]:
    if sessions == 0:
        yield ()
        return
    for size in range(min(sessions, largest), 0, -1):
        for count in range(sessions // size, 0, -1):
            for rest in _all_sizes(sessions - size * count, size - 1):
                yield ((size, count), *rest)


def _two_sizes(sessions: int, largest: int) -> Iterator[Parts]:
    for size in range(1, largest + 1):
        for count in range(1, sessions // size + 1):
            rest = sessions - size * count
            if rest == 0:
                yield ((size, count),)
                continue
            for other in range(1, min(size - 1, rest) + 1):
                if rest % other == 0:
                    yield ((size, count), (other, rest // other))


def _partition(parts: Parts, costs: Mapping[int, Sequence[float]], road_ms: float) -> Partition:
    stages = range(len(costs[parts[0][0]]))
    stage_ms = max(sum(count * costs[size][stage] for size, count in parts) for stage in stages)
    longest_ms = max(sum(costs[size]) for size, _ in parts) + road_ms
    return Partition(parts, stage_ms, longest_ms)
