"""When a machine that was lost is dialled again: soon at first, then rarely, and never all at the same moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

WAITS_S = (0.2, 0.5, 1.0, 2.0, 5.0)
"""The longest wait after so many attempts that failed; the last one repeats."""


def wait_s(attempts: int, draw: Callable[[], float], most_s: float = WAITS_S[-1]) -> float:
    """Before the next attempt, after `attempts` in a row that led to nothing: between a half and the whole of its wait.
    `draw` gives numbers from 0 to 1, so that those who lost one coordinator together do not come back together."""
    return min(most_s, WAITS_S[min(attempts, len(WAITS_S) - 1)]) * (0.5 + draw() / 2)
