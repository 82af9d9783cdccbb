"""Few rows in their fastest way: which, by what was measured, and what a row's product is then."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from packed_kernels import NEEDS_COMPILED

from swarmnode.compute import few_rows
from swarmnode.compute.compiled_dense import CompiledDense, dense
from swarmnode.compute.few_rows import WAYS, best_ways, hasten_few_rows, measured
from swarmnode.compute.projections import DenseProjection, Int8Projection, Way

if TYPE_CHECKING:
    from collections.abc import Callable

PADDING = {2: 4, 3: 4, 5: 8, 6: 8, 7: 8}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def plain(rows: int) -> Way:
    return Way(rows, turned=False)


def turned(rows: int) -> Way:
    return Way(rows, turned=True)


@pytest.mark.parametrize(
    ("costs", "padding"),
    [
        pytest.param({2: 24, 3: 32, 4: 16, 5: 17, 8: 19}, {2: 4, 3: 4}, id="a kernel for four"),
        pytest.param({2: 20, 3: 30, 4: 25, 5: 40, 6: 41, 7: 43, 8: 26}, {3: 4, 5: 8, 6: 8, 7: 8}, id="two steps"),
        pytest.param({2: 20, 3: 21, 4: 22, 8: 30}, {}, id="a slope"),
        pytest.param({2: 20, 3: 25, 4: 24, 8: 30}, {}, id="less than the noise"),
        pytest.param({}, {}, id="nothing measured"),
    ],
)
def test_rows_are_padded_to_the_cheapest_larger_count_where_that_pays(
    costs: dict[int, float], padding: dict[int, int]
) -> None:
    found = best_ways({plain(rows): cost for rows, cost in costs.items()})
    assert found == {rows: plain(to) for rows, to in padding.items()}


def test_rows_are_turned_and_padded_to_a_turned_count_where_that_is_cheapest() -> None:
    costs = {plain(1): 12, plain(2): 24, plain(3): 32, plain(4): 16, plain(5): 17, plain(8): 19}
    costs |= {turned(2): 10, turned(3): 13, turned(4): 12, turned(8): 18.9}
    assert best_ways(costs) == {1: turned(2), 2: turned(2), 3: turned(4), 4: turned(4)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_padded_rows_get_exactly_what_they_get_in_a_full_group(dtype: torch.dtype, bias: bool) -> None:
    """Rows of zeros beside them change nothing, and neither do rows of other sessions."""
    projection, group = some_projection(dtype, bias)
    before = {rows: projection(group[:rows]) for rows in range(1, 9)}
    projection.take_ways({rows: plain(to) for rows, to in PADDING.items()})
    for rows, size in PADDING.items():
        found = projection(group[:rows])
        assert found.shape == (rows, 1, 576)
        assert torch.equal(found, before[size][:rows])
        assert_close(found, before[rows])
        piece = projection(group[:rows].transpose(0, 1))
        assert torch.equal(piece, found.transpose(0, 1))
    for rows in (1, 4, 8):
        assert torch.equal(projection(group[:rows]), before[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_turned_rows_get_the_same_product_to_rounding(dtype: torch.dtype, bias: bool) -> None:
    projection, group = some_projection(dtype, bias)
    before = {rows: projection(group[:rows]) for rows in (2, 3, 4)}
    projection.take_ways({2: turned(2), 3: turned(4), 4: turned(4)})
    for rows, expected in before.items():
        found = projection(group[:rows])
        assert found.is_contiguous()
        assert_close(found, expected)
        assert_close(projection(group[:rows].transpose(0, 1)), expected.transpose(0, 1))


def some_projection(dtype: torch.dtype, bias: bool) -> tuple[DenseProjection, torch.Tensor]:
    projection = DenseProjection(torch.randn(576, 512).to(dtype), torch.randn(576).to(dtype) if bias else None)
    return projection, torch.randn(8, 1, 512).to(dtype)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """The relative error is that of the products' sums, which cancel: an absolute one for each dtype beside it."""
    coarse = found.dtype == torch.bfloat16
    assert torch.allclose(found, expected, rtol=1e-2 if coarse else 1e-4, atol=0.3 if coarse else 1e-3)


@NEEDS_COMPILED
@pytest.mark.parametrize(
    ("torch_s", "many_rows"),
    [
        pytest.param({}, 64, id="never"),
        pytest.param({16: 1.0, 32: 1.0}, 16, id="for many rows"),
        pytest.param({16: 1.9, 32: 1.0}, 32, id="less than the noise"),
        pytest.param({1: 1.0, 32: 1.0}, 32, id="one row is a step of torch's own"),
        pytest.param({2: 1.0, 4: 1.0, 8: 1.0, 16: 1.0, 32: 1.0}, 2, id="for one row alone"),
        pytest.param(dict.fromkeys((1, 2, 4, 8, 16, 32), 1.0), 1, id="always"),
    ],
)
def test_the_compiled_kernels_serve_until_torchs_are_faster(
    torch_s: dict[int, float], many_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all projections of a shape at once."""
    projections = [dense(torch.randn(1024, 512), None) for _ in range(3)]

    def clock(run: Callable[[bool], object], own: bool) -> float:
        multiplied.clear()
        run(own)
        return 2.0 if own else torch_s.get(multiplied[-1], 3.0)

    multiplied: list[int] = []
    for name in ("few", "many"):
        monkeypatch.setattr(CompiledDense, name, lambda _, rows: multiplied.append(len(rows)))
    monkeypatch.setattr(few_rows, "timed", clock)
    hasten_few_rows(projections)
    assert [each.many_rows for each in projections if isinstance(each, CompiledDense)] == [many_rows] * 3


def test_every_way_is_measured_in_turn() -> None:
    seen: list[Way] = []
    costs = measured(seen.append, WAYS)
    assert set(costs) == set(WAYS)
    assert seen == [*WAYS * 4]


def test_all_projections_of_a_shape_take_the_same_ways_small_and_packed_ones_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(few_rows, "measured", lambda *_: {plain(2): 2.0, plain(3): 3.0, plain(4): 1.0})
    large = [DenseProjection(torch.randn(1024, 512), None) for _ in range(2)]
    small = DenseProjection(torch.randn(64, 64), None)
    multiplied: list[int] = []

    def direct(self: DenseProjection, rows: torch.Tensor) -> torch.Tensor:
        multiplied.append(rows.shape[0])
        return rows @ self.weight.T

    monkeypatch.setattr(DenseProjection, "_direct", direct)
    hasten_few_rows([*large, small, Int8Projection(torch.randn(128, 64), None)])
    for projection in (*large, small):
        projection(torch.randn(3, projection.weight.shape[1]))
    assert multiplied == [4, 4, 3]
