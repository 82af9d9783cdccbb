"""What a load may ask for, what it costs, and which peers are asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmnode.cluster.placement import (
    ALL_CAPABILITIES,
    LacksKernels,
    PeerResources,
    PlanRequest,
    plan_load,
)
from swarmnode.cluster.pricing import ModelShape
from swarmnode.cluster.quantization import (
    METHODS,
    SERVE_INT4_FAST,
    SERVE_QUANTIZED,
    default_quantization,
    degraded,
    read_quantization,
)
from swarmnode.errors import LoadRefused
from swarmnode.ids import NodeId

SHAPE = ModelShape(
    layer_params=(10_000_000,) * 4,
    embed_params=3_000_000,
    head_params=2_000_000,
    kv_values_per_token_layer=64,
    context_tokens=4096,
    recorded_stages=2,
    recorded_boundaries=(2,),
)
PEERS = [PeerResources(NodeId(name), name, 2 << 30) for name in ("anna", "bert")]
ASK = PlanRequest(num_stages=2, peers=(), dtype="bfloat16")


@pytest.mark.parametrize("method", METHODS)
def test_methods_are_read(method: str) -> None:
    assert read_quantization({"method": method}) == method
    assert default_quantization({"method": method}) == (method, "")


@pytest.mark.parametrize(
    ("asked", "method"), [({"backend": "torchao"}, "int4-fast"), ({"bits": 4}, "nf4"), ({"bits": 8}, "bnb-int8")]
)
def test_other_ways_to_say_it(asked: dict[str, str | int], method: str) -> None:
    assert read_quantization(asked) == method
    assert default_quantization(asked) == (method, "")


REFUSED: list[object] = [
    None, "int8", {}, {"bits": 2}, {"bits": True}, {"bits": "8"}, {"method": "int8", "bits": 4}, {"method": ["int8"]},
    {"backend": "nf4"}, {1: 2},
]  # fmt: skip


@pytest.mark.parametrize("asked", REFUSED, ids=str)
def test_the_rest_is_refused_with_what_is_allowed(asked: object) -> None:
    with pytest.raises(LoadRefused, match=r'allowed are \{"method": "none"\}, \{"method": "nf4"\}'):
        read_quantization(asked)


def test_a_servable_that_records_nothing_is_served_in_full_precision() -> None:
    assert default_quantization(None) == ("none", "")


@pytest.mark.parametrize(
    ("record", "method"),
    [
        ({"method": "nf4", "bits": 4}, "nf4"),
        ({"method": "nf4", "compute_dtype": "bfloat16"}, "nf4"),
        ({"bits": 4, "double_quant": False}, "nf4"),
        ({"bits": 4, "quant_type": "nf4"}, "nf4"),
        ({"bits": 8, "threshold": 6}, "bnb-int8"),
        ({"method": "int8", "bits": 8}, "int8"),
        ({"bits": 4, "backend": "torchao"}, "int4-fast"),
    ],
    ids=str,
)
def test_a_record_may_say_more_than_the_method(record: dict[str, str | int], method: str) -> None:
    assert default_quantization(record) == (method, "")


@pytest.mark.parametrize(
    "record",
    [
        {"method": "gptq"},
        {"method": "gptq", "bits": 4},
        {"bits": 4, "quant_type": "fp4"},
        {"method": "nf4", "bits": 8},
        {"method": "none", "bits": 4},
        {"double_quant": True},
        {"bits": True},
    ],
    ids=str,
)
def test_a_record_that_is_not_served_is_named(record: dict[str, str | int]) -> None:
    method, why = default_quantization(record)
    assert method == "none"
    assert str(record) in why


@pytest.mark.parametrize(
    ("method", "layer_bytes", "head_bytes"),
    [("int8", 1.05, 1.05), ("int4-fast", 0.65, 1.05), ("nf4", 0.6, 2), ("bnb-int8", 1.05, 2)],
)
def test_layers_and_head_are_priced_by_the_method_embeddings_by_the_dtype(
    method: str, layer_bytes: float, head_bytes: float
) -> None:
    first, last = plan_load(SHAPE, replace(ASK, quantization=method), PEERS).stages
    assert first.weight_bytes == pytest.approx(20e6 * layer_bytes + 3e6 * 2, abs=2)
    assert last.weight_bytes == pytest.approx(20e6 * layer_bytes + 2e6 * head_bytes, abs=2)
    plain = plan_load(SHAPE, ASK, PEERS).stages
    assert [stage.weight_bytes for stage in plain] == [46_000_000, 44_000_000]


@pytest.mark.parametrize("method", METHODS)
def test_what_serves_in_a_methods_place_ends_in_full_precision(method: str) -> None:
    chain = (method, *degraded(method))
    assert chain[-1] == "none"
    assert len(set(chain)) == len(chain)


def test_peers_without_the_kernels_are_named() -> None:
    lacking = [replace(peer, capabilities=ALL_CAPABILITIES - {SERVE_INT4_FAST}) for peer in PEERS]
    with pytest.raises(LacksKernels, match=r"peer bert cannot hold int4-fast weights: serve-int4-fast") as refusal:
        plan_load(SHAPE, replace(ASK, quantization="int4-fast"), [PEERS[0], lacking[1]])
    assert refusal.value.param == "quantization"
    with pytest.raises(LacksKernels, match="peers anna, bert cannot hold"):
        plan_load(SHAPE, replace(ASK, quantization="int4-fast"), lacking)
    assert plan_load(SHAPE, replace(ASK, quantization="int8"), lacking).stages


def test_peers_with_the_kernels_are_chosen_before_larger_ones() -> None:
    large = PeerResources(NodeId("carl"), "carl", 16 << 30, capabilities=ALL_CAPABILITIES - {SERVE_QUANTIZED})
    names = {
        method: [s.peer.name for s in plan_load(SHAPE, replace(ASK, quantization=method), [large, *PEERS]).stages]
        for method in ("none", "nf4")
    }
    assert names == {"none": ["carl", "anna"], "nf4": ["anna", "bert"]}


def test_a_model_that_only_fits_packed() -> None:
    small = [replace(peer, memory_bytes=700 << 20) for peer in PEERS]
    large = replace(SHAPE, layer_params=(60_000_000,) * 4)
    with pytest.raises(LoadRefused, match="of bfloat16 weights"):
        plan_load(large, ASK, small)
    assert plan_load(large, replace(ASK, quantization="int4-fast"), small).stages
    with pytest.raises(LoadRefused, match="of int8 weights"):
        plan_load(replace(SHAPE, layer_params=(90_000_000,) * 4), replace(ASK, quantization="int8"), small)
