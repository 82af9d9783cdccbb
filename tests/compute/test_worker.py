"""A stage worker as a real process: what it may send fits the wire, and no thread of it dies unseen."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from swarmnode.compute import worker
from swarmnode.compute.scripted_servable import write_scripted_servable
from swarmnode.compute.worker import EXIT_FAILED, make_machine
from swarmnode.compute.worker_spec import WorkerSpec
from swarmnode.ring.head import Head
from swarmnode.ring.head_config import HeadConfig
from swarmnode.ring.parking import MAX_PARKED
from swarmnode.ring.stage import Stage
from swarmnode.wire.blocking import FrameReader, FrameWriter
from swarmnode.wire.bodies import pack_body
from swarmnode.wire.frames import Frame
from swarmnode.wire.limits import MAX_PIECE_POSITIONS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE_S = 30.0
"""For a process to start and answer on a busy machine; then it is killed, and the read ends."""
LONG_PROMPT = 5000


def head_spec(folder: Path, **settings: Any) -> WorkerSpec:
    """Stage 0 of two of a scripted model."""
    known: dict[str, Any] = {
        "ring": "r",
        "epoch": 1,
        "stage": 0,
        "num_stages": 2,
        "folder": str(folder),
        "shards": ("shards/stage-0/script.json",),
        "first_layer": 0,
        "end_layer": 4,
        "num_layers": 8,
        "scripted": True,
        "dtype": "float32",
        "quantization": "none",
        "device": "cpu",
        "threads": 1,
        "eos_token_ids": (0,),
        "context_tokens": 8192,
        "min_context_tokens": 4096,
        "kv_tokens": 8192,
        "max_in_flight": 2,
        "max_waiting": 2,
        "prefill_chunk": 256,
        "max_group": 0,
        "schedule": "cost",
        "typical_tokens": 16,
    }
    return WorkerSpec(**{**known, **settings})


@contextmanager
def running(spec: WorkerSpec, patience_s: float = PATIENCE_S) -> Iterator[tuple[FrameReader, FrameWriter]]:
    command = [sys.executable, "-m", "swarmnode", "worker", "--parent", str(os.getpid())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    deadline = threading.Timer(patience_s, process.kill)
    deadline.start()
    assert process.stdin is not None
    assert process.stdout is not None
    reader, writer = FrameReader(process.stdout.fileno()), FrameWriter(process.stdin.fileno())
    try:
        writer.write(Frame("init", {}, pack_body(spec.as_map())))
        yield reader, writer
    finally:
        deadline.cancel()
        process.stdin.close()
        process.wait(PATIENCE_S)
        process.stdout.close()


def next_of(reader: FrameReader, kind: str) -> Frame:
    while (frame := reader.read()) is not None:
        if frame.kind == kind:
            return frame
    raise AssertionError(f"the worker ended before it sent {kind}")


def chat(text: str) -> Frame:
    sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0}
    body = {"messages": [{"role": "user", "content": text}], "sampling": sampling, "max_tokens": None, "stop": []}
    return Frame("open", {"request": "q", "ring": "r"}, pack_body(body))


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_head_schedules_and_admits_as_the_ring_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recurrent: bool
) -> None:
    monkeypatch.setattr(worker, "read_config", lambda _: {})
    monkeypatch.setattr(worker, "recurrent_layers", lambda _: {0} if recurrent else set())
    settings = {"kv_tokens": 9000, "max_in_flight": 5, "max_waiting": 7, "typical_tokens": 99}
    settings |= {"max_group": 3, "schedule": "source", "prefill_chunk": 64, "eos_token_ids": (5, 6)}
    head = make_machine(head_spec(tmp_path, scripted=False, **settings))
    assert isinstance(head, Head)
    assert head.config == HeadConfig(
        num_stages=2,
        context_tokens=8192,
        kv_tokens=9000,
        max_in_flight=5,
        max_waiting=7,
        eos_token_ids=frozenset({5, 6}),
        prefill_chunk=64,
        max_group=3,
        typical_tokens=99,
        schedule="source",
        exact_prefix=recurrent,
        max_parked=5 if recurrent else MAX_PARKED,
    )
    assert isinstance(make_machine(head_spec(tmp_path, stage=1)), Stage)


def test_a_prompt_that_is_to_go_whole_goes_in_pieces_that_a_frame_can_hold(tmp_path: Path) -> None:
    folder = write_scripted_servable(tmp_path, "scripted", {}, layers=8, stages=2)
    with running(head_spec(folder, prefill_chunk=0)) as (reader, writer):
        next_of(reader, "ready")
        writer.write(chat("x" * LONG_PROMPT))
        piece = next_of(reader, "piece").header
        assert (piece["pos"], len(piece["ids"])) == (0, MAX_PIECE_POSITIONS)


@pytest.mark.parametrize(("run", "told"), [("{}['missing']", "KeyError: 'missing'"), ("exit(0)", "SystemExit: 0")])
def test_a_thread_that_dies_takes_the_worker_with_it(run: str, told: str) -> None:
    program = (
        "import time; from swarmnode.compute.worker import start_thread; "
        f"start_thread('text', lambda: {run}); time.sleep(60)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == EXIT_FAILED
    assert ended.stderr.splitlines()[-1] == told
