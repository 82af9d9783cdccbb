"""Placement by what was measured: who is avoided and why, where the cut moves, and what is never given up for speed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.cluster.faster_plan import WORTH_MS
from swarmnode.cluster.measured import LinkSeen, Measured
from swarmnode.cluster.placement import (
    RING_CAPABILITIES,
    PeerResources,
    Plan,
    PlanRequest,
    plan_load,
)
from swarmnode.cluster.pricing import HEADROOM, ModelShape
from swarmnode.cluster.ring_pace import predict
from swarmnode.errors import LoadRefused
from swarmnode.ids import NodeId

GIB = 1 << 30
SHAPE = ModelShape(
    layer_params=(50_000_000,) * 12,
    embed_params=20_000_000,
    head_params=20_000_000,
    kv_values_per_token_layer=1024,
    context_tokens=8192,
    recorded_stages=2,
    recorded_boundaries=(6,),
    hidden_size=4096,
)
ASK = PlanRequest(num_stages=None, peers=(), dtype="bfloat16")
FREE = replace(ASK, num_stages=3)
"""Not the recorded stage count: the cut is placement's."""


def peer(name: str, gib: float = 8, busy_with: str | None = None) -> PeerResources:
    return PeerResources(NodeId(name), name, int(gib * GIB), busy_with)


A, B, C = (peer(name) for name in "abc")


