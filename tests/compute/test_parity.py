"""Greedy tokens of 1, 2, 3 and 5 stages against transformers' own generate, in float32."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from references import Reference, generate
from stage_chains import Chain, even_cuts, prompt_of, stage_specs
from tiny_models import FAMILIES, make_tiny

from swarmnode.catalog.safetensors_header import read_header
from swarmnode.compute.loader import load_stage
from swarmnode.compute.supported import quantization_obstacles
from swarmnode.errors import LoadRefused
from swarmnode.ring.work import Sampling

if TYPE_CHECKING:
    from pathlib import Path

    from stage_chains import Parity

LAYERS = 5
PIECES = {1: 256, 2: 32, 3: 7, 5: 20}
"""Piece size by stage count."""
ALL, ENDS, SOME = (1, 2, 3, 5), (1, 2), (3,)
"""Stage counts: all for each family; a tied head matters where first and last stage are one and where they are not."""
PROMPTS = {0: prompt_of(75), 1: prompt_of(1, 1), 2: prompt_of(110, 2)}
NEW_TOKENS = 12

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

    def __init__(
        self,
        path: Path,
        family: str,
        tied: bool,
        overrides: dict[str, Any],
        prompts: dict[int, list[int]] = PROMPTS,
    ) -> None:
        from transformers import AutoModelForCausalLM

        self.path, self.prompts = path, prompts
        self.checkpoint = make_tiny(path / "model", family, 1, num_layers=LAYERS, tied=tied, **overrides)
        model = AutoModelForCausalLM.from_pretrained(self.checkpoint)
        self.references: dict[int, Reference] = {s: generate(model, p, NEW_TOKENS) for s, p in prompts.items()}

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


LENGTHS = (1, 63, 511, 1990)
"""In turn: caches grow by steps of 64 positions, and from 512 on by an eighth."""
JOINING = 20
"""Sessions, one a step: from the twelfth step on one joins and one leaves at every step, all lengths in one group."""


@pytest.mark.parametrize(("family", "lean"), [("llama", True), ("gemma3", True), ("qwen2", False)])
def test_b1_lengths_of_1_to_2000_join_and_leave_at_every_step(
    family: str, lean: bool, tmp_path: Path, parity: Parity
) -> None:
    loaded = Loaded(tmp_path, family, False, {}, {length: prompt_of(length, length) for length in LENGTHS})
    chain, tokens = loaded.chain(2, lean=lean), dict[int, list[int]]()
    assert {engine.model.lean is not None for engine in chain.engines} == {lean}
    sizes = []
    for step in range(JOINING + NEW_TOKENS):
        if step < JOINING:
            tokens[step] = [chain.prefill(step, loaded.prompts[LENGTHS[step % len(LENGTHS)]], 256)]
        active = [session for session, seen in tokens.items() if len(seen) < NEW_TOKENS]
        sizes.append(len(active))
        for session, token in zip(active, chain.step(*active) if active else (), strict=True):
            tokens[session].append(token)
            if len(tokens[session]) == NEW_TOKENS:
                chain.free(session)
    assert sizes == [*range(1, 11), *(11 for _ in range(JOINING - 10)), *range(10, -1, -1), 0]
    for session, seen in tokens.items():
        parity.check(seen, loaded.references[LENGTHS[session % len(LENGTHS)]])
    assert all(engine.kv_tokens() == 0 and engine.kv_bytes() == 0 for engine in chain.engines)


def test_the_cases_run_on_the_decoder_they_are_meant_for(loaded: Loaded) -> None:
    assert all(engine.model.lean is not None for engine in loaded.chain(2).engines)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_own_blocks_give_the_same(family: str, tmp_path: Path, parity: Parity) -> None:
    loaded = Loaded(tmp_path, family, False, {})
    chain = loaded.chain(3, lean=False)
    assert all(engine.model.lean is None for engine in chain.engines)
    for session, prompt in PROMPTS.items():
        parity.check(chain.reply(session, prompt, NEW_TOKENS, 32), loaded.references[session])


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


OTHERS = {
    "cohere2": {"sliding_window": 20},  # parallel blocks, global layers without positions, scaled logits
    "gemma2": {"sliding_window": 20, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0},  # scaled inputs
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "olmo2": {},  # norms after the blocks
    "phi3": {},  # fused projections
    "smollm3": {},  # some layers without positions
}


def write_random(path: Path, model_type: str, settings: dict[str, Any]) -> Any:
    """A random checkpoint of any family; returns it as transformers loads it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"vocab_size": 384, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
    tokens = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, **shape, **heads, **tokens, **settings)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.08)
    model.save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")


@pytest.mark.parametrize("model_type", OTHERS)
def test_families_whose_forward_does_more_than_llamas(model_type: str, tmp_path: Path, parity: Parity) -> None:
    model = write_random(tmp_path / "model", model_type, OTHERS[model_type])
    references = {session: generate(model, prompt, 12) for session, prompt in PROMPTS.items()}
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    obstacles = quantization_obstacles(config, read_header(tmp_path / "model" / "model.safetensors"))
    for stages in (1, 3):
        specs = stage_specs(tmp_path / "model", tmp_path / f"over-{stages}", LAYERS, even_cuts(LAYERS, stages))
        chain = Chain([load_stage(spec) for spec in specs])
        told = "int8" in obstacles
        assert [engine.model.lean is None for engine in chain.engines] == stages * [told], "known before the load"
        for session, prompt in PROMPTS.items():
            parity.check(chain.reply(session, prompt, 12, 32), references[session])


def test_a_family_that_norms_its_inputs_too_is_refused(tmp_path: Path) -> None:
    write_random(tmp_path / "model", "nanochat", {})
    first, _ = stage_specs(tmp_path / "model", tmp_path / "s", LAYERS, [0, 2, LAYERS])
    with pytest.raises(LoadRefused, match="uses its final norm 2 times"):
        load_stage(first)
