"""What a run of the virtual ring showed: rates, percentiles, utilisation; as JSON and as lines for people."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from swarmnode.ring.head_messages import Accepted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sims.world import Outcome, World


@dataclass(frozen=True, slots=True)
class Window:
    """A steady stretch of virtual time, and what the stages had computed by its beginning."""

    begin_s: float
    end_s: float
    busy_s: tuple[float, ...]

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s


def run_window(world: World, warm_up_s: float, length_s: float) -> Window:
    """Let the world run warm, then run the window; count afterwards."""
    world.run_until(world.now_s + warm_up_s)
    begin_s, busy_s = world.now_s, tuple(node.busy_s for node in world.nodes)
    world.run_until(begin_s + length_s)
    return Window(begin_s, world.now_s, busy_s)


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed; nan of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def tokens_per_s(outcomes: Iterable[Outcome], window: Window) -> float:
    """Sum of the users' rates, each from its first token in the window to its last: no edge cuts a step in two."""
    return sum(_rate([at for at in o.token_times_s if _in(at, window)]) for o in outcomes)


def gaps_ms(outcomes: Iterable[Outcome], window: Window) -> list[float]:
    """Inter-token latencies whose second token lies in the window."""
    return [(b - a) * 1e3 for o in outcomes for a, b in pairwise(o.token_times_s) if _in(b, window)]


def ttfts_ms(outcomes: Iterable[Outcome]) -> list[float]:
    """From the moment a request was accepted to its first token, of those that have one."""
    return [(o.token_times_s[0] - o.seconds_of(Accepted)) * 1e3 for o in outcomes if o.token_times_s]


def utilisation(world: World, window: Window) -> list[float]:
    """Each stage's share of the window spent in forwards (a forward counts from its start)."""
    return [
        round(min(1.0, (node.busy_s - before) / window.length_s), 3)
        for node, before in zip(world.nodes, window.busy_s, strict=True)
    ]


def latencies(outcomes: Sequence[Outcome], window: Window) -> dict[str, Any]:
    """Of all first tokens, and of the gaps in the window."""
    return _percentiles("ttft", ttfts_ms(outcomes)) | _percentiles("itl", gaps_ms(outcomes, window))


def _percentiles(name: str, values_ms: Sequence[float]) -> dict[str, float]:
    return {f"{name}_p{share}_ms": round(percentile(values_ms, share / 100), 1) for share in (50, 99)}


def lines(report: dict[str, Any], indent: str = "") -> Iterable[str]:
    """The report for people: one figure a line, tables of rows as rows."""
    for name, value in report.items():
        if isinstance(value, dict):
            yield f"{indent}{name}:"
            yield from lines(value, indent + "  ")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"{indent}{name}:"
            yield from (indent + "  " + "  ".join(f"{k} {v}" for k, v in row.items()) for row in value)
        else:
            yield f"{indent}{name}: {value}"


def _rate(times_s: Sequence[float]) -> float:
    return (len(times_s) - 1) / (times_s[-1] - times_s[0]) if len(times_s) > 1 else 0.0


def _in(at_s: float, window: Window) -> bool:
    return window.begin_s < at_s <= window.end_s
