"""Dense products of few rows by compiled kernels: float64's result to rounding, row by row, on any threads."""

from __future__ import annotations

import threading

import pytest
import torch
from packed_kernels import NEEDS_COMPILED

from swarmnode.compute import compiled_dense
from swarmnode.compute.compiled_dense import CompiledDense, dense
from swarmnode.compute.cpu_kernels import MAX_INPUTS, MAX_ROWS, cpu_kernels
from swarmnode.compute.projections import GROUP, DenseProjection

pytestmark = [NEEDS_COMPILED, pytest.mark.usefixtures("compiled_kernels")]

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}
"""Of a row's result, as the norm: only sums in float32 and the result's own rounding are left."""
DTYPES = list(TOLERANCE)
SHAPES = [(128, 32), (192, 576), (256, 96), (4, 64), (132, 4160), (100, 32)]
"""One group; outputs that are no multiple of two or three times so many; a single tile; many groups."""
WIDEST = MAX_INPUTS["dense"]


def compiled(out: int, inputs: int, dtype: torch.dtype, *, bias: bool = False) -> CompiledDense:
    made = dense(torch.randn(out, inputs).to(dtype), torch.randn(out).to(dtype) if bias else None)
    assert isinstance(made, CompiledDense)
    return made


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference of a row, as a share of the row's own size."""
    return float(((found.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "inputs"), SHAPES)
def test_every_row_count_gives_the_product(dtype: torch.dtype, out: int, inputs: int) -> None:
    projection = compiled(out, inputs, dtype, bias=True)
    assert projection._bias is not None
    for count in range(1, 2 * MAX_ROWS + 2):
        rows = torch.randn(count, inputs).to(dtype)
        exact = rows.double() @ projection.weight.double().T + projection._bias.double()
        found = projection(rows)
        assert found.dtype == dtype
        assert off(found, exact) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others_nor_on_threads(dtype: torch.dtype) -> None:
    """A session's tokens are the same alone and in any group."""
    projection = compiled(1036, 96, dtype)
    rows = (torch.randn(MAX_ROWS, 96) * torch.tensor([10.0**n for n in range(-4, 4)])[:, None]).to(dtype)
    alone = torch.cat([projection(row[None]) for row in rows])
    for threads in (1, 2, 3, 700):
        torch.set_num_threads(threads)
        for count in range(1, MAX_ROWS + 1):
            assert torch.equal(projection(rows[:count]), alone[:count])


def test_broken_numbers_stay_in_their_row() -> None:
    rows = torch.randn(3, 64)
    rows[1, 5] = float("nan")
    found = compiled(96, 64, torch.float32)(rows)
    assert found[[0, 2]].isfinite().all()
    assert not found[1].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_a_view_of_more_than_two_axes(dtype: torch.dtype) -> None:
    projection = compiled(64, 64, dtype, bias=True)
    rows = torch.randn(3, 2, 128).to(dtype)[..., ::2]
    found = projection(rows)
    assert found.shape == (3, 2, 64)
    assert torch.equal(found.view(6, 64), projection(rows.reshape(6, 64)))


def test_many_rows_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    projection, seen = compiled(64, 64, torch.float32), list[int]()
    monkeypatch.setattr(DenseProjection, "_direct", lambda self, rows: (seen.append(len(rows)), rows @ self.weight)[1])
    projection.many_rows = 5
    for count in (4, 5, 6):
        projection(torch.randn(count, 64))
    assert seen == [5, 6]


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        pytest.param(torch.randn(130, 64), "no whole tiles", id="outputs"),
        pytest.param(torch.randn(128, 72), "no whole groups", id="inputs"),
        pytest.param(torch.randn(128, 64).half(), "float16", id="dtype"),
        pytest.param(torch.randn(64, 128).T, "turned", id="a view"),
        pytest.param(torch.randn(4, WIDEST + GROUP), "no room on the stack", id="wide"),
        pytest.param(torch.randn(128, 64, device="meta"), "elsewhere", id="device"),
    ],
)
def test_weights_that_the_code_would_misread_are_torchs(weight: torch.Tensor, reason: str) -> None:
    assert type(dense(weight, None)) is DenseProjection, reason
    kernels = cpu_kernels(torch.float32, "dense")
    assert kernels is not None
    with pytest.raises(ValueError, match=r"the kernel reads |the kernel's stack has room"):
        kernels.product("dense", weight)


def test_kernels_for_rows_of_another_dtype_are_refused() -> None:
    with pytest.raises(ValueError, match="no kernel multiplies int8 weights with rows in float32"):
        cpu_kernels(torch.float32, "int8")
    assert cpu_kernels(torch.float16, "dense") is None


def test_without_compiled_kernels_torchs_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_dense, "cpu_kernels", lambda *_: None)
    assert type(dense(torch.randn(128, 64), None)) is DenseProjection


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_widest_rows_fit_on_a_small_threads_stack(dtype: torch.dtype) -> None:
    projection, rows = compiled(4, WIDEST, dtype), torch.randn(MAX_ROWS, WIDEST).to(dtype)
    found: list[torch.Tensor] = []
    before = threading.stack_size(2 << 20)
    try:
        thread = threading.Thread(target=lambda: found.append(projection(rows)))
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join(60)
    assert off(found[0], rows.double() @ projection.weight.double().T) < 4 * TOLERANCE[dtype]


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(torch.ones(1, 32), id="too short"),
        pytest.param(torch.ones(1, 64, dtype=torch.bfloat16), id="bfloat16"),
        pytest.param(torch.ones(1, 64, device="meta"), id="elsewhere"),
    ],
)
def test_rows_that_the_code_would_misread_are_refused(rows: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="takes 64 in float32 on the CPU"):
        compiled(64, 64, torch.float32)(rows)
