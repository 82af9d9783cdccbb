"""Groups and prompt pieces by what they cost on these stages and links: the most tokens per second, nobody held up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmnode.ring.partition import best_partition
from swarmnode.ring.schedule import Pass, SourceSchedule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarmnode.ring.cost_model import CostModel
    from swarmnode.ring.head_config import HeadConfig
    from swarmnode.ring.partition import Partition
    from swarmnode.ring.schedule import Schedule

PLAN_STEPS = 16
"""Group steps after which a plan is held against newer costs."""
BETTER = 0.98
"""A running plan gives way to one whose cycle is this much shorter: every change costs about one cycle."""
WORTH_A_TRY = 0.95
"""Sizes that never ran are tried where they could shorten the cycle by this much; a few steps then tell."""
PIECE_SIZES = (256, 128, 64, 32)
PIECE_MS = 500.0
"""A piece that decode steps wait behind may cost this, or `PIECE_STEPS` of them where those are slow."""
PIECE_STEPS = 3
SOONER = 0.9
"""Smaller pieces than the largest are to end a prompt so much sooner: costs are those of first pieces, and small ones
lose more behind a long past."""
PIECE_BYTES_IN_FLIGHT = 8 << 20
"""Hidden states of pieces on the way: seconds of a home uplink, beyond what keeps it busy."""


@dataclass(frozen=True, slots=True)
class _Way:
    """Of a piece round the ring: all of it, and the stage or link that takes longest."""

    trip_ms: float
    slowest_ms: float


class CostSchedule:
    """Follows a partition planned from the cost model; until that knows enough, the source's rules."""

    def __init__(self, config: HeadConfig, costs: CostModel) -> None:
        self._config = config
        self._costs = costs
        self._fallback = SourceSchedule(config, costs)
        self._plans: dict[int, tuple[int, Partition]] = {}

    # groups

    def group_rows(self, now: Pass) -> int:
        """The planned size that nothing in flight stands for; 0 when all planned groups are under way."""
        if not self._costs.plans:
            return self._fallback.group_rows(now)
        left = list(self._plan(now.decoding).sizes)
        for rows in sorted(now.groups_in_flight, key=lambda rows: rows not in left):
            if not left:
                return 0
            left.remove(min(left, key=lambda size: abs(size - rows)))
        if not left:
            return 0
        return max((size for size in left if size <= now.ready), default=now.ready)

    def _plan(self, sessions: int) -> Partition:
        steps, plan = self._plans.get(sessions, (0, None))
        if plan is None or self._costs.steps - steps >= PLAN_STEPS:
            plan = self._renewed(sessions, plan)
            self._plans[sessions] = (self._costs.steps, plan)
        return plan

    def _renewed(self, sessions: int, running: Partition | None) -> Partition:
        costs, cap = self._costs, self._config.max_group
        best = best_partition(sessions, costs.group_ms, costs.road_ms, cap)
        hoped = best_partition(sessions, costs.group_ms_at_best, costs.road_ms, cap)
        if hoped.cycle_ms < best.cycle_ms * WORTH_A_TRY:
            return hoped
        if running is None:
            return best
        kept = running.at_costs(costs.group_ms, costs.road_ms)
        return best if best.cycle_ms < kept.cycle_ms * BETTER else kept

    # pieces

    def piece_positions(self, now: Pass, left: int, whole: int = 0) -> int:
        n = min(left, self._piece_size(now, whole or left) or left)
        return n if now.pieces_in_flight < self._pieces_ahead(now, n) else 0

    def _piece_size(self, now: Pass, whole: int) -> int:
        """0: the whole prompt. While others decode, the largest size that holds them up no longer than `PIECE_MS`; else
        that with which so many positions are read soonest, until as many prompts as stages keep these at work. Whoever
        asked for larger pieces than usual, or for whole prompts, has them."""
        largest = self._config.prefill_chunk
        if not largest:
            return 0
        sizes = [largest, *(size for size in PIECE_SIZES if size < largest)]
        if now.decoding:
            return next((size for size in sizes if self._bearable(size, now)), sizes[-1])
        asked = largest > PIECE_SIZES[0]
        if asked or now.prompts > self._config.num_stages or not self._costs.compares_pieces:
            return largest
        return self._soonest(sizes, whole, now.bytes_per_position)

    def _soonest(self, sizes: Sequence[int], whole: int, position_bytes: int) -> int:
        """Of equal pieces of about these sizes, none larger than the first."""
        counts = [-(-whole // sizes[0]), *(max(1, round(whole / size)) for size in sizes[1:])]
        parts = [-(-whole // count) for count in counts]
        reading_ms = {n: self._reading_ms(n, whole, position_bytes) for n in parts}
        best = min(parts, key=reading_ms.__getitem__)
        return best if reading_ms[best] < reading_ms[parts[0]] * SOONER else parts[0]

    def _reading_ms(self, n: int, whole: int, position_bytes: int) -> float:
        """Until so many positions are read in pieces of `n`: small ones let later stages begin early, large ones cost
        less in all, and fewer of them may be under way."""
        way = self._way(n, self._costs.piece_ms(n) or [])
        allowed = max(2, PIECE_BYTES_IN_FLIGHT // (position_bytes * n)) if position_bytes else math.inf
        return way.trip_ms + (-(-whole // n) - 1) * max(way.slowest_ms, way.trip_ms / allowed)

    def _bearable(self, positions: int, now: Pass) -> bool:
        piece_ms = self._costs.piece_ms(positions)
        if piece_ms is None:
            return False
        rows = max(now.groups_in_flight, default=now.ready)
        return all(
            ms <= max(PIECE_MS, PIECE_STEPS * step_ms)
            for ms, step_ms in zip(piece_ms, self._costs.group_ms(rows), strict=True)
        )

    def _pieces_ahead(self, now: Pass, n: int) -> int:
        """Enough to keep the slowest stage and the slowest link busy: a piece's whole way over its slowest part."""
        piece_ms = self._costs.piece_ms(n)
        if piece_ms is None:
            return self._config.num_stages
        way = self._way(n, piece_ms)
        wanted = math.ceil(way.trip_ms / way.slowest_ms - 1e-9) + 1
        if not now.bytes_per_position:
            return wanted
        room = PIECE_BYTES_IN_FLIGHT // now.bytes_per_position - now.positions_in_flight
        return min(wanted, max(2, now.pieces_in_flight + room // n))

    def _way(self, n: int, piece_ms: Sequence[float]) -> _Way:
        links = max(1, self._config.num_stages - 1)
        transfer_ms = n * self._costs.transfer_ms
        slowest_ms = max(*piece_ms, transfer_ms / links, 1e-3)
        return _Way(sum(piece_ms) + transfer_ms + self._costs.road_ms, slowest_ms)


def make_schedule(config: HeadConfig, costs: CostModel) -> Schedule:
    """The schedule the configuration names."""
    return SourceSchedule(config, costs) if config.schedule == "source" else CostSchedule(config, costs)
