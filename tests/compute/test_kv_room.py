"""K3: the budget that is measured after loading, by its arithmetic."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stage_chains import even_cuts, stage_specs
from tiny_models import make_tiny

from swarmnode.compute.kv_cache import GROWTH_TOKENS
from swarmnode.compute.kv_room import (
    CPU_SPARE_BYTES,
    KvCost,
    KvRoom,
    Load,
    admitted_tokens,
    card_room,
    cpu_room,
    kv_cost,
    kv_room,
    resident_bytes,
)
from swarmnode.compute.loader import load_stage
from swarmnode.errors import LoadRefused

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.parametrize(
    ("workspace", "float32", "spare"),
    [
        pytest.param(100 * MIB, False, 300 * MIB, id="kernels' own workspace"),
        pytest.param(500 * MIB, False, 500 * MIB, id="a wide piece takes more"),
        pytest.param(100 * MIB, True, 100 * MIB, id="float32: no more than a forward"),
    ],
)
def test_k3_a_card_gives_85_percent_less_a_spare_over_the_cost_of_a_token(
    workspace: int, float32: bool, spare: int
) -> None:
    cost = KvCost(100_000, 20_000, session=0, workspace=workspace, float32=float32)
    assert card_room(cost, 8 * GIB, Load(0, 4096)).tokens == int((0.85 * 8 * GIB - spare) / 120_000)
    assert card_room(cost, 100 * MIB, Load(0, 4096)).tokens == 0


def test_k3_on_a_card_every_session_is_charged_its_states_and_a_growth_step() -> None:
    cost = KvCost(100_000, 20_000, session=9 * MIB, workspace=0)
    growing = 16 * (2 * GROWTH_TOKENS * 100_000 + 9 * MIB)
    assert card_room(cost, 8 * GIB, Load(16, 4096)).tokens == int((0.85 * 8 * GIB - 300 * MIB - growing) / 120_000)


@given(
    token=st.integers(0, 1 << 20),
    scores=st.integers(1, 1 << 18),
    session=st.integers(0, 1 << 20),
    workspace=st.integers(0, 1 << 28),
    room=st.integers(0, 1 << 34),
    sessions=st.integers(1, 64),
    context=st.integers(1, 1 << 17),
)
def test_on_a_cpu_a_full_budget_fits_into_the_allowance(
    token: int, scores: int, session: int, workspace: int, room: int, sessions: int, context: int
) -> None:
    taken = GIB
    cost = KvCost(token, scores, session, workspace)
    tokens = cpu_room(cost, taken + room, taken, Load(sessions, context)).tokens
    if tokens:
        buffers = tokens * token * 9 / 8 + sessions * (2 * GROWTH_TOKENS * token + session)
        needed = buffers + scores * min(tokens, context) + workspace + CPU_SPARE_BYTES
        assert needed <= room
        assert needed + (token * 9 / 8 + scores) * 1.01 > room or not token  # and no token more would


def test_never_more_than_planned_and_never_less_than_one_conversation() -> None:
    assert admitted_tokens(8192, 4096, KvRoom(9000, "")) == 8192
    assert admitted_tokens(8192, 4096, KvRoom(5000, "")) == 5000
    with pytest.raises(
        LoadRefused, match=r"4,095 tokens of KV fit, 8,192 were planned, .* takes 4,096 \(the numbers\)"
    ):
        admitted_tokens(8192, 4096, KvRoom(4095, "the numbers"))


def test_a_card_is_asked_what_the_driver_and_torch_have_free(monkeypatch: pytest.MonkeyPatch) -> None:
    card = torch.device("cuda:1")
    counts = {"mem_get_info": (4 * GIB, 8 * GIB), "memory_reserved": 3 * GIB, "memory_allocated": 2 * GIB}
    for name, count in counts.items():
        monkeypatch.setattr(torch.cuda, name, {card: count}.__getitem__)
    cost, load = KvCost(token=100_000, scores=20_000, session=0, workspace=GIB), Load(8, 4096)
    room = kv_room(cost, card, memory_bytes=1, load=load)
    assert room.tokens > 0
    assert room == card_room(cost, 5 * GIB, load), "whatever is offered of the CPU's memory"
    assert "the card has 5,120 MiB free" in room.why


def test_costs_are_those_of_the_slice(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    checkpoint = make_tiny(tmp_path / "model", "llama", num_layers=4)
    specs = stage_specs(checkpoint, tmp_path / "stages", 4, even_cuts(4, 2))
    engines = [load_stage(spec) for spec in specs]
    costs = [kv_cost(engine.model, engine.probe(), 256) for engine in engines]
    # 2 layers × keys and values × 2 heads × 16 numbers × 4 bytes
    assert [cost.token for cost in costs] == [512, 512]
    assert [cost.session for cost in costs] == [0, 0]
    assert costs[1].workspace > costs[0].workspace  # the head's logits
    longer = [kv_cost(engines[0].model, engines[0].probe(), n).scores for n in (32, 256, 1024)]
    assert all(a < b for a, b in pairwise(longer))


def test_without_an_allowance_what_the_machine_has_counts() -> None:
    cost, load = KvCost(1024, 1024, 0, 0), Load(4, 4096)
    cpu = torch.device("cpu")
    assert kv_room(cost, cpu, 0, load).tokens > 0
    assert kv_room(cost, cpu, resident_bytes(), load).tokens == 0
    assert (
        kv_room(cost, cpu, resident_bytes() + GIB, load).tokens
        > kv_room(cost, cpu, resident_bytes() + GIB // 2, load).tokens
    )
