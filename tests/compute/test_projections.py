"""Packed weights: what the kernels multiply by is what was quantized, whichever way and however many rows."""

from __future__ import annotations

import pytest
import torch
from packed_kernels import take_kernels

from swarmnode.compute import projections
from swarmnode.compute.projections import (
    GROUP,
    DenseProjection,
    Int4Projection,
    Int8Projection,
    code_block_rows,
    crossover_rows,
    quantize_int4,
    unpack_codes,
)
from swarmnode.compute.tiled_projections import packed


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def weights(out: int = 192, inputs: int = 128) -> torch.Tensor:
    return (torch.randn(out, inputs) * torch.rand(out, 1)).to(torch.bfloat16)


def test_eight_bits_are_within_half_a_step_of_the_weight() -> None:
    weight = weights()
    step = weight.float().abs().amax(1, keepdim=True) / 127
    assert ((Int8Projection(weight, None).unpack(0, 192) - weight.float()).abs() <= 0.52 * step).all()


def test_four_bits_are_within_half_a_step_of_the_weight() -> None:
    weight = weights()
    grouped = weight.float().view(192, -1, GROUP)
    low, high = grouped.aminmax(dim=-1, keepdim=True)
    difference = (Int4Projection(weight, None).unpack(0, 192).view_as(grouped) - grouped).abs()
    # A zero stored in bfloat16 is off by up to 2^-9 of itself.
    assert (difference <= 0.52 * (high - low) / 15 + torch.maximum(low.abs(), high.abs()) / 128).all()


@pytest.mark.parametrize(("out", "inputs"), [(128, 32), (256, 96), (1024, 64)])
def test_the_packed_layout_is_read_back_bit_by_bit(out: int, inputs: int) -> None:
    codes = torch.randint(0, 16, (out, inputs), dtype=torch.int32)
    stored = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
    assert stored.nbytes == out * inputs // 2
    assert torch.equal(unpack_codes(stored, inputs).to(torch.int32), codes)


def test_codes_stand_for_scale_and_zero_of_their_group() -> None:
    weight = torch.linspace(-1, 2, 64)[None].to(torch.bfloat16)
    codes, scales_zeros = quantize_int4(weight)
    assert scales_zeros.shape == (2, 1, 2)
    assert codes[0, [0, 31, 32, 63]].tolist() == [0, 15, 0, 15]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [Int8Projection, Int4Projection])
def test_few_and_many_rows_give_the_product_with_the_unpacked_weight(
    kind: type[Int8Projection | Int4Projection], bias: bool
) -> None:
    weight, added = weights(), torch.randn(192).to(torch.bfloat16) if bias else None
    projection = kind(weight, added)
    projection.measure()
    exact = projection.unpack(0, 192)
    for shape in [(1, 1), (8, 1), (1, 3), (1, 200)]:
        rows = torch.randn(*shape, 128).to(torch.bfloat16)
        expected = rows.float() @ exact.T + (0 if added is None else added.float())
        found = projection(rows)
        assert found.dtype == torch.bfloat16
        assert found.shape == expected.shape
        assert ((found.float() - expected).abs() <= 0.02 * expected.abs().max()).all()


def test_float32_rows_come_back_in_float32() -> None:
    assert Int8Projection(weights(), None)(torch.randn(1, 2, 128)).dtype == torch.float32


