"""What an import reports while it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ImportProgress:
    """`done_bytes` of `total_bytes` of one phase; `total_bytes` None where nobody knows it.

    Phases in order, as far as the source has them: "download", "unpack", "dequantize", "write".
    """

    phase: str
    done_bytes: int
    total_bytes: int | None = None
    file: str = ""


Report = Callable[[ImportProgress], None]


def ignore(progress: ImportProgress) -> None:
    """The report of a caller that does not want any."""
