"""What goes round next: the seam between the head and a schedule, and the source's fixed rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from swarmnode.ring.cost_model import CostModel
    from swarmnode.ring.head_config import HeadConfig


@dataclass(frozen=True, slots=True)
class Pass:
    """What is ready and what is under way: made for one decision and thrown away with it."""

    ready: int
    """Sessions whose next position may go round now."""
    groups_in_flight: tuple[int, ...] = ()
    """Rows of every group that is going round."""
    prompts: int = 1
    """Being read, one after the other or in turn."""
    pieces_in_flight: int = 0
    positions_in_flight: int = 0
    """Prompt positions of those pieces."""
    bytes_per_position: int = 0
    """Of hidden state on stage 0's link; 0 until something was sent."""

    @property
    def decoding(self) -> int:
        """All sessions in decode: a group that comes back together is not split again."""
        return self.ready + sum(self.groups_in_flight)


class Schedule(Protocol):
    """Decides how much; the head decides whose: the session that waited longest, prompts in turn."""

    def group_rows(self, now: Pass) -> int:
        """Rows of the next decode group; 0 holds the ready ones back until something returns."""

    def piece_positions(self, now: Pass, left: int, whole: int = 0) -> int:
        """Positions of the next piece of a prompt with `left` to go, of `whole` that it has to read in all (0: that are
        left); 0 sends none now."""


class SourceSchedule:
    """The source's rules: groups of ceil(in flight / stages) under the cap, one piece per stage in the ring. What was
    configured is the cap, else what the cards' age tells."""

    def __init__(self, config: HeadConfig, costs: CostModel) -> None:
        self._config = config
        self._costs = costs

    def group_rows(self, now: Pass) -> int:
        rows = -(-now.decoding // self._config.num_stages)
        cap = self._config.max_group or self._costs.unmeasured_rows
        return min(now.ready, rows, cap or rows)

    def piece_positions(self, now: Pass, left: int, whole: int = 0) -> int:
        if now.pieces_in_flight >= self._config.num_stages:
            return 0
        return min(left, self._config.prefill_chunk or left)