def paces(**ms: float) -> Measured:
    """Milliseconds for each GiB, by peer."""
    return Measured({NodeId(name): value for name, value in ms.items()}, sorted(ms.values())[len(ms) // 2])


def held(plan: Plan) -> list[str]:
    return [stage.peer.name for stage in plan.stages]


def cut(plan: Plan) -> list[int]:
    return [stage.first_layer for stage in plan.stages[1:]]


def why(plan: Plan) -> dict[str, tuple[str, str]]:
    return {left.name: (left.reason, left.why) for left in plan.left_out}


def test_with_nothing_measured_the_largest_hold_the_stages() -> None:
    plan = plan_load(SHAPE, ASK, [A, B, peer("big", 9)])
    assert (held(plan), plan.pace) == (["big", "a"], None)
    assert why(plan) == {
        "b": ("not_needed", "not needed: the ring has 2 stages, and who holds them offers 8,192 MiB or more; it offers "
              "8,192 MiB")
    }  # fmt: skip


def test_a_peer_that_was_measured_slow_is_avoided_and_the_plan_says_by_how_much() -> None:
    plan = plan_load(SHAPE, ASK, [A, B, C], paces(a=10, b=90, c=10))
    assert held(plan) == ["a", "c"]
    assert why(plan) == {
        "b": ("slower", "measured slower: a step takes 90.0 ms for each GiB of weights, and 10.0 on a, which holds "
              "stage 0")
    }  # fmt: skip
    assert plan.pace is not None
    assert plan.pace.round_ms == pytest.approx(
        10 * sum(s.price.step_gib(is_last=s.end_layer == 12) for s in plan.stages)
    )


def test_one_that_was_never_measured_takes_the_slow_ones_place() -> None:
    plan = plan_load(SHAPE, ASK, [A, B, C], paces(a=10, b=90, x=10))
    assert held(plan) == ["a", "c"]


def test_a_slow_peer_serves_where_nobody_else_can() -> None:
    measured = paces(a=10, b=90, c=10, d=10)
    assert held(plan_load(SHAPE, ASK, [A, B], measured)) == ["a", "b"]
    assert held(plan_load(SHAPE, ASK, [A, B, peer("c", 0.5), peer("d", busy_with="other")], measured)) == ["a", "b"]


def test_what_scatters_moves_nothing() -> None:
    assert held(plan_load(SHAPE, ASK, [A, B, C], paces(a=10, b=11, c=9.5))) == ["a", "b"]
    tiny = replace(SHAPE, layer_params=(10_000,) * 12)
    assert held(plan_load(tiny, ASK, [A, B, C], paces(a=10, b=30, c=10))) == ["a", "b"], f"less than {WORTH_MS} ms"


def test_named_peers_hold_the_stages_however_slow_they_are() -> None:
    plan = plan_load(SHAPE, replace(ASK, peers=("b", "a")), [A, B, C], paces(a=10, b=90, c=10))
    assert held(plan) == ["b", "a"]
    assert why(plan) == {"c": ("unable", "the load names others")}


def test_who_held_a_stage_keeps_it_and_the_fastest_takes_the_lost_ones() -> None:
    ask = replace(ASK, prefer=("b", "gone"))
    plan = plan_load(SHAPE, ask, [A, B, C], paces(a=90, b=60, c=10))
    assert held(plan) == ["b", "c"]


def kept(one: PeerResources, first: int = 0, end: int = 12) -> PeerResources:
    return replace(one, kept_layers=(first, end))


@pytest.mark.parametrize(
    ("ms", "holders"),
    [
        (8.6, "cd"),  # a gain of 14 % now: what was enough to bring the files there was more
        (10.2, "cd"),  # nothing is gained, but nothing to speak of is lost either
        (13.0, "ab"),  # worth fetching for
    ],
)
def test_a_model_stays_where_its_files_are_until_another_ring_is_worth_a_fetch(ms: float, holders: str) -> None:
    c, d = kept(peer("c", 7), 0, 6), kept(peer("d", 7), 6, 12)
    plan = plan_load(SHAPE, ASK, [A, B, c, d], paces(a=10, b=10, c=ms, d=ms))
    assert held(plan) == list(holders)


def test_without_measures_too_it_stays_where_its_files_are() -> None:
    c, d = kept(peer("c", 7), 6, 12), kept(peer("d", 7), 0, 6)
    plan = plan_load(SHAPE, ASK, [A, B, c, d])
    assert held(plan) == ["d", "c"]
    assert why(plan)["a"] == (
        "not_needed",
        "not needed: the ring has 2 stages, and d keeps more of the files of stage 0",
    )


def test_files_hold_no_model_where_conversations_would_be_shorter() -> None:
    least = plan_load(SHAPE, replace(ASK, in_flight=1), [A, B]).stages[0].price.need(4096) / GIB
    tight = [kept(peer(name, least + 0.01)) for name in "cd"]
    assert held(plan_load(SHAPE, ASK, [A, B, *tight])) == ["a", "b"]


def test_a_move_to_who_keeps_the_files_needs_no_gain_of_fifteen_percent() -> None:
    measured = paces(a=10, b=11, c=9.5)
    assert sorted(held(plan_load(SHAPE, ASK, [kept(A), kept(B), kept(C)], measured))) == ["a", "c"]
    assert held(plan_load(SHAPE, ASK, [kept(A), kept(B), C], measured)) == ["a", "b"]


def test_stages_do_not_change_places_for_a_little() -> None:
    """The faster one would better have the last stage, with the head; but each would fetch the other's half."""
    a, b = kept(A, 0, 6), kept(B, 6, 12)
    measured = paces(a=10, b=12)
    assert held(plan_load(replace(SHAPE, head_params=100_000_000), ASK, [a, b], measured)) == ["a", "b"]


def test_a_larger_peer_without_a_stage_hears_what_decided() -> None:
    larger = peer("c", 9)
    plan = plan_load(SHAPE, ASK, [kept(A), kept(B), kept(larger)], paces(a=10, b=10, c=10.9))
    assert why(plan)["c"] == (
        "not_needed",
        "not needed: the ring has 2 stages, and no ring that was tried with it is 15% and 3 ms faster",
    )
    plan = plan_load(SHAPE, replace(ASK, prefer=("a", "b")), [A, B, larger])
    assert why(plan)["c"] == ("not_needed", "not needed: the ring has 2 stages, and a held stage 0 before")


def test_a_far_peer_is_avoided_and_the_plan_says_how_far_it_is() -> None:
    measured = Measured(links={(B.node, NodeId("home")): LinkSeen(80.0), (A.node, NodeId("home")): LinkSeen(2.0)})
    measured = replace(measured, links={**measured.links, (C.node, NodeId("home")): LinkSeen(2.0)})
    plan = plan_load(SHAPE, ASK, [A, B, C], measured)
    assert held(plan) == ["a", "c"]
    assert why(plan) == {"b": ("far", "far: the way to it and on takes 41.0 ms, 2.0 to the peer that holds stage 0")}


def test_a_peer_behind_a_slow_uplink_sends_tokens_not_hidden_states() -> None:
    ways = {(one.node, other.node): LinkSeen(2.0, 100.0) for one in (A, B, C) for other in (A, B, C) if one != other}
    ways[B.node, A.node] = ways[B.node, C.node] = LinkSeen(2.0, 1.0)
    plan = plan_load(SHAPE, FREE, [A, B, C], Measured(links=ways))
    assert held(plan)[-1] == "b"
    two = plan_load(SHAPE, ASK, [B, A], Measured(links=ways))
    assert held(two) == ["a", "b"]


def test_the_order_follows_the_ways() -> None:
    """Every way costs 50 ms, but those of one ring."""
    near = {("a", "c"), ("c", "b"), ("b", "a")}
    ways = {(NodeId(i), NodeId(j)): LinkSeen(1.0 if (i, j) in near else 50.0) for i in "abc" for j in "abc" if i != j}
    assert held(plan_load(SHAPE, FREE, [A, B, C], Measured(links=ways))) in (
        ["a", "c", "b"],
        ["c", "b", "a"],
        ["b", "a", "c"],
    )


def test_an_uneven_cut_gives_a_slow_peer_less() -> None:
    even = plan_load(SHAPE, FREE, [A, B, C], paces(a=20, b=20, c=20))
    uneven = plan_load(SHAPE, FREE, [A, B, C], paces(a=20, b=20, c=80))
    sizes = [{s.peer.name: s.end_layer - s.first_layer for s in plan.stages} for plan in (even, uneven)]
    assert sizes[0] == {"a": 4, "b": 4, "c": 4}
    assert sizes[1]["c"] == 1
    assert uneven.pace is not None
    assert uneven.pace.bottleneck_ms < 12.0, "four layers of twelve would take it 30"


@pytest.mark.parametrize(
    ("shape", "ask"),
    [(SHAPE, ASK), (replace(SHAPE, recorded_stages=3, recorded_boundaries=None, shard_boundaries=(2, 9)), FREE)],
    ids=["recorded", "no split"],
)
def test_a_recorded_split_is_not_changed(shape: ModelShape, ask: PlanRequest) -> None:
    measured = paces(a=10, b=300, c=300)
    peers = [A, B, C][: shape.recorded_stages]
    assert cut(plan_load(shape, ask, peers, measured)) == cut(plan_load(shape, ask, peers))


def test_an_uneven_cut_that_does_not_fit_is_not_taken() -> None:
    """The fast peer would get most layers, but has memory for its even share only."""
    small = peer("a", 1.6)
    measured = paces(a=10, b=300, c=300)
    assert cut(plan_load(SHAPE, FREE, [small, B, C], measured)) == cut(plan_load(SHAPE, FREE, [small, B, C]))
    assert cut(plan_load(SHAPE, FREE, [A, B, C], measured)) != cut(plan_load(SHAPE, FREE, [A, B, C]))


def test_a_faster_peer_that_would_shorten_conversations_is_not_taken() -> None:
    ask = replace(ASK, in_flight=1)
    least = plan_load(SHAPE, ask, [A, B]).stages[0].price.need(4096) / GIB
    roomy, tight = peer("c", least + 1), peer("c", least + 0.01)
    measured = paces(a=10, b=90, c=10)
    assert held(plan_load(SHAPE, ask, [A, B, roomy], measured)) == ["a", "c"]
    plan = plan_load(SHAPE, ask, [A, B, tight], measured)
    assert (held(plan), plan.context_tokens) == (["a", "b"], 8192)
    assert why(plan)["c"][0] == "memory"


def test_every_peer_without_a_stage_has_a_reason() -> None:
    old = PeerResources(NodeId("old"), "old", 8 * GIB, None, frozenset({"serve-n-stage"}))
    bare = PeerResources(NodeId("bare"), "bare", 7 * GIB, None, RING_CAPABILITIES)
    others = [peer("small", 0.25), peer("used", 32, busy_with="qwen"), bare]
    ask = replace(ASK, quantization="int8")
    plan = plan_load(SHAPE, ask, [A, B, C, *others], paces(a=10, b=10, c=80))
    assert held(plan) == ["a", "b"]
    assert [(left.name, left.reason) for left in plan.left_out] == [
        ("c", "slower"), ("small", "memory"), ("bare", "unable"), ("used", "unable"),
    ]  # fmt: skip
    whys = why(plan)
    assert whys["used"][1] == "busy: it serves qwen"
    assert whys["bare"][1] == "it lacks serve-int8 for int8 weights (its device is a card)"
    assert whys["small"][1].startswith("too little memory: it offers 256 MiB, a stage needs ")
    dialect = plan_load(SHAPE, ASK, [A, peer("b", 9), replace(old, memory_bytes=GIB)])
    assert why(dialect)["old"][1] == "it lacks serve-concurrent, serve-kv-budget"


def test_a_refusal_says_why_larger_peers_do_not_help() -> None:
    small = [peer("a", 0.5), peer("b", 0.5)]
    bare = PeerResources(NodeId("bare"), "bare", 9 * GIB, None, RING_CAPABILITIES)
    with pytest.raises(LoadRefused) as refused:
        plan_load(SHAPE, replace(ASK, quantization="int8"), [*small, peer("used", 32, "qwen"), bare])
    assert str(refused.value).endswith(
        ". Left out: used (busy: it serves qwen), bare (it lacks serve-int8 for int8 weights (its device is a card))"
    )
    with pytest.raises(LoadRefused) as refused:
        plan_load(SHAPE, ASK, small)
    assert str(refused.value).endswith("or raise --memory")


@settings(deadline=None, max_examples=150)
@given(
    memory=st.lists(st.floats(0.3, 6), min_size=5, max_size=5),
    ms=st.lists(st.one_of(st.none(), st.floats(0.5, 500)), min_size=5, max_size=5),
    trips=st.lists(st.one_of(st.none(), st.floats(0, 300)), min_size=25, max_size=25),
    stages=st.integers(1, 4),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_never_slower_than_by_memory_and_never_more_than_there_is(
    memory: list[float], ms: list[float | None], trips: list[float | None], stages: int, dtype: str
) -> None:
    peers = [peer(str(number), gib) for number, gib in enumerate(memory)]
    known = {p.node: pace for p, pace in zip(peers, ms, strict=True) if pace is not None}
    ways = {
        (a.node, b.node): LinkSeen(trip)
        for i, a in enumerate(peers)
        for j, b in enumerate(peers)
        if (trip := trips[5 * i + j]) is not None and a != b
    }
    measured = Measured(known, 20.0, ways)
    ask = replace(ASK, num_stages=stages, dtype=dtype)
    try:
        by_memory = plan_load(SHAPE, ask, peers)
    except LoadRefused:
        with pytest.raises(LoadRefused):
            plan_load(SHAPE, ask, peers, measured)
        return
    plan = plan_load(SHAPE, ask, peers, measured)

    def cost_ms(one: Plan) -> float:
        work = [stage.price.step_gib(is_last=stage.end_layer == 12) for stage in one.stages]
        row_bytes = SHAPE.hidden_size * (4 if dtype == "float32" else 2)
        return predict([stage.peer.node for stage in one.stages], work, row_bytes, measured).cost_ms

    assert cost_ms(plan) <= cost_ms(by_memory)
    assert held(plan) == held(by_memory) or cost_ms(plan) <= cost_ms(by_memory) - WORTH_MS
    assert (plan.context_tokens, plan.max_in_flight) >= (by_memory.context_tokens, by_memory.max_in_flight)
    for stage in plan.stages:
        assert (stage.price.fixed + plan.kv_tokens * stage.kv_token_bytes) * HEADROOM <= stage.peer.memory_bytes + 1
    assert [layer for s in plan.stages for layer in range(s.first_layer, s.end_layer)] == list(range(12))
    assert {left.name for left in plan.left_out} == {p.name for p in peers} - set(held(plan))
