"""Step costs of a loaded stage (B6): measured briefly on throwaway sessions, kept on disk for the next load. No torch.

What is measured here is where the head's cost model starts; every real step refines it. So a hiccup costs little, and
the measurement ends when its time is up, with what it has: a slow stage knows less at first, not later.

What real steps refined is not written back: only the head knows it, on another machine than most stages' files, and it
holds what else those machines did that hour. A reload begins with what an idle machine gave, and few steps correct it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING

from swarmnode.errors import ProtocolError
from swarmnode.ids import SessionId
from swarmnode.ring.cost_model import StageCosts
from swarmnode.ring.work import Activation, DecodeRow, GroupWork, PieceWork, Sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from swarmnode.ring.work import Engine, Work

MEASURED_ROWS = (1, 2, 4, 8)
MEASURED_POSITIONS = (32, 256)
REPEATS = 3
"""Of which the median counts; fewer where the time is up."""
LEAST_ALLOWANCE_S = 2.0
LOAD_SHARE = 0.05
MAX_SIZES = 16
MAX_FILE_BYTES = 64 << 10
_NUMBER_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Slice:
    """What throwaway work for a stage has to look like. `dtype` and `hidden` are those of rows that arrive."""

    is_first: bool
    dtype: str
    hidden: int
    longest_piece: int
    """Positions; 0: no limit."""


def allowance_s(load_s: float) -> float:
    """How long measuring may take after a load of `load_s`."""
    return max(LEAST_ALLOWANCE_S, LOAD_SHARE * load_s)


def measure(
    engine: Engine, about: Slice, allowed_s: float, clock: Callable[[], float] = time.perf_counter
) -> StageCosts:
    """Run groups and pieces for about `allowed_s`, the smallest first; the engine holds nothing of it afterwards."""
    bench = _Bench(engine, about, allowed_s, clock)
    try:
        return StageCosts(bench.groups(), bench.pieces())
    finally:
        bench.clear()


def is_complete(costs: StageCosts, longest_piece: int) -> bool:
    """Whether all sizes were measured, and not those alone that there was time for."""
    return set(costs.group_ms) == set(MEASURED_ROWS) and set(costs.piece_ms) == set(_piece_sizes(longest_piece))


def _piece_sizes(longest_piece: int) -> list[int]:
    longest = longest_piece or MEASURED_POSITIONS[-1]
    return sorted({min(n, longest) for n in MEASURED_POSITIONS})


class _Bench:
    """Throwaway sessions of one engine. Their ids are negative, so they are no head's."""

    def __init__(self, engine: Engine, about: Slice, allowed_s: float, clock: Callable[[], float]) -> None:
        self._engine, self._about, self._clock = engine, about, clock
        self._deadline_s = clock() + allowed_s
        self._lengths: dict[SessionId, int] = {}
        self._row_ms = 0.0
        """The dearest a position was so far."""

    def groups(self) -> dict[int, float]:
        found: dict[int, float] = {}
        for rows in MEASURED_ROWS:
            # The new sessions' first positions, then the steps: a group costs at most what its rows cost alone.
            if found and not self._fits(2 * rows * self._row_ms):
                break
            while len(self._lengths) < rows:
                self._begin(1)
            found[rows] = self._timed(lambda: self._group(rows))  # noqa: B023 (called before the loop goes on)
            self._row_ms = max(self._row_ms, found[rows] / rows)
        return found

    def pieces(self) -> dict[int, float]:
        found: dict[int, float] = {}
        for n in _piece_sizes(self._about.longest_piece):
            smaller = list(found.items())[-1:]
            expected_ms = smaller[0][1] * n / smaller[0][0] if smaller else n * self._row_ms
            if not self._fits(expected_ms):
                break
            found[n] = self._timed(lambda: self._begin(n))  # noqa: B023 (as above)
        return found

    def clear(self) -> None:
        for session in self._lengths:
            self._engine.free(session)

    def _fits(self, ms: float) -> bool:
        return self._clock() + ms / 1e3 <= self._deadline_s

    def _timed(self, run: Callable[[], float]) -> float:
        """Median of up to REPEATS runs, in ms; one at least."""
        seen = [run()]
        while len(seen) < REPEATS and self._fits(seen[-1]):
            seen.append(run())
        return median_low(seen)

    def _begin(self, n: int) -> float:
        session = SessionId(-1 - len(self._lengths))
        self._lengths[session] = n
        work = PieceWork(session, 0, (0,) * n, last=True, hidden=self._hidden(n), sampling=Sampling(temperature=0.0))
        return self._run(work)

    def _group(self, n: int) -> float:
        sessions = list(self._lengths)[:n]
        rows = tuple(DecodeRow(s, self._lengths[s], 0 if self._about.is_first else None) for s in sessions)
        took_ms = self._run(GroupWork(rows, self._hidden(n)))
        for session in sessions:
            self._lengths[session] += 1
        return took_ms

    def _run(self, work: Work) -> float:
        begun_s = self._clock()
        self._engine.run(work)
        return max((self._clock() - begun_s) * 1e3, 1e-3)

    def _hidden(self, n: int) -> Activation | None:
        if self._about.is_first:
            return None
        size = n * self._about.hidden * _NUMBER_BYTES[self._about.dtype]
        return Activation(self._about.dtype, (n, self._about.hidden), bytes(size))


# as data


def costs_as_map(costs: StageCosts) -> dict[str, dict[str, float]]:
    """For a frame's body or a file: sizes as text, because maps there have text keys."""
    tables = {"group_ms": costs.group_ms, "piece_ms": costs.piece_ms}
    return {name: {str(size): round(ms, 4) for size, ms in table.items()} for name, table in tables.items()}


def read_costs(values: object) -> StageCosts:
    """The reverse of `costs_as_map`; raises ProtocolError for what no stage measures."""
    if not isinstance(values, dict):
        raise ProtocolError(f"step costs are {type(values).__name__}, not tables of milliseconds by size")
    return StageCosts(*(_read_table(name, values.get(name)) for name in ("group_ms", "piece_ms")))


def _read_table(name: str, table: object) -> dict[int, float]:
    if not isinstance(table, dict) or len(table) > MAX_SIZES:
        raise ProtocolError(f"step costs: {name} is not a table of at most {MAX_SIZES} sizes")
    found = {int(size): ms for size, ms in table.items() if str(size).isdecimal() and type(ms) is float}
    if len(found) < len(table) or not all(size > 0 and ms > 0 and math.isfinite(ms) for size, ms in found.items()):
        raise ProtocolError(f"step costs: {name}={table!r:.200} has something else than milliseconds by size")
    return dict(sorted(found.items()))


# on disk


def cache_path(folder: Path, key: Mapping[str, str | int]) -> Path:
    """Where costs measured under `key` lie: beside the shards they were measured with."""
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
    return folder / f"step-costs-{digest[:16]}.json"


def cached_costs(path: Path, key: Mapping[str, str | int]) -> StageCosts | None:
    """What an earlier load measured; None where there is nothing, or something that cannot be it."""
    try:
        with path.open("rb") as file:
            kept = json.loads(file.read(MAX_FILE_BYTES))
        return read_costs(kept["costs"]) if kept["key"] == dict(key) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ProtocolError):
        return None


def keep_costs(path: Path, key: Mapping[str, str | int], costs: StageCosts) -> None:
    """Keep them for the next load; a disk that refuses only costs that load the measurement."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps({"key": dict(key), "costs": costs_as_map(costs)}), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
