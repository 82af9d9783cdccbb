"""Dense products whose few rows go through the kernels that are compiled at load; the others stay torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarmnode.compute.cpu_kernels import MAX_INPUTS, TILE, cpu_kernels
from swarmnode.compute.projections import DEFAULT_ROWS, GROUP, DenseProjection

if TYPE_CHECKING:
    import torch

    from swarmnode.compute.cpu_kernels import Product


class CompiledDense(DenseProjection):
    """As DenseProjection; fewer than `many_rows` rows are multiplied by `product`, in whose memory the weight lies."""

    __slots__ = ("_product", "many_rows")
    kernels = "fastcpu"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, product: Product) -> None:
        super().__init__(weight, bias)
        self._product = product
        self.many_rows = DEFAULT_ROWS
        """From so many on torch's way is faster; `few_rows.py` measures it where the weight is large."""

    @property
    def dtype(self) -> torch.dtype:
        """Of rows and weight."""
        return self._product.dtype

    @property
    def outputs(self) -> int:
        return self._product.outputs

    def slots(self) -> dict[str, int]:
        """What the compiled block is told of this matrix; raises ValueError for a bias that it would misread."""
        return self._product.slots(self._bias)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        if flat.shape[0] >= self.many_rows:
            return self.many(rows)
        return self.few(flat).view(*rows.shape[:-1], self._product.outputs)

    def few(self, rows: torch.Tensor) -> torch.Tensor:
        """(n, in) rows by the compiled kernel, however many they are."""
        out = self._product(rows)
        return out if self._bias is None else out.add_(self._bias)

    def many(self, rows: torch.Tensor) -> torch.Tensor:
        """(…, in) rows by torch, however few they are."""
        return super().__call__(rows)


def dense(weight: torch.Tensor, bias: torch.Tensor | None) -> DenseProjection:
    """By the compiled kernels where they are there and take such a weight. What they read by its address is held apart
    from the parameter, whose memory may be exchanged."""
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    if _fits(weight) and (kernels := cpu_kernels(weight.dtype, "dense")) is not None:
        return CompiledDense(weight, bias, kernels.product("dense", weight))
    return DenseProjection(weight, bias)


def _fits(weight: torch.Tensor) -> bool:
    out, inputs = weight.shape
    whole = out % TILE == 0 and inputs % GROUP == 0 and inputs <= MAX_INPUTS["dense"]
    return whole and weight.is_cpu and weight.is_contiguous()
