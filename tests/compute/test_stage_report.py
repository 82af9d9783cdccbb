"""What a stage says when it is ready: budget, costs that a reload finds again, device and threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from stage_chains import Chain, prompt_of, stage_specs
from test_worker import head_spec
from tiny_models import make_tiny

from swarmnode.compute import device as devices
from swarmnode.compute import stage_report
from swarmnode.compute.device import unmeasured_rows
from swarmnode.compute.kv_room import resident_bytes
from swarmnode.compute.loader import load_stage
from swarmnode.compute.stage_report import report_stage
from swarmnode.compute.worker import read_measured
from swarmnode.errors import LoadRefused, ProtocolError
from swarmnode.ring.cost_model import StageCosts
from swarmnode.ring.head_messages import RingMeasured
from swarmnode.wire.limits import MAX_PIECE_POSITIONS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from swarmnode.compute.engine import TorchEngine
    from swarmnode.compute.stage_report import StageReport
    from swarmnode.compute.worker_spec import WorkerSpec

LAYERS = 4
CUTS = [0, 2, LAYERS]


@pytest.fixture
def engines(tmp_path: Path) -> list[TorchEngine]:
    torch.set_num_threads(1)
    checkpoint = make_tiny(tmp_path / "model", num_layers=LAYERS)
    return [load_stage(spec) for spec in stage_specs(checkpoint, tmp_path / "stages", LAYERS, CUTS)]


def spec_of(stage: int, folder: Path, **settings: Any) -> WorkerSpec:
    begin, end = CUTS[stage : stage + 2]
    known = {"stage": stage, "first_layer": begin, "end_layer": end, "num_layers": LAYERS, "scripted": False}
    return head_spec(folder, **{**known, "kv_tokens": 5000, **settings})


def report(engine: TorchEngine, spec: WorkerSpec) -> StageReport:
    return report_stage(spec, engine, 0.1, lambda *_: None)


def counting(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Notes every measurement."""
    measure: Callable[..., StageCosts] = stage_report.measure
    seen: list[object] = []

    def counted(*args: Any) -> StageCosts:
        seen.append(args[1])
        return measure(*args)

    monkeypatch.setattr(stage_report, "measure", counted)
    return seen


