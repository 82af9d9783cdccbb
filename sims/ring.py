"""Builds a virtual ring of table stages: what the head is told at its start is what a worker would have measured."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from sims.engines import StageTable, TableEngine
from sims.world import Link, World
from swarmnode.ring.cost_model import StageCosts
from swarmnode.ring.head_config import HeadConfig
from swarmnode.ring.head_messages import RingMeasured
from swarmnode.ring.kv_budget import TYPICAL_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarmnode.ring.schedule import Schedule

MEASURED_ROWS = (1, 2, 4, 8)
MEASURED_POSITIONS = (32, 64, 128, 256)
PLENTY_TOKENS = 1 << 40
"""Memory is no subject of most studies."""


@dataclass(frozen=True, slots=True)
class RingSpec:
    """Stages and links of a study. `jitter` varies every step by ± that share of it. Nothing is parked unless asked
    for: prompts of most studies are alike, and would be read once only."""

    tables: tuple[StageTable, ...]
    links: tuple[Link, ...]
    schedule: str = "cost"
    max_group: int = 0
    max_in_flight: int = 64
    prefill_chunk: int = 256
    kv_tokens: int = PLENTY_TOKENS
    typical_tokens: int = TYPICAL_TOKENS
    prefix_reuse: bool = False
    jitter: float = 0.0
    seed: int = 0

    @property
    def head_config(self) -> HeadConfig:
        return HeadConfig(
            num_stages=len(self.tables),
            context_tokens=self.kv_tokens,
            kv_tokens=self.kv_tokens,
            max_in_flight=self.max_in_flight,
            max_waiting=PLENTY_TOKENS,
            eos_token_ids=frozenset(),
            prefill_chunk=self.prefill_chunk,
            max_group=self.max_group,
            schedule=self.schedule,
            typical_tokens=self.typical_tokens,
            prefix_reuse=self.prefix_reuse,
        )

    def engines(self) -> list[TableEngine]:
        last = len(self.tables) - 1
        return [
            TableEngine(table, index == last, Random(f"{self.seed}/{index}"), self.jitter)
            for index, table in enumerate(self.tables)
        ]

    def build(self, schedule: Schedule | None = None, world: type[World] = World) -> World:
        """The world, probed and measured as after a load; `schedule` takes the place of the configured one."""
        built = world(self.head_config, self.engines(), self.links, schedule=schedule, seed=self.seed)
        measure(built, self.tables)
        return built


def measure(world: World, tables: Sequence[StageTable]) -> None:
    """What stages measure at load and the probe finds out."""
    costs = tuple(
        StageCosts(
            {rows: table.group_ms(rows) for rows in MEASURED_ROWS},
            {n: table.piece_ms(n) for n in MEASURED_POSITIONS},
        )
        for table in tables
    )
    world.measured(RingMeasured(world.head.config.kv_tokens, costs))
    world.probe()
    world.run_until_quiet()


def links_of(num_stages: int, road_ms: float, bytes_per_s: float | None = None) -> tuple[Link, ...]:
    """Links that add up to `road_ms` round the ring, all alike; in a ring of one there is none."""
    return (Link(road_ms / num_stages / 1e3, bytes_per_s=bytes_per_s),) * num_stages
