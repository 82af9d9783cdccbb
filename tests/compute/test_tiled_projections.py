"""Kernels compiled at load: the product of what was packed, as exact as bfloat16, row by row, on any threads."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from packed_kernels import NEEDS_COMPILED

from swarmnode.catalog.safetensors_header import TensorEntry
from swarmnode.compute import cpu_kernels as kernels_module
from swarmnode.compute import tensor_reader, tiled_projections
from swarmnode.compute.cpu_kernels import MAX_INPUTS, MAX_ROWS, CpuKernels, cpu_kernels
from swarmnode.compute.projections import GROUP, Int4Projection, Int8Projection, PackedProjection
from swarmnode.compute.stored_tensors import Stored
from swarmnode.compute.tensor_reader import StoredMatrix, TensorReader
from swarmnode.compute.tiled_projections import TiledInt4Projection, TiledInt8Projection, packed

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [NEEDS_COMPILED, pytest.mark.usefixtures("compiled_kernels")]

SHAPES = [(128, 32), (192, 576), (256, 96), (4, 64), (132, 4160)]
"""One group; groups that are no multiple of eight; a single tile; many groups."""
METHODS = ("int8", "int4-fast")
WIDEST = MAX_INPUTS["int8"]
OF_TORCH: dict[str, type[PackedProjection]] = {"int8": Int8Projection, "int4-fast": Int4Projection}


def weights(out: int, inputs: int) -> torch.Tensor:
    return (torch.randn(out, inputs) * torch.rand(out, 1)).to(torch.bfloat16)


def off(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference of a row, as a share of the row's own size."""
    return float(((found.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


def forget_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made anew by whoever asks."""
    monkeypatch.undo()
    monkeypatch.setattr(kernels_module, "_kernels_for", kernels_module._kernels_for.__wrapped__)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("out", "inputs"), SHAPES)
def test_every_row_count_gives_the_product_with_the_unpacked_weight(method: str, out: int, inputs: int) -> None:
    """Only the result's own rounding to bfloat16 is left: 2^-9 of each number at most."""
    projection = packed(method, weights(out, inputs), None)
    assert isinstance(projection, TiledInt8Projection | TiledInt4Projection)
    exact = projection.unpack(0, out).double()
    for count in range(1, 2 * MAX_ROWS + 2):
        rows = torch.randn(count, inputs).to(torch.bfloat16)
        rows[:, inputs // 2] *= 300  # one value that the others' codes have to share their scale with
        found = projection.multiply(rows)
        assert found.dtype == torch.bfloat16
        assert off(found, rows.double() @ exact.T) < 2.0**-8


@pytest.mark.parametrize("method", METHODS)
def test_one_value_far_above_the_others_leaves_them_as_exact_as_bfloat16(method: str) -> None:
    """As in larger models: few activations are thousands of times the others, and their weights are small."""
    weight = torch.randn(512, 2048) * 0.02
    weight[:, 7] *= 0.001
    projection = packed(method, weight.to(torch.bfloat16), None)
    row = torch.randn(1, 2048)
    row[0, 7] = 2000
    row = row.to(torch.bfloat16)
    exact = row.double() @ projection.unpack(0, 512).double().T
    rounding = (exact.to(torch.bfloat16).double() - exact).norm()
    assert (projection.multiply(row).double() - exact).norm() < 2 * rounding


@pytest.mark.parametrize("method", METHODS)
def test_what_is_packed_is_what_torchs_kernels_would_multiply_by(method: str) -> None:
    weight = weights(384, 576)
    assert torch.equal(packed(method, weight, None).unpack(128, 384), OF_TORCH[method](weight, None).unpack(128, 384))


@pytest.mark.parametrize("method", METHODS)
def test_a_row_does_not_depend_on_the_others_nor_on_threads(method: str) -> None:
    """A session's tokens are the same alone and in any group."""
    projection = packed(method, weights(1032, 96), None)
    rows = torch.randn(MAX_ROWS, 96).to(torch.bfloat16) * torch.tensor([10.0**n for n in range(-4, 4)])[:, None]
    alone = torch.cat([projection.multiply(row[None]) for row in rows.to(torch.bfloat16)])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for count in range(1, MAX_ROWS + 1):
            assert torch.equal(projection.multiply(rows[:count].to(torch.bfloat16)), alone[:count])


@pytest.mark.parametrize("method", METHODS)
def test_rows_of_zeros_tiny_and_broken_numbers(method: str) -> None:
    projection = packed(method, weights(64, 64), None)
    rows = torch.zeros(4, 64, dtype=torch.bfloat16)
    rows[1] = 1e-35
    rows[2, 5] = float("nan")
    rows[3, 5] = float("inf")
    found = projection.multiply(rows)
    assert not found[0].any()
    assert found[1].abs().max() < 1e-30
    assert not found[2:].isfinite().any()


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(torch.ones(1, 32, dtype=torch.bfloat16), id="too short"),
        pytest.param(torch.ones(1, 96, dtype=torch.bfloat16), id="too long"),
        pytest.param(torch.ones(1, 64), id="float32"),
        pytest.param(torch.ones(1, 64, dtype=torch.bfloat16, device="meta"), id="elsewhere"),
    ],
)
@pytest.mark.parametrize("method", METHODS)
def test_rows_that_the_code_would_misread_are_refused(method: str, rows: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"takes 64 in bfloat16 on the CPU"):
        packed(method, weights(64, 64), None).multiply(rows)


@pytest.mark.parametrize(
    ("kind", "weight", "beside"),
    [
        pytest.param("int8", torch.zeros(2, 2, 4, 32), torch.zeros(2, 4).bfloat16(), id="dtype"),
        pytest.param("int8", torch.zeros(2, 2, 4, 32).char(), torch.zeros(1, 4).bfloat16(), id="scales for one tile"),
        pytest.param("int8", torch.zeros(2, 4, 2, 32).char().transpose(1, 2), torch.zeros(2, 4).bfloat16(), id="view"),
        pytest.param("int4", torch.zeros(2, 2, 71).byte(), torch.zeros(2, 4, 8).bfloat16(), id="record"),
        pytest.param("int4", torch.zeros(2, 2, 72).byte(), torch.zeros(2, 4, 2).bfloat16(), id="zeros not filled up"),
    ],
)
def test_weights_that_lie_otherwise_are_refused(kind: str, weight: torch.Tensor, beside: torch.Tensor) -> None:
    kernels = cpu_kernels(torch.bfloat16)
    assert kernels is not None
    with pytest.raises(ValueError, match=f"{kind} weights as .*: the kernel reads "):
        kernels.product(kind, weight, beside)


def test_a_product_holds_the_code_and_the_memory_that_it_reads_by_address() -> None:
    kernels = CpuKernels(lambda _text: lambda _name: 1, torch.bfloat16)
    kernels.add("int8")
    weight, scales = torch.zeros(2, 2, 4, 32).char(), torch.zeros(2, 4).bfloat16()
    product = kernels.product("int8", weight, scales)
    held = [weakref.ref(each) for each in (kernels, weight, scales)]
    del kernels, weight, scales
    gc.collect()
    assert all(each() is not None for each in held)
    del product
    gc.collect()
    assert all(each() is None for each in held)


def test_more_inputs_than_a_threads_stack_has_room_for_are_torchs() -> None:
    assert isinstance(packed("int8", weights(4, WIDEST), None), TiledInt8Projection)
    assert isinstance(packed("int8", weights(4, WIDEST + GROUP), None), Int8Projection)
    kernels, groups = cpu_kernels(torch.bfloat16, "int8"), WIDEST // GROUP + 1
    assert kernels is not None
    with pytest.raises(ValueError, match="65,568 inputs: the kernel's stack has room for 65,536"):
        kernels.product("int8", torch.zeros(1, groups, 4, 32).char(), torch.zeros(1, 4).bfloat16())


@pytest.mark.parametrize("method", METHODS)
def test_the_widest_rows_fit_on_a_small_threads_stack(method: str) -> None:
    projection = packed(method, weights(4, WIDEST), None)
    rows = torch.randn(MAX_ROWS, WIDEST).to(torch.bfloat16)
    found: list[torch.Tensor] = []
    before = threading.stack_size(2 << 20)
    try:
        thread = threading.Thread(target=lambda: found.append(projection.multiply(rows)))
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join(60)
    assert off(found[0], rows.double() @ projection.unpack(0, 4).double().T) < 2.0**-8


def test_rows_that_are_a_view_and_a_bias() -> None:
    weight, bias = weights(64, 64), torch.randn(64).to(torch.bfloat16)
    projection = packed("int8", weight, bias)
    rows = torch.randn(3, 2, 128).to(torch.bfloat16)[..., ::2]
    exact = rows.double() @ projection.unpack(0, 64).double().T + bias.double()
    found = projection(rows)
    assert found.shape == (3, 2, 64)
    assert off(found, exact) < 2.0**-7


def test_shapes_that_are_no_whole_tiles_are_torchs() -> None:
    assert isinstance(packed("int8", weights(130, 64), None), Int8Projection)
    assert isinstance(packed("int4-fast", weights(64, 48), None), Int8Projection)
    assert isinstance(packed("int4-fast", weights(20, 64), None), TiledInt4Projection)


@pytest.mark.parametrize("theirs_wins", [True, False])
def test_the_faster_kernel_for_one_row_is_taken(theirs_wins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed on some of the weight's rows, once for all weights with so many inputs that as many are tried of."""
    monkeypatch.undo()
    timed: list[Any] = []

    def clock(way: Any, rows: torch.Tensor) -> float:
        timed.append(rows.shape)
        of_torch = isinstance(way.__self__, Int4Projection)
        return 1.0 if of_torch == theirs_wins else 2.0

    monkeypatch.setattr(tiled_projections, "_faster", {})
    monkeypatch.setattr(tiled_projections, "timed", clock)
    expected = Int4Projection if theirs_wins else TiledInt4Projection
    assert isinstance(packed("int4-fast", weights(2048, 1024), None), expected)
    counted = len(timed)
    assert isinstance(packed("int4-fast", weights(2176, 1024), None), expected)
    assert set(timed) == {(1, 1024)}
    assert len(timed) == counted
    assert isinstance(packed("int4-fast", weights(512, 1024), None), expected)
    assert len(timed) == 2 * counted, "fewer rows are timed for themselves"


@pytest.mark.parametrize("ours_s", [1.0, 3.0])
def test_how_many_bits_a_weight_has_does_not_hang_on_a_clock(ours_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's kernel takes no 520 rows in four bits; the compiled one does."""
    monkeypatch.undo()
    monkeypatch.setattr(tiled_projections, "_faster", {})
    monkeypatch.setattr(
        tiled_projections, "timed", lambda way, _: 2.0 if isinstance(way.__self__, Int8Projection) else ours_s
    )
    assert isinstance(packed("int4-fast", weights(520, 1024), None), TiledInt4Projection)


def test_a_weight_from_a_file_is_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though some of its rows are read before, to see which kernel is faster: once, not once for each. Whoever watches
    the load never sees it step back."""
    monkeypatch.undo()
    monkeypatch.setattr(tiled_projections, "_faster", {})
    monkeypatch.setattr(tensor_reader, "STAGING_BYTES", 4 << 10)
    monkeypatch.setattr(TensorReader, "_report_sometimes", TensorReader.report)  # after every chunk of that size
    weight = weights(4096, 576)
    file = tmp_path / "weight"
    file.write_bytes(weight.view(torch.int16).numpy().tobytes())
    seen: list[tuple[int, int]] = []
    reader = TensorReader(torch.bfloat16, torch.device("cpu"), lambda _, done, total: seen.append((done, total)))
    reader.total = weight.nbytes
    entry = TensorEntry("BF16", (4096, 576), 0, weight.nbytes)
    reads: list[slice] = []

    class Watched(StoredMatrix):
        def __getitem__(self, rows: slice) -> torch.Tensor:
            reads.append(rows)
            return super().__getitem__(rows)

    projection = packed("int8", Watched(reader, Stored("head", file, entry)), None)
    assert seen[-1] == (weight.nbytes, weight.nbytes)
    assert all(before <= after for (before, _), (after, _) in pairwise(seen))
    assert sum(rows.start is None for rows in reads) == 1
    assert torch.equal(projection.unpack(0, 4096), Int8Projection(weight, None).unpack(0, 4096))


def test_sizes() -> None:
    weight = weights(256, 128)
    assert packed("int8", weight, None).size_bytes() == 256 * 128 + 2 * 256
    zeros = 256 * 8 * 2  # four groups, filled up to eight
    assert packed("int4-fast", weight, None).size_bytes() == 256 * 128 // 2 + 256 * 128 // 32 * 2 + zeros


def test_without_llvmlite_torchs_kernels_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_kernels(monkeypatch)
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    assert cpu_kernels.__wrapped__(torch.bfloat16, "int8") is None


class _NoLibrary:
    """llvmlite where its shared library does not load."""

    def find_spec(self, name: str, *_: object) -> None:
        if name == "llvmlite.binding":
            raise OSError("Could not find/load shared object file")


def test_where_llvmlites_library_does_not_load_torchs_kernels_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forget_kernels(monkeypatch)
    monkeypatch.delitem(sys.modules, "llvmlite.binding")
    monkeypatch.setattr(sys, "meta_path", [_NoLibrary(), *sys.meta_path])
    assert cpu_kernels.__wrapped__(torch.bfloat16, "int8") is None
    assert "none can be compiled here: Could not find/load shared object" in caplog.text


def test_where_no_code_may_be_made_torchs_kernels_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("LLVM ERROR: Unable to allocate section memory")

    forget_kernels(monkeypatch)
    monkeypatch.setattr("llvmlite.binding.create_mcjit_compiler", refuse)
    assert cpu_kernels.__wrapped__(torch.bfloat16, "int8") is None
    assert "none can be compiled here: LLVM ERROR" in caplog.text
