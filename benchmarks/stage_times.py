"""What a stage's prompt pieces cost by their past: each stage in a process of its own, all of them at work at once.

`StageTimers` loads the same slices as the ring that is measured, then runs prompts piece by piece whenever it is asked
to, so that figures of ring and stages come from the same minutes of the same machine.
"""

from __future__ import annotations

import argparse
import json
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

    def __enter__(self) -> Self:
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
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"sizes": list(sizes), "past": past}) + "\n")
            process.stdin.flush()
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            answers.append([float(ms) for ms in json.loads(process.stdout.readline())])
        return answers


def _started(case: Mapping[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.stage_times", json.dumps(case)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def serve(case: Mapping[str, Any]) -> None:
    """Answer each line of stdin until it closes."""
    import torch

    from swarmnode.compute.loader import load_stage
    from swarmnode.compute.spec import StageSpec

    torch.set_num_threads(case["threads"])
    folder, first, end, total = Path(case["folder"]), case["first_layer"], case["end_layer"], case["num_layers"]
    files = tuple(sorted(folder.glob("shards/*/*.safetensors")))
    spec = StageSpec(folder, files, first, end, total, first == 0, end == total, case["dtype"], "cpu", case["threads"])
    engine = load_stage(spec)
    _run(engine, spec.is_first, [256], 0)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(_run(engine, spec.is_first, asked["sizes"], asked["past"])), flush=True)


def _run(engine: Any, is_first: bool, sizes: Sequence[int], past: int) -> list[float]:
    """Milliseconds of each piece."""
    from swarmnode.ids import SessionId
    from swarmnode.ring.work import Activation, PieceWork, Sampling

    model, session, pos, took_ms = engine.model, SessionId(1), 0, []
    dtype = str(model.dtype).removeprefix("torch.")
    for index, n in enumerate([*_past_pieces(past), *sizes]):
        data = bytes(n * model.hidden_size * model.dtype.itemsize)
        hidden = None if is_first else Activation(dtype, (n, model.hidden_size), data)
        last = index == len(_past_pieces(past)) + len(sizes) - 1
        begun_s = time.perf_counter()
        engine.run(PieceWork(session, pos, (100,) * n, last, hidden, Sampling(temperature=0.0)))
        took_ms.append((time.perf_counter() - begun_s) * 1e3)
        pos += n
    engine.free(session)
    return took_ms[-len(sizes) :]


def _past_pieces(past: int) -> list[int]:
    return [min(256, past - at) for at in range(0, past, 256)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", help="JSON: folder, first_layer, end_layer, num_layers, dtype, threads")
    serve(json.loads(parser.parse_args().case))
