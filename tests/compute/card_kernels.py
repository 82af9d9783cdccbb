"""torch's two 4-bit kernels for cards, slow and obvious, on the CPU: what torchao and the loader do around them runs as
it would on a card."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from swarmnode.cluster.quantization import CARD_INPUTS, stored_as

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

TILE_ROWS, TILE_INPUTS = 8, 128
_SHIFTS = torch.arange(8, dtype=torch.int32) * 4


def pack(pairs: torch.Tensor, inner_k_tiles: int) -> torch.Tensor:
    """(n, k / 2) bytes, the even code in the high half → tiles (n / 8, k / 128, 32, 4) of eight codes a value."""
    assert inner_k_tiles == TILE_INPUTS // 16
    assert pairs.dtype == torch.uint8
    rows, inputs = pairs.shape[0], pairs.shape[1] * 2
    assert rows % TILE_ROWS == 0
    assert inputs % CARD_INPUTS == 0, "torchao pads to it"
    codes = torch.stack((pairs >> 4, pairs & 15), -1).view(rows // TILE_ROWS, TILE_ROWS, -1, TILE_INPUTS)
    eights = codes.transpose(1, 2).reshape(codes.shape[0], codes.shape[2], 32, 4, 8).to(torch.int32)
    return (eights << _SHIFTS).sum(-1).to(torch.int32)


def multiply(rows: torch.Tensor, tiles: torch.Tensor, group: int, scales_zeros: torch.Tensor) -> torch.Tensor:
    """rows · ((code - 8) · scale + zero)ᵀ, what is not bfloat16 or of another length refused as the kernel would."""
    assert rows.dtype == scales_zeros.dtype == torch.bfloat16
    blocks, spans = tiles.shape[:2]
    codes = ((tiles[..., None] >> _SHIFTS) & 15).view(blocks, spans, TILE_ROWS, TILE_INPUTS).transpose(1, 2)
    grouped = codes.reshape(blocks * TILE_ROWS, -1, group).float()
    scales, zeros = scales_zeros.float().transpose(0, 1).unbind(-1)
    weight = ((grouped - 8) * scales[..., None] + zeros[..., None]).view(grouped.shape[0], -1)
    return (rows.float() @ weight.t()).to(torch.bfloat16)


@contextmanager
def emulated_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An Ampere card as far as torchao asks."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_convert_weight_to_int4pack", pack, "CPU")
        library.impl("_weight_int4pack_mm", multiply, "CPU")
        yield


def load_as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until undone, stages on the CPU get the weights of one on a card."""
    monkeypatch.setattr("swarmnode.compute.loader.stored_as", lambda method, on_card: stored_as(method, on_card=True))
