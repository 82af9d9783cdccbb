"""What the engine does when work is wrong, fails halfway or comes again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from packed_kernels import NEEDS_COMPILED, take_kernels
from stage_chains import GREEDY, Chain, even_cuts, prompt_of, stage_specs
from tiny_models import make_tiny

from swarmnode.compute.loader import load_stage
from swarmnode.errors import StageFailed
from swarmnode.ids import SessionId
from swarmnode.ring.work import Activation, DecodeRow, GroupWork, PieceWork, Sampling

if TYPE_CHECKING:
    from pathlib import Path

    from swarmnode.compute.engine import TorchEngine

A, B = SessionId(1), SessionId(2)
PROMPT = tuple(prompt_of(50))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("engine") / "model", "llama", num_layers=4)


@pytest.fixture(params=[pytest.param("compiled", marks=NEEDS_COMPILED), "lean", "generic"])
def engines(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[TorchEngine]:
    torch.set_num_threads(1)
    if request.param == "lean":
        take_kernels("torch", monkeypatch)
    specs = stage_specs(checkpoint, tmp_path / "s", 4, even_cuts(4, 2), lean=request.param != "generic")
    engines = [load_stage(spec) for spec in specs]
    for lean in (engine.model.lean for engine in engines):
        assert (lean is not None) == (request.param != "generic")
        assert lean is None or (lean._compiled is not None) == (request.param == "compiled")
    return engines


def fail_once(engine: TorchEngine, layer: int) -> None:
    """Breaks one layer's forward the next time it runs."""
    lean = engine.model.lean
    compiled = None if lean is None else lean._compiled
    if compiled is None:
        _FailOnce(engine, layer)
        return
    call, layers = compiled._call, iter(range(4))

    def call_or_fail(*records: Any) -> None:
        if next(layers) == layer:
            compiled._call = call
            raise RuntimeError("out of memory")
        call(*records)

    compiled._call = call_or_fail


class _FailOnce:
    """`fail_once` for blocks that Python calls."""

    def __init__(self, engine: TorchEngine, layer: int) -> None:
        lean = engine.model.lean
        self._blocks: Any = engine.model.base.layers if lean is None else lean.blocks
        self._layer, self._block = layer, self._blocks[layer]
        self._blocks[layer] = _Raises(self) if lean is None else self._raise

    def _raise(self, *_: object, **__: object) -> None:
        self._blocks[self._layer] = self._block
        raise RuntimeError("out of memory")


class _Raises(torch.nn.Module):
    """`_FailOnce` as transformers' forward calls a layer."""

    def __init__(self, failure: _FailOnce) -> None:
        super().__init__()
        self._failure = failure

    def forward(self, *_: object, **__: object) -> None:
        self._failure._raise()


def test_a_forward_that_failed_between_layers_is_undone_by_the_next_work(engines: list[TorchEngine]) -> None:
    chain = Chain(engines)
    expected = chain.reply(1, PROMPT, 12, 16)
    tokens = [chain.prefill(1, PROMPT, 16), *chain.step(1)]
    chain.prefill(2, PROMPT[:9], 16)
    while len(tokens) < 12:
        fail_once(engines[len(tokens) % 2], 1)
        with pytest.raises(RuntimeError, match="out of memory"):
            chain.step(1, 2)
        tokens += chain.step(1)
        chain.step(2)
    assert tokens == expected


def test_a_piece_that_comes_again_gives_the_same_answer(engines: list[TorchEngine]) -> None:
    chain = Chain(engines)
    once = chain.prefill(1, PROMPT, 20)
    first = [once, *chain.step(1), *chain.step(1)]
    rest = PieceWork(A, 20, PROMPT[20:], last=True)
    again = engines[1].run(PieceWork(A, 20, PROMPT[20:], True, engines[0].run(rest).hidden)).tokens[0]
    chain.positions[1], chain.tokens[1] = len(PROMPT), again
    assert [again, *chain.step(1), *chain.step(1)] == first


