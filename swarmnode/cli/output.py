"""What commands print: rich for people on stdout, one JSON object with --json, progress on stderr."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmnode.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import Console

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
PLAIN_WIDTH = 200
DURATION_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
SIZE_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def console(*, stderr: bool = False) -> Console:
    """A console that respects NO_COLOR and a stdout that is no terminal (there no column is cut to 80)."""
    from rich.console import Console

    screen = Console(stderr=stderr, highlight=False)
    return screen if screen.is_terminal else Console(stderr=stderr, highlight=False, width=PLAIN_WIDTH)


def print_json(value: Mapping[str, Any] | list[Any]) -> None:
    """One line of JSON, flushed: scripts read these as they come."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def parse_duration_s(text: str, option: str) -> int:
    """Seconds of 90s, 30m, 12h or 7d; raises InvalidRequest that names the option."""
    found = re.fullmatch(r"([0-9]{1,9})([smhd])", text.strip().lower(), flags=re.ASCII)
    if found is None:
        raise InvalidRequest(f"{option} {text[:40]!r} is not a number and a unit, like 90s, 30m, 12h or 7d")
    return int(found[1]) * DURATION_UNITS_S[found[2]]


def parse_size(text: str) -> int:
    """Bytes of a size like 6G, 512M or 1.5GiB (binary units); raises InvalidRequest that names the rule."""
    number = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = number[-1:] if number[-1:] in SIZE_UNITS else ""
    try:
        size = float(number.removesuffix(unit)) * SIZE_UNITS[unit]
    except ValueError:
        size = -1.0
    if not 0 < size < 1 << 60:
        raise InvalidRequest(f"size {text!r} is not understood: write a number with K, M, G or T, like 6G or 512M")
    return int(size)