def test_a_weight_is_unpacked_in_chunks_to_the_same_product(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, rows = weights(640, 64), torch.randn(40, 64).to(torch.bfloat16)
    projection = Int4Projection(weight, None)
    projection.measure()
    whole = projection(rows)
    monkeypatch.setattr(projections, "_CHUNK_ELEMENTS", 128 * 64)
    assert torch.equal(projection(rows), whole)


def test_shapes_the_four_bit_kernel_does_not_take_get_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    take_kernels("torch", monkeypatch)
    block = code_block_rows()
    assert block is not None
    assert isinstance(packed("int4-fast", weights(2 * block, 64), None), Int4Projection)
    assert isinstance(packed("int4-fast", weights(2 * block, 48), None), Int8Projection)
    assert isinstance(packed("int4-fast", weights(2 * block - 8, 64), None), Int8Projection)
    assert isinstance(packed("int8", weights(), None), Int8Projection)


@pytest.mark.parametrize("method", ["int8", "int4-fast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_itself_stays_as_it_is(method: str, dtype: torch.dtype) -> None:
    """A tied head is packed from the table that the embeddings still read."""
    weight = weights().to(dtype)
    before = weight.clone()
    packed(method, weight, None)
    assert torch.equal(weight, before)


def test_a_large_weight_is_quantized_in_parts_to_the_same_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = weights(512, 64)
    with monkeypatch.context() as in_one:
        in_one.setattr(projections, "QUANTIZED_ROWS", 512)
        whole = Int4Projection(weight, None)
        eight = Int8Projection(weight, None)
    assert torch.equal(Int4Projection(weight, None).unpack(0, 512), whole.unpack(0, 512))
    assert torch.equal(Int8Projection(weight, None).unpack(0, 512), eight.unpack(0, 512))


def test_sizes() -> None:
    weight = weights(256, 128)
    assert Int8Projection(weight, None).size_bytes() == 256 * 128 + 2 * 256
    assert Int4Projection(weight, None).size_bytes() == 256 * 128 // 2 + 256 * 128 // GROUP * 4
    assert DenseProjection(weight, None).size_bytes() == 2 * 256 * 128


def test_the_crossover_is_measured_once_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projections, "_measured", {})
    calls: list[int] = []

    def slow_beyond_4(rows: torch.Tensor) -> torch.Tensor:
        calls.append(rows.shape[0])
        return rows if rows.shape[0] <= 4 else torch.randn(400, 400) @ torch.randn(400, 400)

    def steady(rows: torch.Tensor) -> torch.Tensor:
        return torch.randn(100, 100) @ torch.randn(100, 100)

    shape = (1024, 1024)
    found = crossover_rows(slow_beyond_4, steady, shape, "test")
    assert 2 <= found <= 128
    counted = len(calls)
    assert crossover_rows(slow_beyond_4, steady, shape, "test") == found
    assert len(calls) == counted
    assert crossover_rows(slow_beyond_4, steady, (8, 8), "test") == projections.DEFAULT_ROWS


@pytest.mark.parametrize(
    ("row_s", "fixed_s", "found", "last"),
    [
        pytest.param(1e-4, 0.02, 512, 512, id="between 256 and 512"),
        pytest.param(1e-4, 0.004, 128, 128, id="between 64 and 128"),
        pytest.param(1e-4, 0.03, 1024, 512, id="beyond what pieces have"),
        pytest.param(1e-3, 0.09, 106, 32, id="no time for more"),
    ],
)
def test_the_crossover_is_measured_up_to_the_longest_pieces(
    row_s: float, fixed_s: float, found: int, last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row costs the one way `row_s`, the other half of that beside a cost of its own."""
    monkeypatch.setattr(projections, "_measured", {})
    tried: list[int] = []

    def timed(way: object, rows: torch.Tensor) -> float:
        tried.append(rows.shape[0])
        return row_s * rows.shape[0] if way is few else fixed_s + row_s / 2 * rows.shape[0]

    def few(rows: torch.Tensor) -> torch.Tensor:
        return rows

    def many(rows: torch.Tensor) -> torch.Tensor:
        return rows

    monkeypatch.setattr(projections, "timed", timed)
    assert crossover_rows(few, many, (1024, 1024), "test") == found
    assert max(tried) == last


def test_a_measurement_that_ran_out_of_time_assumes_no_more_than_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpacking a head of 28 million weights takes longer than all the time there is: few rows stay packed."""
    monkeypatch.setattr(projections, "_measured", {})
    monkeypatch.setattr(projections, "_MEASURE_S", 0.0)
    cost_s = {"few": 1.0, "many": 20.0}
    monkeypatch.setattr(projections, "timed", lambda way, rows: cost_s[way.__name__] * rows.shape[0] ** (way is few))

    def few(rows: torch.Tensor) -> torch.Tensor:
        return rows

    def many(rows: torch.Tensor) -> torch.Tensor:
        return rows

    assert crossover_rows(few, many, (1024, 1024), "test") == 20
