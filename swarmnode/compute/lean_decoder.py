"""Run a slice of Llama-shaped blocks with as little as possible around their matrix products.

Fused projections, rotary tables computed once, keys and values written in place, no Python of a library per token.
`lean_loading.py` builds it and proves it against transformers' own blocks; where that fails those serve instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swarmnode.compute.kv_cache import StepCache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from swarmnode.compute.compiled_step import CompiledStep
    from swarmnode.compute.kv_cache import SessionCache
    from swarmnode.compute.lean_block import LeanBlock, Norm
    from swarmnode.compute.projections import Projection

_FIRST_POSITIONS = 512
"""Rotary tables start with this many positions and double when a conversation outgrows them."""


class RotaryTable:
    """cos and sin of every position, as the family computes them; the sine carries the sign of rotate_half, so that a
    rotation is x * cos + roll(x, half) * sin."""

    def __init__(self, compute: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._compute = compute
        self._cos = self._sin = torch.empty(0)
        self._grow(_FIRST_POSITIONS)

    def at(self, positions: torch.Tensor, highest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tables of (batch, n) positions, (batch, n, 1, head_dim) each."""
        if highest >= self._cos.shape[0]:
            self._grow(max(2 * self._cos.shape[0], highest + 1))
        return self._cos[positions].unsqueeze(2), self._sin[positions].unsqueeze(2)

    def _grow(self, count: int) -> None:
        cos, sin = signed(self._compute(torch.arange(count)[None]))
        self._cos, self._sin = cos[0].contiguous(), sin[0].contiguous()


def signed(rotation: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """The family's (cos, sin) with rotate_half's sign moved into the sine."""
    cos, sin = rotation
    half = sin.shape[-1] // 2
    return cos, torch.cat((-sin[..., :half], sin[..., half:]), -1)


class LeanTail:
    """The last stage's final norm and head."""

    def __init__(self, norm: Norm, head: Projection) -> None:
        self.head = head
        self._norm = norm

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """(batch, n, hidden) → logits of the last position, (batch, vocab)."""
        return self.head(self._norm(rows[:, -1]))

    def size_bytes(self) -> int:
        return self.head.size_bytes()


class LeanDecoder:
    """The slice's blocks; `kinds` names each block's rotary table."""

    def __init__(self, blocks: Sequence[LeanBlock], kinds: Sequence[str], tables: dict[str, RotaryTable]) -> None:
        self.blocks = list(blocks)
        self._kinds, self._tables = list(kinds), tables
        self._compiled: CompiledStep | None = None
        self._compiled_below = 0

    def use_compiled(self, step: CompiledStep, below: int) -> None:
        """From here on `step` takes single positions of fewer than `below` sessions."""
        self._compiled, self._compiled_below = step, below

    def kernels(self) -> str:
        """Whose multiply the blocks' matrices: a name, or more of them joined by +."""
        return "+".join(sorted({projection.kernels for block in self.blocks for projection in block.projections}))

    def run(self, rows: torch.Tensor, positions: torch.Tensor, caches: Sequence[SessionCache]) -> torch.Tensor:
        """(batch, n, hidden) rows at (batch, n) positions through all blocks; `rows` stay as they are."""
        rotations = self.rotations(positions)
        if self._compiled is not None and rows.shape[1] == 1 and len(caches) < self._compiled_below:
            return self._compiled.run(rows, rotations, caches)
        step = StepCache(caches, 0)
        for layer, (block, rotation) in enumerate(zip(self.blocks, rotations, strict=True)):
            rows = block(rows, rotation, step, layer)
        return rows

    def rotations(self, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each block's tables of (batch, n) positions, (batch, n, 1, head_dim) each."""
        highest = int(positions.max())
        by_kind = {kind: table.at(positions, highest) for kind, table in self._tables.items()}
        return [by_kind[kind] for kind in self._kinds]

    def size_bytes(self) -> int:
        return sum(block.size_bytes() for block in self.blocks)