def test_every_stage_is_measured_once_and_a_reload_finds_it(
    engines: list[TorchEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stage_report, "allowance_s", lambda load_s: 60.0)  # however slow this machine is just now
    measured = counting(monkeypatch)
    first = [report(engine, spec_of(stage, tmp_path)) for stage, engine in enumerate(engines)]
    assert len(measured) == len(list(tmp_path.glob("step-costs-*.json"))) == 2
    for said in first:
        assert (said.kv_tokens, said.kv_tokens_planned, said.device, said.threads) == (5000, 5000, "cpu", 1)
        assert said.costs is not None
        assert set(said.costs.group_ms) == {1, 2, 4, 8}
        assert set(said.costs.piece_ms) == {32, 256}
    again = [report(engine, spec_of(stage, tmp_path)) for stage, engine in enumerate(engines)]
    assert len(measured) == 2
    for old, new in zip(first, again, strict=True):
        assert old.costs is not None
        assert new.costs is not None
        assert new.costs.group_ms == pytest.approx(old.costs.group_ms, abs=1e-3)
    for path in tmp_path.glob("step-costs-*.json"):
        path.write_bytes(path.read_bytes()[:30])
    assert report(engines[0], spec_of(0, tmp_path)).costs is not None
    assert len(measured) == 3
    assert "group_ms" not in capfd.readouterr().err
    report(engines[0], spec_of(0, tmp_path, step_costs=True))
    assert len(measured) == 4
    assert "[stage0] group_ms: 1: " in capfd.readouterr().err


def test_a_measurement_that_was_cut_off_is_not_kept(
    engines: list[TorchEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_report, "allowance_s", lambda load_s: 0.0)
    measured = counting(monkeypatch)
    cut_off = report(engines[0], spec_of(0, tmp_path)).costs
    assert cut_off is not None
    assert set(cut_off.group_ms) == {1}
    monkeypatch.setattr(stage_report, "allowance_s", lambda load_s: 60.0)
    whole = report(engines[0], spec_of(0, tmp_path)).costs
    assert whole is not None
    assert set(whole.group_ms) == {1, 2, 4, 8}
    assert len(measured) == 2


def test_costs_of_shorter_pieces_are_not_taken_for_those_of_longer_ones(
    engines: list[TorchEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_report, "allowance_s", lambda load_s: 60.0)
    sizes = [report(engines[0], spec_of(0, tmp_path, prefill_chunk=chunk)).costs for chunk in (64, 256)]
    assert [set(costs.piece_ms) for costs in sizes if costs is not None] == [{32, 64}, {32, 256}]


def test_measuring_leaves_the_stage_as_it_was(engines: list[TorchEngine], tmp_path: Path) -> None:
    chain, prompt = Chain(engines), prompt_of(40)
    expected = chain.reply(1, prompt, 6, 16)
    tokens = [chain.prefill(1, prompt, 16), *chain.step(1)]
    for stage, engine in enumerate(engines):
        report(engine, spec_of(stage, tmp_path))
    while len(tokens) < 6:
        tokens += chain.step(1)
    assert tokens == expected
    assert {engine.kv_tokens() for engine in engines} == {45}


def test_a_stage_with_less_room_than_planned_says_so_or_refuses(
    engines: list[TorchEngine], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tight = {"kv_tokens": 10**9, "memory_bytes": resident_bytes() + (200 << 20)}
    said = report(engines[0], spec_of(0, tmp_path, **tight))
    assert 4096 <= said.kv_tokens < 10**9
    assert f"KV for {said.kv_tokens:,} tokens fits, 1,000,000,000 were planned" in capfd.readouterr().err
    with pytest.raises(LoadRefused, match="one conversation takes 4,096"):
        report(engines[0], spec_of(0, tmp_path, memory_bytes=resident_bytes() // 2))


@pytest.mark.parametrize(
    ("stages", "chunk", "positions"),
    [(2, 64, 64), (2, 0, MAX_PIECE_POSITIONS), (2, 2048, MAX_PIECE_POSITIONS), (1, 2048, 2048), (1, 0, 8192)],
)
def test_k3_room_is_kept_for_pieces_of_the_size_that_arrives(
    engines: list[TorchEngine],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stages: int,
    chunk: int,
    positions: int,
) -> None:
    """A whole prompt in one piece where that is asked for, and no frame carries it."""
    kv_cost, seen = stage_report.kv_cost, list[int]()
    monkeypatch.setattr(stage_report, "kv_cost", lambda *args: seen.append(args[2]) or kv_cost(*args))
    monkeypatch.setattr(stage_report, "allowance_s", lambda load_s: 0.0)
    report(engines[0], spec_of(0, tmp_path, num_stages=stages, prefill_chunk=chunk, memory_bytes=1 << 36))
    assert seen == [positions]


def test_a_quantized_stage_reports_whose_kernels_serve_it(tmp_path: Path) -> None:
    checkpoint = make_tiny(tmp_path / "model", num_layers=LAYERS)
    specs = stage_specs(checkpoint, tmp_path / "stages", LAYERS, CUTS, quantization="int8")
    model = load_stage(specs[0])
    said = report(model, spec_of(0, tmp_path, quantization="int8")).as_map()
    assert said["kernels"] == model.model.kernels()
    assert said["kernels"] in ("fastcpu", "torch", "fastcpu+torch")


def test_the_head_is_told_what_the_coordinator_collected() -> None:
    body = {"kv_tokens": 77, "costs": [{"group_ms": {"1": 2.5}, "piece_ms": {}}, None]}
    assert read_measured(body, 2) == RingMeasured(77, (StageCosts({1: 2.5}, {}), None))
    assert read_measured({**body, "max_group": 2}, 2).max_group == 2


@pytest.mark.parametrize(
    ("device", "capability", "rows"),
    [("cuda", (7, 5), 2), ("cuda:1", (6, 1), 2), ("cuda", (8, 0), 0), ("cuda", (9, 0), 0), ("cpu", (0, 0), 0)],
)
def test_b4_cards_older_than_ampere_take_two_rows_while_nothing_is_known_of_them(
    device: str, capability: tuple[int, int], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert unmeasured_rows(torch.device(device)) == rows


def test_b4_a_stage_says_what_its_card_takes(
    engines: list[TorchEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert report(engines[0], spec_of(0, tmp_path)).as_map()["max_group"] == 0
    monkeypatch.setattr(devices, "unmeasured_rows", lambda _: 2)
    assert report(engines[0], spec_of(0, tmp_path)).as_map()["max_group"] == 2


@pytest.mark.parametrize(
    "change",
    [
        {"kv_tokens": -1},
        {"kv_tokens": None},
        {"costs": None},
        {"costs": [None]},
        {"costs": [5, None]},
        {"max_group": -1},
        {"max_group": "2"},
    ],
    ids=str,
)
def test_what_is_no_measurement_of_the_ring_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        read_measured({"kv_tokens": 77, "costs": [None, None], **change}, 2)
