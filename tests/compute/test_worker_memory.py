"""A real worker of a tiny model: it stays below its allowance with a full budget, and flat over many requests."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import pytest
from test_worker import head_spec, running
from tiny_models import make_tiny

from swarmnode.wire.bodies import pack_body, unpack_body
from swarmnode.wire.frames import Frame

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from swarmnode.wire.blocking import FrameReader, FrameWriter

MIB = 1 << 20
ROOM_BYTES = 140 * MIB
"""Of the allowance, beyond what a worker takes that has loaded: a few thousand tokens."""
LAYERS = 4
CONTEXT = 4096
SHAPE = {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": CONTEXT}
TOKEN_BYTES = 2 * LAYERS * 4 * 64 * 4
"""8 KiB: what counts is KV, not weights."""
SAMPLE_EVERY = 10
"""Requests."""


@pytest.fixture(scope="module")
def servable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole of a tiny model in one stage, laid out as a peer would."""
    folder = tmp_path_factory.mktemp("worker") / "tiny"
    make_tiny(folder / "tokenizer", num_layers=LAYERS, **SHAPE)
    (folder / "shards" / "stage-0").mkdir(parents=True)
    (folder / "tokenizer" / "model.safetensors").replace(folder / "shards" / "stage-0" / "model.safetensors")
    return folder


@dataclass
class Worker:
    """Its frames, and what they said so far."""

    reader: FrameReader
    writer: FrameWriter
    pid: int
    kv_tokens: int
    gauges: Mapping[str, int] = field(default_factory=dict)
    most: dict[str, int] = field(default_factory=dict)
    """The largest value of every gauge."""
    ended: dict[str, Frame] = field(default_factory=dict)

    def ask(self, request: str, text: str, max_tokens: int) -> None:
        sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 0}
        messages = [{"role": "user", "content": text}]
        body = {"messages": messages, "sampling": sampling, "max_tokens": max_tokens, "stop": []}
        self.writer.write(Frame("open", {"request": request, "ring": "r"}, pack_body(body)))

    def hear(self) -> None:
        """Take one frame."""
        frame = self.reader.read()
        assert frame is not None
        if frame.kind == "stats":
            self.gauges = unpack_body(frame.body)
            self.most = {name: max(value, self.most.get(name, 0)) for name, value in self.gauges.items()}
        elif frame.kind in ("done", "error"):
            self.ended[frame.header["request"]] = frame

    @property
    def quiet(self) -> bool:
        return not any(self.gauges.get(name, 1) for name in ("running", "waiting", "ending", "kv_reserved_tokens"))

    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * 4096

    def peak_bytes(self) -> int:
        """Since `forget_peak`."""
        status = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


def workers(servable: Path, patience_s: float, **settings: Any) -> Iterator[Worker]:
    shape = {"num_stages": 1, "end_layer": LAYERS, "num_layers": LAYERS, "context_tokens": CONTEXT}
    known = {"scripted": False, "dtype": "auto", "shards": ("shards/stage-0/model.safetensors",), "kv_tokens": 10**6}
    spec = head_spec(servable, **{**shape, **known, **settings})
    with running(spec, patience_s) as (reader, writer):
        while (frame := reader.read()) is not None and frame.kind != "ready":
            assert frame.kind == "loading", frame.header
        assert frame is not None
        ready = unpack_body(frame.body)
        assert (ready["device"], ready["threads"], ready["kv_tokens_planned"]) == ("cpu", 1, 10**6)
        measured = {"kv_tokens": ready["kv_tokens"], "costs": [ready["costs"]]}
        writer.write(Frame("probe_ring", {"ring": "r"}, pack_body(measured)))
        yield Worker(reader, writer, ready["pid"], ready["kv_tokens"])


def words(rng: random.Random, tokens: int) -> str:
    """Text of about so many tokens: most letters are one."""
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=tokens))


@pytest.fixture(scope="module")
def allowance(servable: Path) -> int:
    """Bytes: what a worker takes that has loaded and answered nobody, and some room."""
    (bare,) = [worker.resident_bytes() for worker in workers(servable, 120.0, memory_bytes=1 << 36)]
    return bare + ROOM_BYTES


def test_k3_a_full_budget_stays_below_the_allowance(servable: Path, allowance: int) -> None:
    sessions, reply = 6, 24
    settings = {"memory_bytes": allowance, "max_in_flight": sessions, "max_waiting": sessions}
    for worker in workers(servable, 120.0, **settings):
        assert 4096 <= worker.kv_tokens < 10**6
        worker.forget_peak()
        rng = random.Random(1)
        for index in range(sessions):
            worker.ask(str(index), words(rng, worker.kv_tokens // sessions - 100), reply)
        while len(worker.ended) < sessions:
            worker.hear()
        assert {frame.kind for frame in worker.ended.values()} == {"done"}
        assert worker.most["kv_tokens"] > 0.7 * worker.kv_tokens
        assert worker.most["kv_bytes"] > 0.7 * worker.kv_tokens * TOKEN_BYTES
        assert worker.peak_bytes() < allowance


def growth_per_request(samples: list[int]) -> float:
    """In bytes, of sizes that were taken every SAMPLE_EVERY requests: from the median of their first third to that of
    the last."""
    third = len(samples) // 3
    return (median(samples[-third:]) - median(samples[:third])) / ((len(samples) - third) * SAMPLE_EVERY)


def test_growth_is_found_by_arithmetic() -> None:
    assert growth_per_request([70] * 9) == 0
    assert growth_per_request([100 + 50 * index for index in range(12)]) == 50 / SAMPLE_EVERY


@pytest.mark.parametrize(
    ("requests", "warm", "most_growth_bytes"),
    [
        pytest.param(80, 20, 384 << 10, id="short"),
        pytest.param(1000, 200, 16 << 10, id="long", marks=pytest.mark.soak),
    ],
)
def test_k4_memory_is_flat_over_many_requests(
    servable: Path, allowance: int, requests: int, warm: int, most_growth_bytes: int
) -> None:
    """What the process takes besides its caches while nobody asks, for each request after the warm ones: allocator
    noise of some MiB, which counts less the longer it runs. The short run finds growth steps that are lost with each
    request (512 KiB), the long one caches of 10 positions (80 KiB)."""
    rng = random.Random(2)
    system = words(rng, 80)
    settings = {"max_in_flight": 4, "max_waiting": 8, "memory_bytes": allowance}
    for worker in workers(servable, 1200.0, **settings):
        worker.forget_peak()
        others = []  # what the process takes besides its caches
        for index in range(requests):
            text = system * rng.randrange(2) + words(rng, rng.choice((1, 30, 200, 900)))
            worker.ask(str(index), text, rng.choice((1, 8, 40)))
            while len(worker.ended) < index - 6:
                worker.hear()
            if (index + 1) % SAMPLE_EVERY:
                continue
            while len(worker.ended) <= index or not worker.quiet:
                worker.hear()
            if index >= warm:
                others.append(worker.resident_bytes() - worker.gauges["kv_bytes"])
        assert {frame.kind for frame in worker.ended.values()} == {"done"}
        assert worker.gauges["kv_tokens"] <= worker.gauges["kv_parked_tokens"] <= worker.kv_tokens
        slack = (worker.gauges["parked"] + 4) * 128 * TOKEN_BYTES
        assert worker.gauges["kv_bytes"] <= worker.gauges["kv_parked_tokens"] * TOKEN_BYTES * 9 / 8 + slack
        assert growth_per_request(others) < most_growth_bytes, [size >> 10 for size in others]
        assert worker.peak_bytes() < allowance
