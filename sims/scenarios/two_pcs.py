"""Two home PCs under many users: what the source measured, what its rules reach, and what costs allow.

Stage 0 (two GTX 1050 Ti, float32) and stage 1 (two GTX 1660 SUPER, NF4) of Qwen3-14B, 21 ms apart. Prompts are cached
and users never stop, so the figures are those of steady decoding.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from sims.bound import bound_tokens_per_s
from sims.engines import StageTable
from sims.ring import RingSpec, links_of
from sims.scenarios.decode import steady
from sims.source_transport import OneGroup, SplitWorld
from swarmnode.ring.cost_model import CostModel

if TYPE_CHECKING:
    from sims.world import World
    from swarmnode.ring.schedule import Schedule

STAGE_0 = {1: 112.0, 8: 468.0}
"""Both measured; straight between them (assumed)."""
STAGE_1_SPLIT = {1: 120.0, 2: 130.0, 3: 147.0, 4: 211.0, 8: 422.0}
"""4-bit rows split at 3; 2 rows assumed, 8 as two calls of 4."""
STAGE_1_UNSPLIT = {1: 120.0, 2: 130.0, 3: 147.0, 4: 671.0, 8: 700.0}
"""2 and 8 rows assumed."""


@dataclass(frozen=True, slots=True)
class TwoPcs:
    """The scenario's flags. `coalesce_ms` None: a group is one frame; else the source's one frame per session, and
    how long a stage waits for the rest of a batch."""

    users: int = 8
    schedule: str = "cost"
    host_ms: float = 0.0
    split_rows: bool = True
    max_batch: int = 0
    groups: str = "per-stage"
    coalesce_ms: float | None = None
    rtt_ms: float = 21.0
    jitter: float = 0.0
    seed: int = 0

    def tables(self) -> tuple[StageTable, StageTable]:
        stage_1 = STAGE_1_SPLIT if self.split_rows else STAGE_1_UNSPLIT
        return StageTable(STAGE_0, host_ms=self.host_ms), StageTable(stage_1)

    def bound(self) -> float:
        costs = [table.group_ms for table in self.tables()]
        return bound_tokens_per_s(self.users, costs, self.rtt_ms, self.max_batch)


def run(flags: TwoPcs) -> dict[str, Any]:
    """One run, with the bound beside it."""
    world = build(flags)
    return steady(world, flags.users, flags.bound()) | {"flags": asdict(flags)}


def build(flags: TwoPcs) -> World:
    spec = RingSpec(
        tables=flags.tables(),
        links=links_of(2, flags.rtt_ms),
        schedule=flags.schedule,
        max_group=flags.max_batch,
        jitter=flags.jitter,
        seed=flags.seed,
    )
    costs = CostModel(len(spec.tables))
    schedule: Schedule | None = OneGroup(spec.head_config, costs) if flags.groups == "one" else None
    if flags.coalesce_ms is None:
        return spec.build(schedule)
    world = spec.build(schedule, SplitWorld)
    assert isinstance(world, SplitWorld)
    world.coalesce_s = flags.coalesce_ms / 1e3
    return world


SOURCE_FIGURES = {
    "5.8: one group, split on arrival": TwoPcs(
        schedule="source", host_ms=20, split_rows=False, groups="one", coalesce_ms=0
    ),
    "5.7: groups of 4": TwoPcs(schedule="source", host_ms=20, split_rows=False),
    "9.9: batches of 2": TwoPcs(schedule="source", host_ms=20, split_rows=False, max_batch=2),
    "11.6: groups of 4, rows split": TwoPcs(schedule="source", host_ms=20),
}
"""What the source measured with 8 users, and the flags that say how it was set up. `host_ms` is fitted."""


def source_figures() -> dict[str, Any]:
    """The source's measured figures beside the simulated ones."""
    rows = []
    for name, flags in SOURCE_FIGURES.items():
        measured, result = float(name.split(":")[0]), run(flags)
        rate = result["tokens_per_s"]
        rows.append({"case": name, "simulated": rate, "off": f"{rate / measured - 1:+.1%}", "flags": _said(flags)})
    return {"host_ms": "20 ms a session and step on stage 0: fitted, not measured", "rows": rows}


def _said(flags: TwoPcs) -> str:
    parts = [f"--schedule {flags.schedule}", f"--host-ms {flags.host_ms:g}"]
    parts.append("--split-rows" if flags.split_rows else "--no-split-rows")
    parts += [f"--max-batch {flags.max_batch}"] if flags.max_batch else []
    parts += [f"--groups {flags.groups}"] if flags.groups != "per-stage" else []
    parts += [f"--coalesce-ms {flags.coalesce_ms:g}"] if flags.coalesce_ms is not None else []
    return " ".join(parts)


GRID_USERS = (1, 2, 4, 6, 8, 16)
GRID_RTT_MS = (0, 21, 60, 100, 200)


def grid(seed: int = 0, host_ms: float = 0.0) -> dict[str, Any]:
    """Both schedules against the bound over users and round trips; `jitter` varies every step by ± 10 %."""
    rows = []
    for users in GRID_USERS:
        for rtt_ms in GRID_RTT_MS:
            flags = TwoPcs(users=users, rtt_ms=rtt_ms, host_ms=host_ms, seed=seed)
            cost = run(flags)
            rows.append(
                {
                    "users": users,
                    "rtt_ms": rtt_ms,
                    "bound_tokens_per_s": cost["bound_tokens_per_s"],
                    "cost": cost["ratio"],
                    "cost_jitter": run(_with(flags, jitter=0.1))["ratio"],
                    "source": run(_with(flags, schedule="source"))["ratio"],
                    "source_jitter": run(_with(flags, schedule="source", jitter=0.1))["ratio"],
                }
            )
    return {
        "worst_cost": min(row["cost"] for row in rows),
        "worst_cost_jitter": min(row["cost_jitter"] for row in rows),
        "worst_against_source": round(min(row["cost"] / row["source"] for row in rows), 4),
        "worst_against_source_jitter": round(min(row["cost_jitter"] / row["source_jitter"] for row in rows), 4),
        "rows": rows,
    }


def _with(flags: TwoPcs, **changes: Any) -> TwoPcs:
    return TwoPcs(**asdict(flags) | changes)
