"""What a stage's decode groups and prompt pieces cost: each stage in a process of its own, all of them at work at once.

`StageTimers` loads the same slices as the ring that is measured, then runs groups of exact sizes, or prompts piece by
piece, whenever it is asked to, so that figures of ring and stages come from the same minutes of the same machine. It is
another load of these slices: how few rows are multiplied (`compute/few_rows.py`) is measured by each load for itself.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from swarmnode.config import read_settings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from swarmnode.compute.engine import TorchEngine
    from swarmnode.ids import SessionId
    from swarmnode.ring.work import Activation

GroupCosts = list[dict[int, float]]
"""By stage: milliseconds of a decode group by its rows."""
GROUP_ROWS = (1, 2, 3, 4, 8)
"""Costs by rows are steps, not lines: what lies between these is taken from a line."""
GROUPS_S = 0.5
"""How long groups of one size run: ten steps of a slow stage."""
TOKEN = 100
GROUP_PAST = 64
"""Positions behind which they do: about the middle of a chat of the benchmarks."""


class StageTimers:
    """The stages of a loaded ring, by its status: a process each."""

    def __init__(self, model: str, status: Mapping[str, Any], dtype: str, threads: int) -> None:
        folder, stages = read_settings().models_root / model, status["stages"]
        total = stages[-1]["layers"][1] + 1
        cases = [
            {
                "folder": str(folder),
                "first_layer": stage["layers"][0],
                "end_layer": stage["layers"][1] + 1,
                "num_layers": total,
                "dtype": dtype,
                "threads": threads,
            }
            for stage in stages
        ]
        self._processes = [_started(case) for case in cases]
        self._variations: list[float] = []

    def __enter__(self) -> Self:
        """Waits until all are loaded: from then on they begin together."""
        _answers(self._processes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as stack:
            for process in self._processes:
                stack.enter_context(process)
                stack.callback(process.kill)

    def pieces_ms(self, sizes: Sequence[int], past: int = 0) -> list[list[float]]:
        """By stage: what pieces of these sizes take one behind the other, the first behind `past` positions."""
        return _ask(self._processes, {"sizes": list(sizes), "past": past})

    def groups_ms(self) -> GroupCosts:
        """What groups of each size take while every stage runs groups of that size without a pause.

        The mean of a size's steps: that is what a ring's rate follows.
        """
        return self._groups_ms(self._processes)

    def lone_groups_ms(self) -> GroupCosts:
        """The same while the other stages rest."""
        return [table for process in self._processes for table in self._groups_ms([process])]

    @property
    def variation(self) -> float:
        """The standard deviation of a group's steps as a share of their mean: the median over all that was measured."""
        return statistics.median(self._variations)

    def _groups_ms(self, processes: Sequence[subprocess.Popen[str]]) -> GroupCosts:
        by_rows = {rows: _ask(processes, {"rows": rows, "seconds": GROUPS_S}) for rows in GROUP_ROWS}
        stages = range(len(processes))
        for took in (took[stage] for took in by_rows.values() for stage in stages):
            self._variations.append(statistics.stdev(took) / statistics.mean(took) if len(took) > 1 else 0.0)
        return [{rows: statistics.mean(took[stage]) for rows, took in by_rows.items()} for stage in stages]


def typical(rounds: Sequence[GroupCosts]) -> GroupCosts:
    """The medians of several rounds: a moment in which the machine was slow counts for no more than it is."""
    return [
        {rows: round(statistics.median(costs[stage][rows] for costs in rounds), 2) for rows in table}
        for stage, table in enumerate(rounds[0])
    ]


