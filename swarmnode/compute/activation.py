"""Hidden states between torch and the wire: bytes are checked before a tensor is made of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from swarmnode.errors import StageFailed
from swarmnode.ring.work import Activation

if TYPE_CHECKING:
    from collections.abc import Mapping

_DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NAMES: Mapping[torch.dtype, str] = {dtype: name for name, dtype in _DTYPES.items()}


def to_activation(rows: torch.Tensor) -> Activation:
    """(n, hidden) in float32 or bfloat16 → its bytes; they share the tensor's memory where it is on the CPU."""
    rows = rows.cpu().contiguous()
    return Activation(dtype=_NAMES[rows.dtype], shape=tuple(rows.shape), data=bytes_of(rows))


def to_rows(activation: Activation, n: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An activation as (n, hidden_size) in the stage's dtype; raises StageFailed if its size is anything else."""
    stored = _DTYPES.get(activation.dtype)
    data = memoryview(activation.data).cast("B")
    expected = n * hidden_size * (stored.itemsize if stored is not None else 0)
    if stored is None or math.prod(activation.shape) != n * hidden_size or len(data) != expected:
        raise StageFailed(
            f"hidden states are {activation.dtype} {list(activation.shape)} in {len(data)} bytes, "
            f"expected are {n} rows of {hidden_size} in float32 or bfloat16"
        )
    rows = torch.empty((n, hidden_size), dtype=stored)
    bytes_of(rows)[:] = data
    return rows.to(device=device, dtype=dtype)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, writable."""
    return tensor.view(-1).view(torch.uint8).numpy().data
