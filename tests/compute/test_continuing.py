"""K5 on a stage: a session that continues a parked one gives what transformers gives for the whole prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from references import Reference, generate
from stage_chains import Chain, even_cuts, prompt_of, stage_specs
from tiny_models import make_tiny

from swarmnode.compute.engine import IDLE_WORKS
from swarmnode.compute.loader import load_stage
from swarmnode.errors import CacheGap, StageFailed
from swarmnode.ids import SessionId
from swarmnode.ring.work import Continuation, DecodeRow, GroupWork, PieceWork

if TYPE_CHECKING:
    from pathlib import Path

    from stage_chains import Parity

LAYERS = 4
NEW_TOKENS = 8
PARKED, MOVED, COPIED, OTHER, FRESH = range(1, 6)
FIRST = prompt_of(90)
"""Longer than the windows below and than one growth step of a cache."""
CASES: list[tuple[str, dict[str, Any], int]] = [
    ("llama", {}, 1),
    ("qwen3", {}, 2),
    ("gemma3", {}, 3),
    ("mistral", {"sliding_window": 24}, 2),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}, 2),
]
"""Family, what its config changes, stages."""


class Parked:
    """A chain that has answered FIRST and kept it, and transformers' model to compare with."""

    def __init__(self, path: Path, family: str, overrides: dict[str, Any], stages: int, **settings: Any) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        checkpoint = make_tiny(path / "model", family, 1, num_layers=LAYERS, **overrides)
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint)
        specs = stage_specs(checkpoint, path / "stages", LAYERS, even_cuts(LAYERS, stages), **settings)
        self.chain = Chain([load_stage(spec) for spec in specs])
        reply = self.chain.park(PARKED, FIRST, NEW_TOKENS, 32)
        self.length = len(FIRST) + NEW_TOKENS - 1
        """The last sampled token has no keys and values yet."""
        self.second = [*FIRST, *reply, *prompt_of(21, 5)]
        """The next turn: all of the parked tokens, and more."""

    def reference(self, prompt: list[int]) -> Reference:
        return generate(self.model, prompt, NEW_TOKENS)

    def held(self) -> set[int]:
        return {sum(e.kv_tokens() for e in self.chain.engines)}


@pytest.mark.parametrize(("family", "overrides", "stages"), CASES, ids=lambda value: str(value))
def test_a_continued_prompt_gives_the_tokens_of_transformers(
    family: str, overrides: dict[str, Any], stages: int, tmp_path: Path, parity: Parity
) -> None:
    parked = Parked(tmp_path, family, overrides, stages)
    chain, second = parked.chain, parked.second
    expected = parked.reference(second)
    for session in (COPIED, OTHER):
        start = Continuation(SessionId(PARKED), parked.length, move=False)
        parity.check(chain.park(session, second, NEW_TOKENS, 16, start=start), expected)
    partial = [*FIRST[:70], *prompt_of(30, 8)]
    start = Continuation(SessionId(PARKED), 70, move=False)
    parity.check(chain.park(OTHER, partial, NEW_TOKENS, 64, start=start), parked.reference(partial))
    moved = Continuation(SessionId(PARKED), parked.length, move=True)
    parity.check(chain.park(MOVED, second, NEW_TOKENS, 64, start=moved), expected)
    for engine in chain.engines:
        assert engine.kv_tokens() == 2 * (len(second) + NEW_TOKENS - 1) + len(partial) + NEW_TOKENS - 1
        engine.free(SessionId(PARKED))  # it is the moved one's now
    chain.step(MOVED)


def test_continued_and_fresh_sessions_share_groups(tmp_path: Path, parity: Parity) -> None:
    parked = Parked(tmp_path, "gemma3", {}, 2, lean=False)
    chain, fresh = parked.chain, prompt_of(50, 9)
    copied = chain.prefill(COPIED, parked.second, 64, start=Continuation(SessionId(PARKED), parked.length, False))
    tokens = {COPIED: [copied], FRESH: [chain.prefill(FRESH, fresh, 32)]}
    prompts = {COPIED: parked.second, FRESH: fresh}
    while len(tokens[FRESH]) < NEW_TOKENS:
        for session, token in zip(tokens, chain.step(*tokens), strict=True):
            tokens[session].append(token)
    for session, seen in tokens.items():
        parity.check(seen, parked.reference(prompts[session]))


