"""Rows padded with zeros: which, by what was measured, and that no bit of a row's product changes for it."""

from __future__ import annotations

import pytest
import torch

from swarmnode.compute import row_padding
from swarmnode.compute.projections import DenseProjection, Int8Projection
from swarmnode.compute.row_padding import ROWS, measured, pad_few_rows, padding_of

PADDING = {2: 4, 3: 4, 5: 8, 6: 8, 7: 8}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


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
    assert padding_of(costs) == padding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_padded_rows_get_exactly_what_they_get_in_a_full_group(dtype: torch.dtype, bias: bool) -> None:
    """Rows of zeros beside them change nothing, and neither do rows of other sessions."""
    weight = torch.randn(576, 512).to(dtype)
    projection = DenseProjection(weight, torch.randn(576).to(dtype) if bias else None)
    group = torch.randn(8, 1, 512).to(dtype)
    plain = {rows: projection(group[:rows]) for rows in range(1, 9)}
    projection.pad_rows(PADDING)
    for rows, size in PADDING.items():
        found = projection(group[:rows])
        assert found.shape == (rows, 1, 576)
        assert torch.equal(found, plain[size][:rows])
        assert torch.allclose(found, plain[rows], rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-3)
        piece = projection(group[:rows].transpose(0, 1))
        assert torch.equal(piece, found.transpose(0, 1))
    for rows in (1, 4, 8):
        assert torch.equal(projection(group[:rows]), plain[rows])


def test_every_row_count_but_one_is_measured_in_turn() -> None:
    seen: list[int] = []
    costs = measured(seen.append)
    assert set(costs) == set(ROWS)
    assert seen == [1, *ROWS * 3]


def test_all_projections_of_a_shape_are_padded_alike_small_and_packed_ones_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_padding, "measured", lambda _: {2: 2.0, 3: 3.0, 4: 1.0})
    large = [DenseProjection(torch.randn(1024, 512), None) for _ in range(2)]
    small = DenseProjection(torch.randn(64, 64), None)
    multiplied: list[int] = []

    def direct(self: DenseProjection, rows: torch.Tensor) -> torch.Tensor:
        multiplied.append(rows.shape[0])
        return rows @ self.weight.T

    monkeypatch.setattr(DenseProjection, "_direct", direct)
    pad_few_rows([*large, small, Int8Projection(torch.randn(128, 64), None)])
    for projection in (*large, small):
        projection(torch.randn(3, projection.weight.shape[1]))
    assert multiplied == [4, 4, 3]
