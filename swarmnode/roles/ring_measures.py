"""What a ring's stages, lanes and replies tell of its machines, written into the coordinator's book of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swarmnode.cluster.machine_book import Weights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from swarmnode.cluster.machine_book import MachineBook
    from swarmnode.roles.planning import PlannedRing
    from swarmnode.roles.reports import LaneLink, ReadyStage

LEAST_TOKENS = 16
"""A reply that short tells more of a hiccup than of a machine."""


class RingMeasures:
    """Of one ring. Steps count as those of one row: a stage measures them when it has loaded, and replies show them."""

    def __init__(self, book: MachineBook, planned: PlannedRing) -> None:
        self._book = book
        self._stages = planned.plan.stages
        self._weights = Weights(planned.specs[0].model, planned.dtype, planned.quantization)

    def loaded(self, stage: int, report: ReadyStage, now: float) -> None:
        """A stage has loaded, and measured its steps unless it could not."""
        step_ms = report.costs.group_ms.get("1") if report.costs is not None else None
        if step_ms is not None:
            self._step(stage, step_ms, now)

    def kernels_failed(self, stage: int, why: str) -> None:
        """Those for its weights do not run at a stage's peer: the next plan does without them there."""
        self._book.note_failed(self._stages[stage].peer.node, self._weights, why)

    def linked(self, stage: int, links: Sequence[LaneLink], now: float) -> None:
        """What its lanes to the next stage measured, the best of them: prompts may queue on theirs."""
        sender, receiver = (self._stages[i % len(self._stages)].peer.node for i in (stage, stage + 1))
        trips = [link.round_trip_ms for link in links if link.round_trip_ms is not None]
        rates = [link.mbit_per_s for link in links if link.mbit_per_s is not None]
        self._book.note_link(sender, receiver, min(trips, default=None), max(rates, default=None), now)

    def replied(self, tokens: int, timing: Mapping[str, Any], now: float) -> None:
        """A reply of `tokens` that had the ring for itself has ended: what its steps took of each stage."""
        if tokens < LEAST_TOKENS:
            return
        for stage in range(len(self._stages)):
            step_ms = timing.get(f"stage{stage}_ms")
            if isinstance(step_ms, int | float):
                self._step(stage, float(step_ms), now)

    def _step(self, stage: int, step_ms: float, now: float) -> None:
        held = self._stages[stage]
        work_gib = held.price.step_gib(is_last=stage == len(self._stages) - 1)
        self._book.note_step(held.peer.node, self._weights, step_ms, work_gib, now)
