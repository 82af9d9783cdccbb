"""Stages whose compute is a table: the same engine interface as the real ones, answers that only cost virtual time."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

from swarmnode.ring.work import Activation, Engine, PieceWork, WorkResult

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

    from swarmnode.ids import SessionId
    from swarmnode.ring.work import Work

TOKEN = 1
_ZEROS = memoryview(bytes(64 << 20))
"""What travels says nothing, it only has a size: one buffer serves all activations."""


class TimedEngine(Engine, Protocol):
    """An engine that says how long its last `run` takes in virtual time."""

    took_s: float


@dataclass(frozen=True, slots=True)
class StageTable:
    """A stage's costs in ms: points by rows of a group (straight lines between, the last slope beyond), a piece's by
    positions in proportion to the nearest larger point. `host_ms` comes on top for every row."""

    group_points: Mapping[int, float]
    piece_points: Mapping[int, float] = field(default_factory=lambda: {256: 0.0})
    host_ms: float = 0.0
    bytes_per_position: int = 16

    def group_ms(self, rows: int) -> float:
        return interpolate(self.group_points, rows) + self.host_ms * rows

    def piece_ms(self, positions: int) -> float:
        upper = min((n for n in self.piece_points if n >= positions), default=max(self.piece_points))
        return self.piece_points[upper] * positions / upper


def interpolate(points: Mapping[int, float], n: int) -> float:
    """Straight lines between points; before the first its value, beyond the last the last slope."""
    known = sorted(points)
    if n <= known[0] or len(known) == 1:
        return points[known[0]]
    a, b = next(((a, b) for a, b in pairwise(known) if n <= b), (known[-2], known[-1]))
    return points[a] + (points[b] - points[a]) * (n - a) / (b - a)


class TableEngine:
    """Runs everything in the time its table says, varied by ± `jitter` of it. A parked cache is copied in no time."""

    def __init__(self, table: StageTable, is_last: bool, random: Random, jitter: float = 0.0) -> None:
        self.took_s = 0.0
        self.read_positions = 0
        """Prompt positions it ran so far, those read again included."""
        self._table = table
        self._is_last = is_last
        self._random = random
        self._jitter = jitter
        self._lengths: dict[SessionId, int] = {}

    def run(self, work: Work) -> WorkResult:
        if isinstance(work, PieceWork):
            n, ms, wants_token = len(work.ids), self._table.piece_ms(len(work.ids)), work.last
            self._lengths[work.session] = work.pos + n
            self.read_positions += n
            if work.start is not None and work.start.move:
                self.free(work.start.source)
        else:
            n, ms, wants_token = len(work.rows), self._table.group_ms(len(work.rows)), True
            self._lengths |= {row.session: row.pos + 1 for row in work.rows}
        self.took_s = ms / 1e3 * (1 + self._jitter * (2 * self._random.random() - 1))
        if not self._is_last:
            return WorkResult(hidden=self._rows(n))
        count = 1 if isinstance(work, PieceWork) else n
        return WorkResult(tokens=(TOKEN,) * count if wants_token else ())

    def free(self, session: SessionId) -> None:
        self._lengths.pop(session, None)

    def kv_tokens(self) -> int:
        return sum(self._lengths.values())

    def kv_bytes(self) -> int:
        return self.kv_tokens() * self._table.bytes_per_position

    def _rows(self, n: int) -> Activation:
        size = self._table.bytes_per_position
        return Activation("bfloat16", (n, size // 2), _ZEROS[: n * size])
