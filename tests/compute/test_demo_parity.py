"""The demo model on ten real prompts: its stages against transformers' own generate, in float32."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from stage_chains import Chain, Parity, even_cuts

from swarmnode.catalog.source_wheel import DEMO_MODEL_ID
from swarmnode.compute.loader import load_stage
from swarmnode.compute.spec import StageSpec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from demo_prompts import DemoPrompt

LAYERS, PIECE = 30, 256


@pytest.mark.model
@pytest.mark.parametrize("stages", [1, 3, 5, pytest.param(2, marks=pytest.mark.soak)])
def test_ten_real_prompts(
    stages: int, demo_models_root: Path, demo_prompts: Sequence[DemoPrompt], parity: Parity
) -> None:
    torch.set_num_threads(1)  # two spinning threads on a busy machine are slower than one
    folder = demo_models_root / DEMO_MODEL_ID
    files = tuple(sorted(folder.glob("shards/*/*.safetensors")))
    specs = [
        StageSpec(folder, files, begin, end, LAYERS, begin == 0, end == LAYERS, "float32", "cpu", 1)
        for begin, end in pairwise(even_cuts(LAYERS, stages))
    ]
    chain = Chain([load_stage(spec) for spec in specs])
    for session, prompt in enumerate(demo_prompts):
        parity.check(chain.reply(session, prompt.ids, len(prompt.answer.tokens), PIECE), prompt.answer)
