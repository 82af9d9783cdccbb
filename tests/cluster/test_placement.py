"""Placement is arithmetic: what fits, what is refused, and the numbers in what is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from swarmnode.cluster.placement import (
    ALL_CAPABILITIES,
    RING_CAPABILITIES,
    PeerResources,
    Plan,
    PlanRequest,
    plan_load,
)
from swarmnode.cluster.pricing import HEADROOM, KERNELS_BYTES, WORKER_BYTES, ModelShape
from swarmnode.errors import LoadRefused, PeerNotFound
from swarmnode.ids import NodeId

MIB, GIB = 1 << 20, 1 << 30
WORKER = WORKER_BYTES + KERNELS_BYTES
"""Beside what is not quantized."""
SHAPE = ModelShape(
    layer_params=(10_000_000,) * 12,
    embed_params=20_000_000,
    head_params=20_000_000,
    kv_values_per_token_layer=1024,
    context_tokens=8192,
    recorded_stages=2,
    recorded_boundaries=(7,),
)
ASK = PlanRequest(num_stages=None, peers=(), dtype="bfloat16")


def peer(name: str, gib: float = 4, busy_with: str | None = None) -> PeerResources:
    return PeerResources(NodeId(f"id-of-{name}"), name, int(gib * GIB), busy_with)


ATTIC, CELLAR, DESK = peer("attic", 8), peer("cellar", 4), peer("desk", 2)
PEERS = [DESK, ATTIC, CELLAR]


def refusal(shape: ModelShape = SHAPE, ask: PlanRequest = ASK, peers: list[PeerResources] = PEERS) -> str:
    with pytest.raises(LoadRefused) as refused:
        plan_load(shape, ask, peers)
    return str(refused.value)


def planned_or_refused(shape: ModelShape, ask: PlanRequest, peers: list[PeerResources]) -> Plan | str:
    try:
        return plan_load(shape, ask, peers)
    except LoadRefused as refused:
        return str(refused)


def test_the_recorded_cut_is_taken_where_the_stage_count_is_the_recorded_one() -> None:
    plan = plan_load(SHAPE, ASK, PEERS)
    assert [(s.peer.name, s.first_layer, s.end_layer) for s in plan.stages] == [("attic", 0, 7), ("cellar", 7, 12)]


def test_another_stage_count_is_cut_anew_by_parameters() -> None:
    plan = plan_load(SHAPE, replace(ASK, num_stages=3), PEERS)
    assert [(s.first_layer, s.end_layer) for s in plan.stages] == [(0, 3), (3, 8), (8, 12)]


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_every_layer_is_placed_once_and_the_bytes_add_up(num_stages: int) -> None:
    plan = plan_load(SHAPE, replace(ASK, num_stages=num_stages), PEERS)
    assert [layer for s in plan.stages for layer in range(s.first_layer, s.end_layer)] == list(range(12))
    assert sum(s.weight_bytes for s in plan.stages) == 2 * (12 * 10_000_000 + 40_000_000)
    assert sum(s.kv_token_bytes for s in plan.stages) == 2 * 12 * 1024


def test_float32_takes_twice_the_bytes() -> None:
    half, full = (plan_load(SHAPE, replace(ASK, dtype=dtype), PEERS) for dtype in ("bfloat16", "float32"))
    assert [2 * s.weight_bytes for s in half.stages] == [s.weight_bytes for s in full.stages]
    assert [2 * s.kv_token_bytes for s in half.stages] == [s.kv_token_bytes for s in full.stages]


def test_named_peers_hold_the_stages_in_their_order_by_name_or_id() -> None:
    plan = plan_load(SHAPE, replace(ASK, peers=("desk", "id-of-attic")), PEERS)
    assert [s.peer.name for s in plan.stages] == ["desk", "attic"]


def test_the_largest_idle_peers_are_chosen_and_ties_go_by_name() -> None:
    peers = [peer("c"), peer("a"), peer("b"), peer("big", 16, busy_with="other")]
    plan = plan_load(SHAPE, ASK, peers)
    assert [s.peer.name for s in plan.stages] == ["a", "b"]


@pytest.mark.parametrize("num_stages", [0, -1, 13])
def test_a_stage_count_the_model_cannot_have(num_stages: int) -> None:
    assert refusal(ask=replace(ASK, num_stages=num_stages)) == (
        f"{num_stages} stages asked for, but the model has 12 layers: choose 1 to 12"
    )


def test_a_model_without_a_recorded_split_serves_only_as_exported() -> None:
    shape = replace(SHAPE, recorded_boundaries=None, shard_boundaries=(3,))
    assert "only over the 2 stages it was exported with, not 3" in refusal(shape, replace(ASK, num_stages=3))
    assert [stage.first_layer for stage in plan_load(shape, ASK, PEERS).stages] == [0, 3], "as its shards are cut"
    assert "shards, which show where it was cut, are not whole on this machine" in refusal(
        replace(shape, shard_boundaries=None)
    )


def test_too_few_idle_peers_are_named_with_who_is_busy() -> None:
    peers = [ATTIC, peer("cellar", busy_with="smollm2"), peer("desk", busy_with="qwen3")]
    text = refusal(ask=replace(ASK, num_stages=2), peers=peers)
    assert text.startswith("2 stages need 2 free peers, 1 are connected: attic; busy: ")
    assert text.endswith("or ask for fewer stages: `--stages 1`")
    assert "--role coordinator --role peer" in text
    assert "cellar (serves smollm2), desk (serves qwen3)" in text
    assert "0 are connected: none. Start more peers" in refusal(peers=[])


@pytest.mark.parametrize(
    ("peers", "num_stages", "words"),
    [
        (("attic",), 2, "1 peers named for 2 stages"),
        (("attic", "attic"), None, "named twice"),
        (("attic", "id-of-attic"), None, "id-of-attic is a peer that is named already"),
    ],
)
def test_names_that_do_not_make_a_ring(peers: tuple[str, ...], num_stages: int | None, words: str) -> None:
    assert words in refusal(ask=replace(ASK, peers=peers, num_stages=num_stages))


def test_a_named_peer_that_is_busy() -> None:
    peers = [ATTIC, peer("cellar", busy_with="smollm2")]
    text = refusal(ask=replace(ASK, peers=("attic", "cellar")), peers=peers)
    assert text == "peer cellar already serves smollm2; unload it first"


def test_an_unknown_peer_is_named_with_those_that_are_known() -> None:
    with pytest.raises(PeerNotFound, match=r"no peer is called 'loft'; connected peers: attic, cellar, desk") as found:
        plan_load(SHAPE, replace(ASK, peers=("loft", "attic")), PEERS)
    assert found.value.param == "peer"
    with pytest.raises(PeerNotFound, match="connected peers: none"):
        plan_load(SHAPE, replace(ASK, peers=("loft",)), [])


@pytest.mark.parametrize("lacking", sorted(RING_CAPABILITIES))
def test_a_peer_that_lacks_what_the_ring_needs_is_named(lacking: str) -> None:
    old = replace(CELLAR, capabilities=ALL_CAPABILITIES - {lacking})
    ask = replace(ASK, peers=("cellar",)) if lacking == "serve-one-stage" else replace(ASK, peers=("attic", "cellar"))
    text = refusal(ask=ask, peers=[ATTIC, old])
    assert "cellar" in text
    assert lacking in text


def test_too_little_memory_names_every_stage_that_does_not_fit_with_its_numbers() -> None:
    peers = [peer("attic", 8), peer("desk", 0.5), peer("shelf", 0.25)]
    text = refusal(ask=replace(ASK, num_stages=3), peers=peers)
    assert text.startswith("too little memory: stage 1 (layers 3-7) needs ")
    weights, kv, worker = 2 * 50_000_000, 4096 * 2 * 5 * 1024, WORKER
    need = (weights + kv + worker) * HEADROOM
    assert f"needs {need / MIB:,.0f} MiB on desk: {weights / MIB:,.0f} MiB of bfloat16 weights" in text
    assert f"{kv / MIB:,.0f} MiB of KV for 4,096 tokens" in text
    assert "it offers 512 MiB; stage 2 (layers 8-11)" in text
    assert "on shelf" in text
    assert "on attic" not in text


def test_the_budget_grows_into_spare_memory_up_to_a_context_each() -> None:
    plan = plan_load(SHAPE, ASK, [peer("a", 64), peer("b", 64)])
    assert plan.max_in_flight == 8
    assert plan.kv_tokens == 8 * 8192
    assert plan.context_tokens == 8192


def test_the_budget_is_what_the_smallest_stage_has_room_for() -> None:
    small = peer("small", 0.9)
    plan = plan_load(SHAPE, replace(ASK, peers=("attic", "small")), [ATTIC, small])
    stage = plan.stages[1]
    assert plan.kv_tokens == (small.memory_bytes / HEADROOM - stage.weight_bytes - WORKER) // stage.kv_token_bytes
    assert plan.max_in_flight == min(8, plan.kv_tokens // 1024)


def test_in_flight_is_lowered_to_what_the_budget_holds() -> None:
    stage_bytes = 2 * (5 * 10_000_000 + 20_000_000) + WORKER
    tight = PeerResources(NodeId("t"), "tight", int((stage_bytes + 4200 * 2 * 5 * 1024) * HEADROOM) + 1)
    plan = plan_load(SHAPE, replace(ASK, peers=("attic", "tight")), [ATTIC, tight])
    assert plan.kv_tokens == 4200
    assert plan.max_in_flight == 4
    assert plan.context_tokens == 4200


def test_the_in_flight_setting_wins_over_four_per_stage() -> None:
    plan = plan_load(SHAPE, replace(ASK, in_flight=3), [peer("a", 64), peer("b", 64)])
    assert (plan.max_in_flight, plan.kv_tokens) == (3, 3 * 8192)


def test_a_model_with_a_short_context_needs_no_more_than_it() -> None:
    plan = plan_load(replace(SHAPE, context_tokens=512), ASK, [peer("a", 64), peer("b", 64)])
    assert plan.context_tokens == 512
    assert plan.kv_tokens == 8 * 1024


def test_weights_that_do_not_fit_are_refused_even_without_kv() -> None:
    shape = replace(SHAPE, kv_values_per_token_layer=0)
    assert "too little memory" in refusal(shape, ASK, [peer("a", 0.1), peer("b", 0.1)])


def test_a_scripted_model_takes_no_weights_and_no_torch() -> None:
    shape = replace(SHAPE, weightless=True, kv_values_per_token_layer=1)
    plan = plan_load(shape, ASK, [peer("a", 0.01), peer("b", 0.01)])
    assert [s.weight_bytes for s in plan.stages] == [0, 0]


@given(
    layers=st.lists(st.integers(1, 50_000_000), min_size=1, max_size=20),
    extras=st.tuples(st.integers(0, 10**8), st.integers(0, 10**8)),
    kv=st.integers(0, 4096),
    context=st.integers(1, 100_000),
    stages=st.integers(1, 5),
    memory=st.lists(st.integers(0, 16 * GIB), min_size=5, max_size=5),
    in_flight=st.one_of(st.none(), st.integers(1, 200)),
    typical=st.integers(1, 5000),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
@settings(deadline=None, max_examples=200)
def test_a_plan_fits_every_peer_and_a_refusal_names_one(
    layers: list[int],
    extras: tuple[int, int],
    kv: int,
    context: int,
    stages: int,
    memory: list[int],
    in_flight: int | None,
    typical: int,
    dtype: str,
) -> None:
    assume(stages <= len(layers))
    shape = ModelShape(tuple(layers), *extras, kv, context, 1, ())
    ask = PlanRequest(stages, (), dtype, in_flight, typical)
    peers = [PeerResources(NodeId(str(i)), f"peer-{i}", offer) for i, offer in enumerate(memory)]
    plan = planned_or_refused(shape, ask, peers)
    if isinstance(plan, str):
        assert " on peer-" in plan
        return
    for stage in plan.stages:
        need = stage.weight_bytes + WORKER + plan.kv_tokens * stage.kv_token_bytes
        assert need * HEADROOM <= stage.peer.memory_bytes * (1 + 1e-9)
    assert len({stage.peer.node for stage in plan.stages}) == stages
    assert min(4096, context) <= plan.context_tokens <= context
    assert plan.context_tokens <= plan.kv_tokens
    assert 1 <= plan.max_in_flight <= (in_flight or 4 * stages)
    assert plan.max_in_flight == 1 or plan.max_in_flight * min(typical, plan.kv_tokens) <= plan.kv_tokens


@pytest.mark.parametrize(
    ("prefer", "held"),
    [
        (("cellar", "attic"), ["cellar", "attic"]),
        (("gone", "cellar"), ["attic", "cellar"]),
        (("gone", "attic"), ["cellar", "attic"]),
        (("desk",), ["attic", "cellar"]),
    ],
)
def test_who_held_a_stage_gets_it_again_and_others_take_the_rest(prefer: tuple[str, ...], held: list[str]) -> None:
    plan = plan_load(SHAPE, replace(ASK, prefer=tuple(f"id-of-{name}" for name in prefer)), PEERS)
    assert [stage.peer.name for stage in plan.stages] == held


def test_who_held_a_stage_and_has_no_room_for_it_now_is_passed_over() -> None:
    small = peer("small", 0.01)
    plan = plan_load(SHAPE, replace(ASK, prefer=("id-of-small", "id-of-cellar")), [*PEERS, small])
    assert [stage.peer.name for stage in plan.stages] == ["attic", "cellar"]
