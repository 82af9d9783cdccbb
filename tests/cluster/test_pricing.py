"""L5: what a stage takes, part by part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarmnode.cluster.pricing import (
    BITSANDBYTES_BYTES,
    HEADROOM,
    KERNELS_BYTES,
    WORKER_BYTES,
    ModelShape,
    StageBytes,
    price_stage,
)
from swarmnode.cluster.quantization import INT4_CARD, METHODS

SHAPE = ModelShape(
    layer_params=(1_000_000, 2_000_000, 3_000_000, 4_000_000),
    embed_params=500_000,
    head_params=501_000,
    kv_values_per_token_layer=64,
    context_tokens=4096,
    recorded_stages=2,
    recorded_boundaries=(2,),
    hidden_size=1000,
    vocab_size=500,
)


def price(shape: ModelShape = SHAPE, first: int = 0, end: int = 4, method: str = "none", flying: int = 8) -> StageBytes:
    return price_stage(shape, first, end, "bfloat16", method, flying)


def test_embeddings_and_head_are_priced_where_they_live() -> None:
    first, middle, last = price(end=1), price(first=1, end=3), price(first=3)
    assert (first.embed, middle.embed, last.embed) == (1_000_000, 0, 0)
    assert (first.head, middle.head, last.head) == (0, 0, 1_002_000)
    assert [part.layers for part in (first, middle, last)] == [2_000_000, 10_000_000, 8_000_000]


@pytest.mark.parametrize(("method", "head"), [("none", 2_000), ("nf4", 2_000), ("int8", 526_050)])
def test_a_tied_head_is_held_once_by_a_stage_with_both_unless_it_is_packed(method: str, head: int) -> None:
    tied = replace(SHAPE, tied=True)
    assert price(tied, method=method).head == head
    assert price(tied, first=2, method=method).head == price(first=2, method=method).head


def test_layers_with_a_recurrent_state_take_a_state_per_session_and_no_kv() -> None:
    hybrid = replace(SHAPE, recurrent_layers=frozenset({0, 1, 2}), state_values_per_layer=1000)
    assert price(hybrid).kv_token == 64 * 2
    assert price(hybrid).states == 3 * 1000 * 4 * 2 * 8
    assert (price(hybrid, first=3).states, price(hybrid, first=3).kv_token) == (0, 64 * 2)


def test_workspace_is_a_piece_with_its_logits_or_the_largest_block_while_it_is_quantized() -> None:
    piece = 256 * 16 * 1000 * 2
    assert price(end=2).workspace == piece
    assert price().workspace == piece + 8 * 500 * 4
    assert price(replace(SHAPE, layer_params=(9_000_000,) * 4), method="nf4").workspace == 18_000_000


def test_a_worker_holds_what_quantizes_or_multiplies_for_it_too() -> None:
    beside = {method: price(method=method).worker - WORKER_BYTES for method in (*METHODS, INT4_CARD)}
    assert beside == {
        "none": KERNELS_BYTES,
        "nf4": BITSANDBYTES_BYTES,
        "bnb-int8": BITSANDBYTES_BYTES,
        "int8": KERNELS_BYTES,
        "int4-fast": KERNELS_BYTES,
        INT4_CARD: 0,
    }


def test_on_a_card_four_bits_are_priced_as_padded_and_the_head_as_it_stays() -> None:
    wide, narrow = replace(SHAPE, hidden_size=2048), replace(SHAPE, hidden_size=576)
    assert price(wide, method=INT4_CARD).layers == pytest.approx(10_000_000 * 0.65, abs=1)
    assert price(narrow, method=INT4_CARD).layers == pytest.approx(10_000_000 * 0.65 * 1024 / 576, abs=1)
    tied = replace(wide, tied=True)
    assert price(tied, method=INT4_CARD).head == price(tied).head == 2_000
    adapted = replace(wide, adapter_params=(1000,) * 4)
    assert price(adapted, method=INT4_CARD).layers == price(wide, method=INT4_CARD).layers
    assert price(wide, method=INT4_CARD).workspace == price(wide, method="nf4").workspace


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_is_priced_where_it_is_kept_beside_the_weights(dora: bool) -> None:
    adapted = replace(SHAPE, adapter_params=(1000,) * 4, dora=dora)
    more = {method for method in METHODS if price(adapted, method=method).layers > price(method=method).layers}
    assert more == ({"nf4"} if dora else {"nf4", "bnb-int8", "int8"})
    assert price(adapted, first=1, method="nf4").layers == price(first=1, method="nf4").layers + 3 * 1000 * 4


def test_the_need_is_all_of_it_and_a_fifth_more() -> None:
    whole = price()
    parts = whole.embed + whole.layers + whole.head + whole.worker + whole.workspace + 1000 * whole.kv_token
    assert whole.need(1000) == pytest.approx(HEADROOM * parts)


def test_a_scripted_model_takes_none_of_it() -> None:
    assert price(replace(SHAPE, weightless=True)).need(0) == 0
