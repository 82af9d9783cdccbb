"""B1: what one decode step allocates, byte by byte as torch's allocator tells it; the past is no part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from stage_chains import Chain, prompt_of, stage_specs
from tiny_models import make_tiny
from torch.profiler import ProfilerActivity, profile

from swarmnode.compute.loader import load_stage

if TYPE_CHECKING:
    from pathlib import Path

LAYERS, HEADS, KV_HEADS, HEAD_DIM, FLOAT_BYTES = 2, 4, 2, 16, 4
SESSIONS, SHORT, LONG = 3, 200, 900
"""Neither is where a buffer grows: 200 is in one of 256 positions, 900 in one of 1,024 or less."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", num_layers=LAYERS)


def allocated_bytes(chain: Chain, sessions: list[int]) -> int:
    """All that a step asks of the allocator, what it gives back meanwhile included."""
    chain.step(*sessions)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        chain.step(*sessions)
    results: Any = seen.profiler
    sizes = [event.nbytes() for event in results.kineto_results.events() if event.name() == "[memory]"]
    return sum(size for size in sizes if size > 0)


@pytest.mark.parametrize("lean", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_b1_no_allocation_of_a_step_grows_with_the_past_and_its_values(
    checkpoint: Path, tmp_path: Path, dtype: str, lean: bool
) -> None:
    (spec,) = stage_specs(checkpoint, tmp_path / "folder", LAYERS, [0, LAYERS], dtype=dtype, lean=lean)
    chain, taken = Chain([load_stage(spec)]), {}
    for length in (SHORT, LONG):
        sessions = [length + index for index in range(SESSIONS)]
        for session in sessions:
            chain.prefill(session, prompt_of(length, session), 256)
        taken[length] = allocated_bytes(chain, sessions)
    assert taken[SHORT] > 0
    per_position = (taken[LONG] - taken[SHORT]) / (LONG - SHORT) / SESSIONS / LAYERS
    scores = HEADS * FLOAT_BYTES
    keys = KV_HEADS * HEAD_DIM * torch.empty((), dtype=getattr(torch, dtype)).element_size()
    assert per_position <= scores < keys
