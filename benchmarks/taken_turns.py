"""Real runs of a ring in turn with its stages' costs: both from the same minutes, because a machine's speed drifts."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.stage_times import typical
from benchmarks.users import WARM_UP_TOKENS

if TYPE_CHECKING:
    from benchmarks.stage_times import GroupCosts, StageTimers
    from benchmarks.users import Crowd, Ring

TURNS = 3
"""Real runs of each number of users, with costs before and after each."""


@dataclass(frozen=True, slots=True)
class Turns:
    """What so many users got, and what groups of exact sizes cost meanwhile."""

    crowds: list[Crowd]
    rounds: list[GroupCosts]
    """One from before the first run, and one from behind each."""

    @property
    def costs(self) -> GroupCosts:
        return typical(self.rounds)

    def costs_about(self, turn: int) -> GroupCosts:
        """Those of one run: the means of the round before it and the round behind it."""
        return [
            {rows: (ms + after[rows]) / 2 for rows, ms in before.items()}
            for before, after in zip(self.rounds[turn], self.rounds[turn + 1], strict=True)
        ]

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each run."""
        return [crowd.tokens_per_s for crowd in self.crowds]

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(self.rates)

    def step_ms(self, part: str) -> float:
        """A decode step's milliseconds of that name, as the replies tell it."""
        return statistics.median(crowd.timing_ms(part) for crowd in self.crowds)


def take_turns(ring: Ring, timers: StageTimers, users: int, tokens: int) -> Turns:
    """`users` are answered `TURNS` times, with `tokens` tokens each; a shorter round before does not count."""
    ring.run(users, WARM_UP_TOKENS)
    rounds, crowds = [timers.groups_ms()], []
    for _ in range(TURNS):
        crowds.append(ring.run(users, tokens))
        rounds.append(timers.groups_ms())
    return Turns(crowds, rounds)


def step_parts(stages: int) -> tuple[str, ...]:
    """The names of a decode step's parts."""
    return (*(f"stage{stage}_ms" for stage in range(stages)), "link_ms", "queue_ms")