def test_a_new_first_piece_begins_anew(engines: list[TorchEngine]) -> None:
    chain = Chain(engines)
    sampled = chain.reply(1, PROMPT, 5, 50, Sampling(temperature=2.0, seed=1))
    chain.prefill(1, PROMPT[::-1], 50)
    assert [chain.prefill(1, PROMPT, 50, Sampling(temperature=2.0, seed=1))] == sampled[:1]
    assert engines[0].kv_tokens() == len(PROMPT)


def test_gauges_follow_the_sessions(engines: list[TorchEngine]) -> None:
    chain = Chain(engines)
    chain.prefill(1, PROMPT, 20)
    chain.prefill(2, PROMPT[:3], 20)
    chain.step(1, 2)
    for engine in engines:
        assert engine.kv_tokens() == 51 + 4
        # 2 layers × keys and values × 2 heads × 64 positions × 16 numbers × 4 bytes, for two sessions
        assert engine.kv_bytes() == 2 * 2 * 2 * 64 * 16 * 4 * 2
        engine.free(A)
        engine.free(SessionId(99))
        assert engine.kv_tokens() == 4
        engine.free(B)
        assert engine.kv_tokens() == engine.kv_bytes() == 0


def test_work_that_cannot_be_right_is_refused(engines: list[TorchEngine]) -> None:
    head, last = engines
    Chain(engines).prefill(1, PROMPT, 50)
    hidden = Activation("float32", (1, 64), bytes(256))
    wrong = [
        (head, GroupWork((DecodeRow(B, 0, 5),)), "session 2 is not here"),
        (head, GroupWork((DecodeRow(A, 51, 5),)), "holds 50 positions, the work starts at position 51"),
        (head, GroupWork((DecodeRow(A, 50, 5), DecodeRow(A, 50, 6))), "each session once"),
        (head, GroupWork(()), "each session once"),
        (head, GroupWork((DecodeRow(A, 50, 384),)), "token ids must be 0 to 383"),
        (head, GroupWork((DecodeRow(A, 50),)), "token ids must be"),
        (head, PieceWork(A, 0, (), last=True), "without ids"),
        (last, GroupWork((DecodeRow(A, 50),)), "without hidden states"),
        (last, GroupWork((DecodeRow(A, 50),), Activation("float32", (1, 64), bytes(255))), "255 bytes"),
        (last, GroupWork((DecodeRow(A, 50),), Activation("float16", (1, 64), bytes(128))), "float16"),
        (last, GroupWork((DecodeRow(A, 50),), Activation("float32", (2, 64), bytes(512))), "expected are 1 rows"),
        (last, GroupWork((DecodeRow(A, 52),), hidden), "the work starts at position 52"),
    ]
    for engine, work, message in wrong:
        with pytest.raises(StageFailed, match=message):
            engine.run(work)


def test_a_row_with_broken_numbers_raises_and_spares_the_others(engines: list[TorchEngine]) -> None:
    chain, last = Chain(engines), engines[1]
    expected = [chain.prefill(1, PROMPT, 50), *chain.step(1)]
    chain.free(1)
    chain.prefill(1, PROMPT, 50)
    chain.prefill(2, PROMPT, 50)
    good = engines[0].run(GroupWork((DecodeRow(A, 50, expected[0]),))).hidden
    assert good is not None
    broken = torch.full((1, 64), float("nan")).numpy().tobytes()
    both = Activation("float32", (2, 64), bytes(good.data) + broken)
    with pytest.raises(StageFailed, match="NaN"):
        last.run(GroupWork((DecodeRow(A, 50), DecodeRow(B, 50)), both))
    assert list(last.run(GroupWork((DecodeRow(A, 50),), good)).tokens) == expected[1:]


def test_hidden_states_of_another_dtype_are_converted(checkpoint: Path, tmp_path: Path) -> None:
    specs = stage_specs(checkpoint, tmp_path / "a", 4, even_cuts(4, 2))
    half = stage_specs(checkpoint, tmp_path / "b", 4, even_cuts(4, 2), dtype="bfloat16")
    mixed = Chain([load_stage(half[0]), load_stage(specs[1])])
    assert len(mixed.reply(1, PROMPT, 4, 16, GREEDY)) == 4
