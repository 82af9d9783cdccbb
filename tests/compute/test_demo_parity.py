"""The demo model on ten real prompts: its stages against transformers' own generate, in float32."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from demo_prompts import PROMPTS
from stage_chains import Chain, Parity, even_cuts

from swarmnode.catalog.source_wheel import DEMO_MODEL_ID
from swarmnode.compute.loader import load_stage
from swarmnode.compute.spec import StageSpec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from demo_prompts import DemoPrompt

LAYERS, PIECE = 30, 256
SOME, ALL = (1, 3), tuple(range(len(PROMPTS)))
"""Prompts; tiny models get long ones over each stage count (`test_parity.py`), the demo model over three."""
CASES = [(3, ALL), (1, SOME), (5, SOME), *(pytest.param(n, ALL, marks=pytest.mark.soak) for n in (1, 2, 5))]


@pytest.mark.model
@pytest.mark.parametrize(("stages", "asked"), CASES)
def test_ten_real_prompts(
    stages: int, asked: Sequence[int], demo_models_root: Path, demo_prompts: Sequence[DemoPrompt], parity: Parity
) -> None:
    torch.set_num_threads(1)  # two spinning threads on a busy machine are slower than one
    folder = demo_models_root / DEMO_MODEL_ID
    files = tuple(sorted(folder.glob("shards/*/*.safetensors")))
    specs = [
        StageSpec(folder, files, begin, end, LAYERS, begin == 0, end == LAYERS, "float32", "cpu", 1)
        for begin, end in pairwise(even_cuts(LAYERS, stages))
    ]
    chain = Chain([load_stage(spec) for spec in specs])
    for session in asked:
        prompt = demo_prompts[session]
        parity.check(chain.reply(session, prompt.ids, len(prompt.answer.tokens), PIECE), prompt.answer)
