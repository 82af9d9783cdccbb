"""Greedy tokens of 1, 2, 3 and 5 stages against transformers' own generate, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from swarmnode.compute.loader import load_stage
from swarmnode.ring.work import Sampling
from tests.compute.chains import Chain, Reference, even_cuts, generate, prompt_of, stage_specs
from tests.tiny_models import FAMILIES, make_tiny

if TYPE_CHECKING:
    from pathlib import Path

    from tests.compute.chains import Parity

LAYERS = 5
PIECES = {1: 256, 2: 32, 3: 7, 5: 20}
"""Piece size by stage count."""
ALL, ENDS, SOME = (1, 2, 3, 5), (1, 2), (3,)
"""Stage counts: all for each family; a tied head matters where first and last stage are one and where they are not."""
PROMPTS = {0: prompt_of(75), 1: prompt_of(1, 1), 2: prompt_of(40, 2), 3: prompt_of(130, 3)}
NEW_TOKENS = 16

CASES: list[tuple[tuple[int, ...], str, bool, dict[str, Any]]] = [
    *((ALL, family, False, {}) for family in FAMILIES),
    *((ENDS, family, True, {}) for family in FAMILIES),
    (SOME, "mistral", False, {"sliding_window": 24}),
    (SOME, "qwen2", False, {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}),
    (SOME, "qwen3", False, {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1}),
    (SOME, "gemma3", True, {"final_logit_softcapping": 3.0}),
    (SOME, "llama", False, {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}}),
    (SOME, "llama", False, {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    (SOME, "llama", False, {"num_key_value_heads": 1}),
]


class Loaded:
    """A tiny checkpoint, what transformers says of it, and chains of stages over it."""

    stage_counts: tuple[int, ...] = ()

    def __init__(self, path: Path, family: str, tied: bool, overrides: dict[str, Any]) -> None:
        from transformers import AutoModelForCausalLM

        self.path = path
        self.checkpoint = make_tiny(path / "model", family, 1, num_layers=LAYERS, tied=tied, **overrides)
        model = AutoModelForCausalLM.from_pretrained(self.checkpoint)
        self.references: dict[int, Reference] = {s: generate(model, p, NEW_TOKENS) for s, p in PROMPTS.items()}

    def chain(self, stages: int, **settings: Any) -> Chain:
        target = self.path / f"over-{stages}-{len(list(self.path.iterdir()))}"
        specs = stage_specs(self.checkpoint, target, LAYERS, even_cuts(LAYERS, stages), **settings)
        return Chain([load_stage(spec) for spec in specs])


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, (case[1], case[2], *case[3]))))
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    stage_counts, *rest = request.param
    made = Loaded(tmp_path_factory.mktemp("tiny"), *rest)
    made.stage_counts = stage_counts
    return made


def test_prompts_in_pieces_give_the_tokens_of_transformers(loaded: Loaded, parity: Parity) -> None:
    for stages in loaded.stage_counts:
        chain = loaded.chain(stages)
        for session, prompt in PROMPTS.items():
            parity.check(chain.reply(session, prompt, NEW_TOKENS, PIECES[stages]), loaded.references[session])
        assert all(engine.kv_tokens() == 0 and engine.kv_bytes() == 0 for engine in chain.engines)


def test_sessions_of_mixed_lengths_join_and_leave_one_batch(loaded: Loaded, parity: Parity) -> None:
    chain = loaded.chain(2)
    tokens: dict[int, list[int]] = {}
    for joining in (*PROMPTS, None, None, None):
        if joining is not None:
            tokens[joining] = [chain.prefill(joining, PROMPTS[joining], 32)]
        for _ in range(4):
            active = [s for s, seen in tokens.items() if len(seen) < NEW_TOKENS and s in chain.positions]
            for session, token in zip(active, chain.step(*active) if active else (), strict=True):
                tokens[session].append(token)
                if len(tokens[session]) == NEW_TOKENS:
                    chain.free(session)
    for session, seen in tokens.items():
        parity.check(seen[:NEW_TOKENS], loaded.references[session])
        assert len(seen) == NEW_TOKENS
    assert all(engine.kv_tokens() == 0 for engine in chain.engines)


def test_a_seed_gives_the_same_tokens_whatever_the_stages_and_the_batch(tmp_path: Path) -> None:
    loaded = Loaded(tmp_path, "llama", False, {})
    sampling = Sampling(temperature=1.3, top_p=0.95, seed=7)
    alone = loaded.chain(1).reply(0, PROMPTS[0], NEW_TOKENS, 256, sampling)
    assert alone != loaded.references[0].tokens
    assert alone != loaded.chain(1).reply(0, PROMPTS[0], NEW_TOKENS, 256, Sampling(1.3, 0.95, seed=8))
    for stages in (2, 3, 5):
        chain = loaded.chain(stages)
        other = chain.prefill(9, PROMPTS[2], 32, Sampling(temperature=0.8, seed=3))
        assert isinstance(other, int)
        tokens = [chain.prefill(0, PROMPTS[0], 32, sampling)]
        while len(tokens) < NEW_TOKENS:
            tokens.append(chain.step(9, 0)[1])
        assert tokens == alone


def test_bfloat16_is_the_same_over_any_stages(tmp_path: Path) -> None:
    loaded = Loaded(tmp_path, "qwen3", True, {})
    one = loaded.chain(1, dtype="bfloat16").reply(0, PROMPTS[0], NEW_TOKENS, 32)
    for stages in (2, 5):
        assert loaded.chain(stages, dtype="bfloat16").reply(0, PROMPTS[0], NEW_TOKENS, 32) == one


def test_softcapped_attention_and_scaled_inputs_of_gemma2(tmp_path: Path, parity: Parity) -> None:
    """Gemma 2 scales its input embeddings in the model's forward and caps its attention scores."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=384, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=20, query_pre_attn_scalar=16, attn_logit_softcapping=5.0,
        final_logit_softcapping=4.0, max_position_embeddings=512,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    model.save_pretrained(tmp_path / "model")
    for stages in (1, 3):
        specs = stage_specs(tmp_path / "model", tmp_path / f"over-{stages}", LAYERS, even_cuts(LAYERS, stages))
        chain = Chain([load_stage(spec) for spec in specs])
        for session, prompt in PROMPTS.items():
            parity.check(chain.reply(session, prompt, 12, 32), generate(model, prompt, 12))