def _ask(processes: Sequence[subprocess.Popen[str]], question: Mapping[str, Any]) -> list[list[float]]:
    """Every stage's milliseconds; all begin at once."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
    return _answers(processes)


def _answers(processes: Sequence[subprocess.Popen[str]]) -> list[list[float]]:
    answers = []
    for process in processes:
        assert process.stdout is not None
        answers.append([float(ms) for ms in json.loads(process.stdout.readline())])
    return answers


def _started(case: Mapping[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.stage_times", json.dumps(case)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def serve(case: Mapping[str, Any]) -> None:
    """Answer each line of stdin until it closes; the first answer says that the stage is loaded."""
    import torch

    from swarmnode.compute.loader import load_stage
    from swarmnode.compute.spec import StageSpec

    torch.set_num_threads(case["threads"])
    folder, first, end, total = Path(case["folder"]), case["first_layer"], case["end_layer"], case["num_layers"]
    files = tuple(sorted(folder.glob("shards/*/*.safetensors")))
    spec = StageSpec(folder, files, first, end, total, first == 0, end == total, case["dtype"], "cpu", case["threads"])
    bench = Bench(load_stage(spec), spec.is_first)
    bench.groups(max(GROUP_ROWS), 0.0)
    print(json.dumps(bench.pieces([256], 0)), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        took_ms = bench.groups(**asked) if "rows" in asked else bench.pieces(**asked)
        print(json.dumps(took_ms), flush=True)


class Bench:
    """Runs work of one loaded stage. Session 0 reads pieces; those from 1 on step in groups, and stay."""

    def __init__(self, engine: TorchEngine, is_first: bool) -> None:
        self._engine, self._is_first = engine, is_first
        self._members: list[SessionId] = []

    def pieces(self, sizes: Sequence[int], past: int) -> list[float]:
        """Milliseconds of each piece."""
        from swarmnode.ids import SessionId

        before = [min(256, past - at) for at in range(0, past, 256)]
        took_ms = self._read(SessionId(0), [*before, *sizes])
        self._engine.free(SessionId(0))
        return took_ms[-len(sizes) :]

    def groups(self, rows: int, seconds: float) -> list[float]:
        """Milliseconds of each step of `rows` sessions, begun within so many seconds: one at least."""
        from swarmnode.ids import SessionId

        for number in range(len(self._members) + 1, rows + 1):
            self._members.append(SessionId(number))
            self._read(self._members[-1], [GROUP_PAST])
        end_s, took_ms = time.monotonic() + seconds, [self._step(rows, GROUP_PAST)]
        while time.monotonic() < end_s:
            took_ms.append(self._step(rows, GROUP_PAST + len(took_ms)))
        return took_ms

    def _read(self, session: SessionId, sizes: Sequence[int]) -> list[float]:
        from swarmnode.ring.work import PieceWork, Sampling

        pos, took_ms = 0, []
        for index, n in enumerate(sizes):
            last = index == len(sizes) - 1
            hidden, greedy = self._hidden(n), Sampling(temperature=0.0)
            begun_s = time.perf_counter()
            self._engine.run(PieceWork(session, pos, (TOKEN,) * n, last, hidden, greedy))
            took_ms.append((time.perf_counter() - begun_s) * 1e3)
            pos += n
        return took_ms

    def _step(self, rows: int, pos: int) -> float:
        """Milliseconds of a step; at an earlier position than the last one it crops the sessions back."""
        from swarmnode.ring.work import DecodeRow, GroupWork

        token = TOKEN if self._is_first else None
        work = GroupWork(tuple(DecodeRow(s, pos, token) for s in self._members[:rows]), self._hidden(rows))
        begun_s = time.perf_counter()
        self._engine.run(work)
        return (time.perf_counter() - begun_s) * 1e3

    def _hidden(self, n: int) -> Activation | None:
        from swarmnode.ring.work import Activation

        if self._is_first:
            return None
        model = self._engine.model
        data = bytes(n * model.hidden_size * model.dtype.itemsize)
        return Activation(str(model.dtype).removeprefix("torch."), (n, model.hidden_size), data)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", help="JSON: folder, first_layer, end_layer, num_layers, dtype, threads")
    serve(json.loads(parser.parse_args().case))
