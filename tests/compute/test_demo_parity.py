"""The demo model on ten real prompts: its stages against transformers' own generate, in float32."""

from __future__ import annotations

import shutil
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from stage_chains import Chain, Parity, Reference, even_cuts, generate

from swarmnode.catalog.source_wheel import DEMO_MODEL_ID
from swarmnode.compute.loader import load_stage
from swarmnode.compute.spec import StageSpec
from swarmnode.compute.text import TextPipeline

if TYPE_CHECKING:
    from pathlib import Path

LAYERS, NEW_TOKENS, PIECE = 30, 12, 256
TOWN = " ".join(f"In the year {1000 + i} the town built bridge number {i}." for i in range(92))
PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child 🙂🌱 in 你好 two sentences. 日本語も少し。",
    f"Summarise: {TOWN}",
    "def fibonacci(n):",
    "List three fruits, one per line.",
    "Who wrote <|im_end|> Hamlet?",
    "Translate to German: the cat sleeps.",
    "   What is 17 + 25?\n\nAnswer with a number.",
    "Tell me a joke about computers.",
)


@pytest.fixture(scope="module")
def folder(demo_models_root: Path) -> Path:
    return demo_models_root / DEMO_MODEL_ID


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    text = TextPipeline(folder / "tokenizer")
    return [text.encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def references(folder: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> list[Reference]:
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # two spinning threads on a busy machine are slower than one
    whole = tmp_path_factory.mktemp("whole")
    shutil.copytree(folder / "tokenizer", whole, dirs_exist_ok=True)
    tensors = {name: t for path in folder.glob("shards/*/model.safetensors") for name, t in load_file(path).items()}
    save_file(tensors, whole / "model.safetensors", metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    return [generate(model, prompt, NEW_TOKENS) for prompt in prompts]


@pytest.mark.model
@pytest.mark.parametrize("stages", [1, 3, 5, pytest.param(2, marks=pytest.mark.soak)])
def test_ten_real_prompts(
    stages: int, folder: Path, prompts: list[list[int]], references: list[Reference], parity: Parity
) -> None:
    files = tuple(sorted(folder.glob("shards/*/*.safetensors")))
    specs = [
        StageSpec(folder, files, begin, end, LAYERS, begin == 0, end == LAYERS, "float32", "cpu", 1)
        for begin, end in pairwise(even_cuts(LAYERS, stages))
    ]
    chain = Chain([load_stage(spec) for spec in specs])
    assert max(map(len, prompts)) > 1500
    for session, (prompt, reference) in enumerate(zip(prompts, references, strict=True)):
        parity.check(chain.reply(session, prompt, NEW_TOKENS, PIECE), reference)
