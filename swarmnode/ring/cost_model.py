"""What a step costs on every stage and on the road: a measured start, refined by every real step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import TYPE_CHECKING

from swarmnode.ring.partition import Partition

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SEEN_WINDOW = 9
"""Steps remembered per size: their median outlives a hiccup and follows growing contexts."""
TRUSTED_STEPS = 2
"""One step may be a hiccup: a size counts as known from the second, by the smaller one."""
ROAD_WINDOW = 33


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Milliseconds of one stage as measured at load: by rows of a group, and by positions of a prompt piece."""

    group_ms: Mapping[int, float]
    piece_ms: Mapping[int, float] = field(default_factory=dict)


class CostTable:
    """Milliseconds by size, from a start table and from what was seen; sizes in between are estimated.

    A start table is measured while the machine has nothing else to do. Sizes that have not run yet are therefore
    scaled by how much dearer (or cheaper) the others turned out to be.
    """

    def __init__(self) -> None:
        self._start: dict[int, float] = {}
        self._seen: dict[int, deque[float]] = {}
        self._known: dict[int, float] = {}

    def start(self, table: Mapping[int, float]) -> None:
        self._start = dict(table)
        self._renew()

    def observe(self, size: int, ms: float) -> None:
        self._seen.setdefault(size, deque(maxlen=SEEN_WINDOW)).append(ms)
        self._renew()

    def known(self) -> Mapping[int, float]:
        """The sizes that are more than estimates, smallest first."""
        return self._known

    def between(self, size: int) -> float | None:
        """By a straight line through the neighbours; above the largest known by the last slope, below in proportion."""
        known = self._known
        if not known or size in known:
            return known.get(size)
        lower = [n for n in known if n < size]
        upper = [n for n in known if n > size]
        if not lower:
            return known[upper[0]] * size / upper[0]
        if upper:
            a, b = lower[-1], upper[0]
            return known[a] + (known[b] - known[a]) * (size - a) / (b - a)
        top = lower[-1]
        slope = (known[top] - known[lower[-2]]) / (top - lower[-2]) if len(lower) > 1 else known[top] / top
        return known[top] + max(0.0, slope) * (size - top)

    def at_best(self, size: int) -> float | None:
        """Like `between`, but a size between two known ones is taken to cost no more than the lower one.

        Costs by rows are steps (a kernel's tile is full), not lines. The lower bound makes a plan try the size once
        it could pay; what it really costs is known a few steps later.
        """
        lower = [n for n in self._known if n <= size]
        if lower and any(n > size for n in self._known):
            return self._known[lower[-1]]
        return self.between(size)

    def _renew(self) -> None:
        seen = {n: median_low(ms) for n, ms in self._seen.items() if len(ms) >= TRUSTED_STEPS}
        ratios = [seen[n] / self._start[n] for n in seen if self._start.get(n)]
        drift = median(ratios) if ratios else 1.0
        known = {n: ms * drift for n, ms in self._start.items()} | seen
        self._known = dict(sorted(known.items()))


class CostModel:
    """Costs of all stages, the road round the ring, and what a prompt position takes on the links."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages = num_stages
        self.steps = 0
        """Groups observed so far: what is planned from older costs is planned again after a while."""
        self.unmeasured_rows = 0
        """What the cards' age lets a group have where its cost is not known or not asked (B4); 0: any number."""
        self._groups = [CostTable() for _ in range(num_stages)]
        self._pieces = [CostTable() for _ in range(num_stages)]
        self._road_ms: deque[float] = deque(maxlen=ROAD_WINDOW)
        self._transfer_ms: deque[float] = deque(maxlen=ROAD_WINDOW)

    def start(self, stage: int, costs: StageCosts) -> None:
        """Begin with what a stage measured at load; real steps that were seen before still say more."""
        self._groups[stage].start(costs.group_ms)
        self._pieces[stage].start(costs.piece_ms)

    def observe_road(self, ms: float) -> None:
        """A small message went round in `ms`, without compute and queues."""
        self._road_ms.append(max(0.0, ms))

    def forget_links(self) -> None:
        """The ring's links are gone; those that take their place may be slower or faster."""
        self._road_ms.clear()
        self._transfer_ms.clear()

    def observe_group(self, rows: int, compute_ms: Sequence[float], rest_ms: float) -> None:
        """A group came back; `rest_ms` is its wall time without waiting behind other work: compute and road."""
        self.steps += 1
        for table, ms in zip(self._groups, compute_ms, strict=False):
            table.observe(rows, ms)
        self.observe_road(rest_ms - sum(compute_ms))

    def observe_piece(self, positions: int, compute_ms: Sequence[float], rest_ms: float) -> None:
        for table, ms in zip(self._pieces, compute_ms, strict=False):
            table.observe(positions, ms)
        self._transfer_ms.append(max(0.0, rest_ms - sum(compute_ms) - self.road_ms) / positions)

    @property
    def plans(self) -> bool:
        """Enough is known to compare groups."""
        return _comparable(self._groups)

    @property
    def compares_pieces(self) -> bool:
        """Enough is known to compare pieces of several sizes."""
        return _comparable(self._pieces)

    @property
    def road_ms(self) -> float:
        """All links once, for something small."""
        return median(self._road_ms) if self._road_ms else 0.0

    @property
    def transfer_ms(self) -> float:
        """What one prompt position adds on all links together; the least seen, as queues on the links count in it."""
        return min(self._transfer_ms, default=0.0)

    def group_ms(self, rows: int) -> list[float]:
        """Each stage's cost of a group."""
        return [table.between(rows) or 0.0 for table in self._groups]

    def round_ms(self, groups: Sequence[int]) -> float:
        """How long it takes until groups of these sizes, one behind the other, are each where they were."""
        return Partition.of(groups, self.group_ms, self.road_ms).cycle_ms

    def group_ms_at_best(self, rows: int) -> list[float]:
        """The least it may turn out to be where it never ran."""
        return [table.at_best(rows) or 0.0 for table in self._groups]

    def piece_ms(self, positions: int) -> list[float] | None:
        """Each stage's cost of a piece; None until something is known of every stage."""
        costs = [table.between(positions) for table in self._pieces]
        return None if None in costs else [ms or 0.0 for ms in costs]


def _comparable(tables: Iterable[CostTable]) -> bool:
    """At least two sizes are known on every stage."""
    return all(len(table.known()) > 1 for table in tables)