def test_logits_after_a_continuation_are_those_of_one_reading(tmp_path: Path) -> None:
    """fp32; the prompt is cut into other pieces, so sums come in another order: 1e-4 of logits of about ±10."""
    parked = Parked(tmp_path, "llama", {}, 1)
    model, seen = parked.chain.engines[0].model, list[torch.Tensor]()
    logits = model.logits
    model.logits = lambda *args: seen.append(logits(*args)) or seen[-1]
    parked.chain.prefill(COPIED, parked.second, 64, start=Continuation(SessionId(PARKED), parked.length, False))
    with torch.inference_mode():
        whole = parked.model(torch.tensor([parked.second])).logits[0, -1]
    torch.testing.assert_close(seen[0][0], whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("at", [1, 5, NEW_TOKENS - 1])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_k2_a_paused_session_that_reads_all_its_tokens_again_goes_on_with_the_same(
    family: str, at: int, tmp_path: Path, parity: Parity
) -> None:
    """Its cache is dropped after token `at`; what it comes back with is read in pieces, the reply so far included."""
    parked = Parked(tmp_path, family, {}, 2)
    chain, prompt = parked.chain, parked.second
    tokens = [chain.prefill(FRESH, prompt, 64)]
    while len(tokens) < at:
        tokens += chain.step(FRESH)
    chain.free(FRESH)
    tokens.append(chain.prefill(FRESH, [*prompt, *tokens], 32))
    while len(tokens) < NEW_TOKENS:
        tokens += chain.step(FRESH)
    parity.check(tokens, parked.reference(prompt))


def test_a_session_may_continue_itself(tmp_path: Path, parity: Parity) -> None:
    parked = Parked(tmp_path, "llama", {}, 2)
    for move in (True, False):
        start = Continuation(SessionId(PARKED), len(FIRST), move)
        prompt = [*FIRST, *prompt_of(9, 4 + move)]
        parity.check(parked.chain.park(PARKED, prompt, NEW_TOKENS, 64, start=start), parked.reference(prompt))
        assert parked.held() == {2 * (len(prompt) + NEW_TOKENS - 1)}


def test_what_is_not_held_is_a_gap_and_changes_nothing(tmp_path: Path) -> None:
    parked = Parked(tmp_path, "llama", {}, 1)
    (engine,) = parked.chain.engines
    known = parked.length + 1
    wrong = [
        (Continuation(SessionId(9), 4, True), 4, CacheGap, "session 9, which is to be continued, is not here"),
        (Continuation(SessionId(PARKED), known, False), known, CacheGap, f"holds {parked.length} positions"),
        (Continuation(SessionId(PARKED), known, True), known, CacheGap, f"holds {parked.length} positions"),
        (Continuation(SessionId(PARKED), known + 1, True), known + 1, CacheGap, f"knows {known} tokens"),
        (Continuation(SessionId(PARKED), 10, True), 9, StageFailed, "begins at 9, but continues 10"),
    ]
    for start, pos, error, message in wrong:
        with pytest.raises(error, match=message):
            engine.run(PieceWork(SessionId(MOVED), pos, (5,), True, start=start))
    with pytest.raises(CacheGap, match="is not here"):
        engine.run(GroupWork((DecodeRow(SessionId(MOVED), 4, 5),)))
    assert engine.kv_tokens() == parked.length


def test_copies_take_what_they_need_and_a_much_shorter_move_gives_the_rest_back(tmp_path: Path) -> None:
    parked = Parked(tmp_path, "llama", {}, 1)
    (engine,) = parked.chain.engines
    size = {n: 2 * LAYERS * 2 * n * 16 * 4 for n in (64, 128)}
    """Keys and values × layers × heads × positions × numbers × bytes."""
    assert engine.kv_bytes() == size[128]
    engine.run(PieceWork(SessionId(COPIED), 20, (5, 6), False, start=Continuation(SessionId(PARKED), 20, False)))
    assert engine.kv_bytes() == size[128] + size[64]
    engine.run(PieceWork(SessionId(MOVED), 90, (5,), False, start=Continuation(SessionId(PARKED), 90, True)))
    assert engine.kv_bytes() == size[128] + size[64]
    engine.run(PieceWork(SessionId(OTHER), 30, (5,), False, start=Continuation(SessionId(MOVED), 30, True)))
    assert engine.kv_bytes() == 2 * size[64]
    assert engine.kv_tokens() == 22 + 31


def test_a_session_that_nobody_runs_holds_no_more_than_its_positions(tmp_path: Path, parity: Parity) -> None:
    parked = Parked(tmp_path, "llama", {}, 1)
    chain, (engine,) = parked.chain, parked.chain.engines
    position_bytes = 2 * LAYERS * 2 * 16 * 4
    chain.prefill(OTHER, FIRST[:5], 32)
    for _ in range(IDLE_WORKS):
        chain.step(OTHER)
    assert engine.kv_bytes() == (128 + 128) * position_bytes
    chain.prefill(FRESH, FIRST[:5], 32)
    assert engine.kv_bytes() == (parked.length + 128 + 64) * position_bytes
    start = Continuation(SessionId(PARKED), parked.length, move=True)
    parity.check(chain.park(MOVED, parked.second, NEW_TOKENS, 16, start=start), parked.reference(parked.second))
