"""A long prompt over two unequal stages: overlapping pieces against waiting for each answer, against the floor.

Pieces of 256 take 2.0 s on stage 0 and 7.7 s on stage 1 (the source's PCs), 2.6 MB of hidden state each. The floor is
one piece's pass through everything plus the other pieces at the slowest server, links included.
"""

from __future__ import annotations

from typing import Any

from sims.engines import StageTable
from sims.ring import RingSpec
from sims.world import Link, Request, World
from swarmnode.ring.cost_model import CostModel
from swarmnode.ring.head_messages import Sampled
from swarmnode.ring.schedule import Pass, Schedule, SourceSchedule

PIECE = 256
STAGE_0_MS, STAGE_1_MS = 2000.0, 7700.0
RTT_MS = 21.0
PIECE_BYTES = 2_600_000
SLOW_BYTES_PER_S = 10e6 / 8
"""10 Mbit/s."""


class OneAtATime(SourceSchedule):
    """Waits for each piece's answer before it sends the next, as the source did at first."""

    def piece_positions(self, now: Pass, left: int, whole: int = 0) -> int:
        return 0 if now.pieces_in_flight else super().piece_positions(now, left, whole)


def run(tokens: int = 1526, seed: int = 0) -> dict[str, Any]:
    """Time to the first token by schedule, on an unlimited link and at 10 Mbit/s."""
    return {
        "tokens": tokens,
        "unlimited": _compare(tokens, None, seed),
        "at_10_mbit_s": _compare(tokens, SLOW_BYTES_PER_S, seed),
    }


def _compare(tokens: int, bytes_per_s: float | None, seed: int) -> dict[str, Any]:
    floor_s = floor(tokens, bytes_per_s)
    spec = _spec(bytes_per_s, "cost", seed)
    ours_s, source_s = ttft_s(spec, tokens), ttft_s(_spec(bytes_per_s, "source", seed), tokens)
    waiting_s = ttft_s(spec, tokens, OneAtATime(spec.head_config, CostModel(len(spec.tables))))
    return {
        "floor_s": round(floor_s, 3),
        "ours_s": round(ours_s, 3),
        "ratio": round(ours_s / floor_s, 4),
        "source_rules_s": round(source_s, 3),
        "waiting_for_each_s": round(waiting_s, 3),
    }


def floor(tokens: int, bytes_per_s: float | None) -> float:
    """Seconds: the first piece through all servers (stage 0, the line, stage 1) and both links' latency, the other
    pieces at the slowest server."""
    tables = _tables()
    sizes = [min(PIECE, tokens - at) for at in range(0, tokens, PIECE)]

    def servers_s(n: int) -> list[float]:
        line_s = n * PIECE_BYTES / PIECE / bytes_per_s if bytes_per_s else 0.0
        return [tables[0].piece_ms(n) / 1e3, line_s, tables[1].piece_ms(n) / 1e3]

    return sum(servers_s(sizes[0])) + RTT_MS / 1e3 + sum(max(servers_s(n)) for n in sizes[1:])


def ttft_s(spec: RingSpec, tokens: int, schedule: Schedule | None = None) -> float:
    """Seconds to the first token of a lone prompt."""
    world: World = spec.build(schedule)
    begin_s = world.now_s
    asked = world.open(Request("prompt", (1,) * tokens, 1))
    world.run_until_quiet()
    return asked.seconds_of(Sampled) - begin_s


def _tables() -> tuple[StageTable, StageTable]:
    size = PIECE_BYTES // PIECE
    return (
        StageTable({1: 112.0, 8: 468.0}, {PIECE: STAGE_0_MS}, bytes_per_position=size),
        StageTable({1: 120.0, 4: 211.0, 8: 422.0}, {PIECE: STAGE_1_MS}, bytes_per_position=size),
    )


def _spec(bytes_per_s: float | None, schedule: str, seed: int) -> RingSpec:
    link = Link(RTT_MS / 2e3, bytes_per_s=bytes_per_s)
    return RingSpec(_tables(), (link, link), schedule=schedule, seed=seed)
