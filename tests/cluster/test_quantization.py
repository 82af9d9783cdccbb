"""What a load may ask for, what it costs, and which peers are asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmnode.cluster.placement import ALL_CAPABILITIES, ModelShape, PeerResources, PlanRequest, plan_load
from swarmnode.cluster.quantization import METHODS, SERVE_INT4_FAST, default_quantization, read_quantization
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
    assert default_quantization({"method": method}) == method


def test_the_alias_of_int4_fast() -> None:
    assert read_quantization({"backend": "torchao"}) == "int4-fast"


@pytest.mark.parametrize("asked", [None, "int8", {}, {"bits": 2}, {"method": "int8", "bits": 4}, {"method": ["int8"]}])
def test_the_rest_is_refused_with_what_is_allowed(asked: object) -> None:
    with pytest.raises(LoadRefused, match=r'allowed are \{"method": "none"\}, \{"method": "int8"\}'):
        read_quantization(asked)


def test_a_servable_trained_with_what_is_not_served_is_served_in_full_precision() -> None:
    assert default_quantization(None) == "none"
    assert default_quantization({"method": "gptq"}) == "none"


@pytest.mark.parametrize(("method", "layer_bytes"), [("int8", 1.05), ("int4-fast", 0.55)])
def test_layers_and_head_are_priced_by_the_method_embeddings_by_the_dtype(method: str, layer_bytes: float) -> None:
    first, last = plan_load(SHAPE, replace(ASK, quantization=method), PEERS).stages
    assert first.weight_bytes == pytest.approx(20e6 * layer_bytes + 3e6 * 2, abs=2)
    assert last.weight_bytes == pytest.approx(20e6 * layer_bytes + 2e6 * 1.05, abs=2)
    plain = plan_load(SHAPE, ASK, PEERS).stages
    assert [stage.weight_bytes for stage in plain] == [46_000_000, 44_000_000]


def test_a_peer_without_the_kernels_is_named() -> None:
    lacking = replace(PEERS[1], capabilities=ALL_CAPABILITIES - {SERVE_INT4_FAST})
    with pytest.raises(LoadRefused, match=r"peer bert cannot hold int4-fast weights: .*serve-int4-fast") as refusal:
        plan_load(SHAPE, replace(ASK, quantization="int4-fast"), [PEERS[0], lacking])
    assert refusal.value.param == "quantization"
    assert plan_load(SHAPE, replace(ASK, quantization="int8"), [PEERS[0], lacking]).stages


def test_a_model_that_only_fits_packed() -> None:
    small = [replace(peer, memory_bytes=500 << 20) for peer in PEERS]
    large = replace(SHAPE, layer_params=(30_000_000,) * 4)
    with pytest.raises(LoadRefused, match="of bfloat16 weights"):
        plan_load(large, ASK, small)
    assert plan_load(large, replace(ASK, quantization="int4-fast"), small).stages
    with pytest.raises(LoadRefused, match="of int8 weights"):
        plan_load(replace(SHAPE, layer_params=(90_000_000,) * 4), replace(ASK, quantization="int8"), small)
