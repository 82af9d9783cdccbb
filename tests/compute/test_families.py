"""Mixture-of-experts and hybrid families on transformers' own blocks: greedy tokens of 1, 2 and 3 stages against its
`generate`, in pieces, in batches and after a rollback."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from references import Reference, generate
from safetensors.torch import load_file, save_file
from stage_chains import GREEDY, Chain, even_cuts, prompt_of, stage_specs
from tiny_models import make_tokenizer, write_random

from swarmnode.catalog.importing import import_model
from swarmnode.compute.loader import load_stage
from swarmnode.compute.spec import StageSpec
from swarmnode.errors import LoadFailed, LoadRefused, StageFailed
from swarmnode.ids import SessionId
from swarmnode.ring.work import Continuation, DecodeRow, GroupWork, PieceWork

if TYPE_CHECKING:
    from pathlib import Path

    from stage_chains import Parity

LAYERS = 4
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
SHARED = {"shared_expert_intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3_next": {**EXPERTS, **LINEAR, **SHARED, "num_experts": 4},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": {**EXPERTS, **LINEAR, **SHARED, "num_experts": 4},
}
HYBRIDS = [name for name, settings in FAMILIES.items() if "linear_num_key_heads" in settings]
PROMPTS = {0: prompt_of(75), 1: prompt_of(1, 1), 2: prompt_of(50, 2)}
PIECES = {1: 256, 2: 32, 3: 7}
NEW_TOKENS = 6


class Family:
    """A tiny random checkpoint and what transformers says of it."""

    def __init__(self, path: Path, model_type: str) -> None:
        from transformers import AutoModelForCausalLM

        self.path, self.model_type = path, model_type
        self.checkpoint = write_random(path / "model", model_type, LAYERS, **FAMILIES[model_type])
        auto: Any = AutoModelForCausalLM
        self.whole = auto.from_pretrained(self.checkpoint, attn_implementation="eager")
        self.references: dict[int, Reference] = {s: generate(self.whole, p, NEW_TOKENS) for s, p in PROMPTS.items()}

    def chain(self, stages: int, **settings: Any) -> Chain:
        target = self.path / f"over-{stages}-{len(list(self.path.iterdir()))}"
        specs = stage_specs(self.checkpoint, target, LAYERS, even_cuts(LAYERS, stages), **settings)
        return Chain([load_stage(spec) for spec in specs])


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    torch.set_num_threads(1)
    return Family(tmp_path_factory.mktemp("family"), request.param)


def test_prompts_in_pieces_give_the_tokens_of_transformers(family: Family, parity: Parity) -> None:
    for stages, piece in PIECES.items():
        chain = family.chain(stages)
        for session, prompt in PROMPTS.items():
            parity.check(chain.reply(session, prompt, NEW_TOKENS, piece), family.references[session])
        assert all(engine.kv_tokens() == 0 and engine.kv_bytes() == 0 for engine in chain.engines)


def test_b5_a_batch_gives_every_session_its_own_tokens(family: Family, parity: Parity) -> None:
    chain = family.chain(2)
    tokens = {session: [chain.prefill(session, prompt, 32)] for session, prompt in PROMPTS.items()}
    for _ in range(NEW_TOKENS - 1):
        for session, token in zip(PROMPTS, chain.step(*PROMPTS), strict=True):
            tokens[session].append(token)
    for session, seen in tokens.items():
        parity.check(seen, family.references[session])


def test_a_step_that_failed_halfway_can_be_run_again(family: Family, parity: Parity) -> None:
    (engine,) = family.chain(1).engines
    prompt, session = tuple(PROMPTS[0]), SessionId(7)
    tokens = [*engine.run(PieceWork(session, 0, prompt, True, sampling=GREEDY)).tokens]
    blocks: Any = engine.model.base.layers  # type: ignore[attr-defined]

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    # After a layer's state was changed, and before that layer was through with it.
    parts = [blocks[LAYERS - 1].mlp, *(b.linear_attn.mixer.out_proj for b in blocks if hasattr(b, "linear_attn"))]
    for position in range(len(prompt), len(prompt) + NEW_TOKENS - 1):
        work = GroupWork((DecodeRow(session, position, tokens[-1]),))
        broken = parts[position % len(parts)].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.run(work)
        broken.remove()
        tokens += engine.run(work).tokens
    parity.check(tokens, family.references[0])


def test_k5_a_recurrent_state_continues_at_its_own_length_only(tmp_path: Path, parity: Parity) -> None:
    made = Family(tmp_path, HYBRIDS[0])
    chain, parked = made.chain(2), 5
    second = [*PROMPTS[2], *chain.park(parked, PROMPTS[2], NEW_TOKENS, 16), *prompt_of(9, 5)]
    length = len(PROMPTS[2]) + NEW_TOKENS - 1
    expected = generate(made.whole, second, NEW_TOKENS)
    for session, move in ((6, False), (7, False), (8, True)):
        start = Continuation(SessionId(parked), length, move=move)
        parity.check(chain.park(session, second, NEW_TOKENS, 4, start=start), expected)
    with pytest.raises(StageFailed, match=r"holds \d+ positions; its past cannot be cut to 12, only to \d+"):
        chain.prefill(9, second, 64, start=Continuation(SessionId(6), 12, move=False))


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_next"])
def test_an_import_carries_what_placement_needs_and_serves(model_type: str, tmp_path: Path, parity: Parity) -> None:
    made = Family(tmp_path, model_type)
    make_tokenizer(made.checkpoint)
    manifest = import_model(str(made.checkpoint), tmp_path / "root", model_id="m", stages=2)
    hybrid = model_type in HYBRIDS
    assert manifest.architecture.recurrent_layers == ((0, 2, 3) if hybrid else ())
    assert manifest.architecture.state_values_per_layer == ((2 * 32 + 64) * 4 + 4 * 16 * 16 if hybrid else 0)
    assert not manifest.architecture.tied
    assert manifest.boundaries is not None
    folder, cuts = tmp_path / "root" / "m", (0, *manifest.boundaries, LAYERS)
    engines = []
    for stage, (begin, end) in enumerate(pairwise(cuts)):
        files = tuple(folder / file.path for file in manifest.shard_files(stage))
        engines.append(load_stage(StageSpec(folder, files, begin, end, LAYERS, begin == 0, end == LAYERS)))
    parity.check(Chain(engines).reply(0, PROMPTS[2], NEW_TOKENS, 16), made.references[2])


def test_q1_a_hybrid_in_four_bits_gives_the_tokens_of_a_quantized_from_pretrained(
    tmp_path: Path, parity: Parity
) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    made = Family(tmp_path, "qwen3_5_text")
    make: Any = BitsAndBytesConfig
    auto: Any = AutoModelForCausalLM
    config = make(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    model = auto.from_pretrained(
        made.checkpoint, dtype=torch.float32, quantization_config=config, attn_implementation="eager", device_map="cpu"
    )
    chain = made.chain(2, quantization="nf4", dtype="float32")
    parity.check(chain.reply(0, PROMPTS[2], NEW_TOKENS, 16), generate(model, PROMPTS[2], NEW_TOKENS))


def test_experts_are_read_from_one_tensor_each_and_a_missing_one_is_named(tmp_path: Path) -> None:
    made = Family(tmp_path, "mixtral")
    file = made.checkpoint / "model.safetensors"
    tensors = load_file(file)
    gone = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    assert gone in tensors
    save_file({name: t for name, t in tensors.items() if name != gone}, file, metadata={"format": "pt"})
    with pytest.raises(LoadFailed, match=r"hold 192 rows of 'model.layers.1.mlp.experts.down_proj'.* needs 256"):
        made.chain(1)


def test_linear_attention_of_another_make_is_refused(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = AutoConfig.for_model(
        "minimax", vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_local_experts=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    auto: Any = AutoModelForCausalLM
    auto.from_config(config).save_pretrained(tmp_path / "model")
    (spec,) = stage_specs(tmp_path / "model", tmp_path / "s", 2, [0, 2])
    with pytest.raises(LoadRefused, match="its linear attention keeps its state elsewhere"):
        load_stage(spec)
