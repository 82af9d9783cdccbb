"""Numbers as people read them: sizes, counts, layer ranges. Plain text, the same on every terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(count_bytes: float | None) -> str:
    """`1.5 GiB`; a dash where nobody knows."""
    if count_bytes is None:
        return "-"
    value, unit = float(count_bytes), 0
    while abs(value) >= 1024 and unit < len(_SIZES) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_SIZES[unit]}" if unit == 0 or abs(value) >= 100 else f"{value:.1f} {_SIZES[unit]}"


def count(number: int | None) -> str:
    """`12,345`; a dash where nobody knows."""
    return "-" if number is None else f"{number:,}"


def measured(value: float | None, unit: str) -> str:
    """`12.3 ms`; a dash where nothing was measured yet."""
    return "-" if value is None else f"{value:,.1f} {unit}"


def parameters(number: int | None) -> str:
    """`135M`, `14.8B`."""
    if number is None:
        return "-"
    for factor, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= factor:
            value = number / factor
            return f"{value:.1f}{letter}" if value < 100 and letter == "B" else f"{value:.0f}{letter}"
    return str(number)


def layers(pair: Sequence[int] | None) -> str:
    """`0-14` from [0, 14], both ends included."""
    if not pair:
        return "-"
    first, last = pair[0], pair[-1]
    return str(first) if first == last else f"{first}-{last}"


def plural(number: int, noun: str, nouns: str = "") -> str:
    """`1 peer`, `2 peers`; with `nouns` for those that take no s."""
    return f"{number:,} {noun if number == 1 else nouns or noun + 's'}"


def listed(parts: Iterable[str]) -> str:
    """The parts that say something, joined by a middle dot."""
    return " · ".join(part for part in parts if part)
