"""Drive one layer of a family's own forward: see what the family gives a layer and what the layer makes of it.

The family's `forward` runs with its list of layers swapped for a single entry, so whatever it does before its layers
(scaling embeddings, computing rotary tables by layer type) is its own code. Used at load only.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from swarmnode.compute.kv_cache import StepCache

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from swarmnode.compute.attention import AttentionSettings
    from swarmnode.compute.kv_cache import SessionCache


@dataclass(slots=True)
class Seen:
    """What reached the layer, and its result. `rotation`: (cos, sin) as the family computed them, if it did."""

    entered: torch.Tensor
    rotation: tuple[torch.Tensor, torch.Tensor] | None
    result: torch.Tensor


class _Entry(nn.Module):
    """Stands before the layer: notes what arrives; `rows` replace it. Without a layer rows pass through."""

    def __init__(self, layer: nn.Module | None, rows: torch.Tensor) -> None:
        super().__init__()
        self.layer, self.rows = layer, rows
        self.seen: list[Seen] = []

    def forward(self, arrived: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = self.rows if self.layer is None else self.layer(self.rows, *args, **kwargs)
        result = result if isinstance(result, torch.Tensor) else result[0]
        rotation = kwargs.get("position_embeddings")
        self.seen.append(Seen(arrived, rotation if isinstance(rotation, tuple) else None, result))
        return result


def drive_layer(
    base: Any,
    index: int,
    rows: torch.Tensor,
    positions: torch.Tensor,
    caches: Sequence[SessionCache],
    asked: list[AttentionSettings] | None = None,
) -> Seen:
    """Run layer `index` of the slice over (batch, n, hidden); what it asks of attention is appended to `asked`. The
    caches are those of that layer alone."""
    layer = base.layers[index]
    step = StepCache(caches, layer.self_attn.layer_idx, asked=asked)
    with _only(base, index, _Entry(layer, rows)) as entry:
        base(inputs_embeds=rows, position_ids=positions, cache=step, use_cache=True)
    return entry.seen[0]


def see_entry(base: Any, index: int, rows: torch.Tensor, positions: torch.Tensor) -> Seen:
    """What the family would give layer `index`, without running it."""
    with _only(base, index, _Entry(None, rows)) as entry:
        base(inputs_embeds=rows, position_ids=positions, cache=StepCache([], 0), use_cache=False)
    return entry.seen[0]


def family_logits(outer: Any, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """What the family makes of (batch, n, hidden) rows that left its last layer: logits of the last position."""
    with _only(outer.model, 0, _Entry(None, rows), keep_norm=True):
        out = outer(
            inputs_embeds=rows, position_ids=positions, cache=StepCache([], 0), use_cache=False, logits_to_keep=1
        ).logits
    assert isinstance(out, torch.Tensor)
    return out[:, -1]


class _HeadStub(nn.Module):
    """Stands in for a head: notes its input and answers with values of every size."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: torch.Tensor | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.entered = rows
        return torch.linspace(-1e3, 1e3, 9, device=rows.device).expand(*rows.shape[:-1], 9)


def see_head(outer: Any, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """What the family gives its head for the last of the rows, and whether it leaves the head's answer as it is."""
    head, stub = outer.lm_head, _HeadStub()
    outer.lm_head = stub
    try:
        logits = family_logits(outer, rows, positions)
    finally:
        outer.lm_head = head
    assert stub.entered is not None
    return stub.entered[:, -1], torch.equal(logits, stub(rows[:, -1]))


@contextmanager
def _only(base: Any, index: int, entry: _Entry, *, keep_norm: bool = False) -> Iterator[_Entry]:
    """The model with `entry` as its only layer, of layer `index`'s kind, and the final norm out of the way."""
    config = base.config
    layers, norm, count = base.layers, base.norm, config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    base.layers, config.num_hidden_layers = nn.ModuleList([entry]), 1
    if kinds is not None:
        config.layer_types = [kinds[index]]
    if not keep_norm:
        base.norm = nn.Identity()
    try:
        yield entry
    finally:
        base.layers, base.norm, config.num_hidden_layers = layers, norm, count
        if kinds is not None:
            config.layer_types = kinds
