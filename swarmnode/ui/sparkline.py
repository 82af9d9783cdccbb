"""A series of numbers as one row of small bars."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.:-=+*#"


def sparkline(values: Sequence[float], width: int, *, most: float | None = None, ascii_only: bool = False) -> str:
    """The newest `width` values, the newest last; `most` is a full bar (None: the largest that is shown)."""
    bars = ASCII_BARS if ascii_only else BARS
    shown = list(values)[-width:] if width > 0 else []
    top = most if most is not None else max(shown, default=0.0)
    marks = [
        bars[min(len(bars) - 1, int(value / top * len(bars)))] if top > 0 and value > 0 else bars[0] for value in shown
    ]
    return "".join(marks).rjust(width)
