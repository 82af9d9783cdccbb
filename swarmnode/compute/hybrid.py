"""The seam between linear-attention layers of transformers' blocks and the states of the sessions in a batch.

Rows of a group run through such a layer one by one, each with its session's state (B5); everything else in the block
still runs over the whole batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from swarmnode.catalog.layer_kinds import LINEAR_ATTENTION
from swarmnode.compute.kv_cache import StepCache
from swarmnode.errors import LoadRefused

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from swarmnode.compute.kv_cache import SessionCache
    from swarmnode.compute.recurrent_state import RecurrentState

_MIXER = "linear_attn"


class HybridStepCache(StepCache):
    """A StepCache for slices with linear-attention layers; those see the session that `select` chose."""

    def __init__(self, sessions: Sequence[SessionCache], first_layer: int, mode: str) -> None:
        super().__init__(sessions, first_layer, mode)
        self._row = 0

    def select(self, row: int, layer_idx: int) -> None:
        """What follows is about the session of this row."""
        self._row = row
        self._state(layer_idx).begin()

    def advance(self, layer_idx: int, n: int) -> None:
        """The layer has read `n` positions of every session."""
        layer = layer_idx - self._first_layer
        self.updates.append(layer)
        for session in self._sessions:
            session.advance(layer, n)

    def is_recording_past(self, _: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, **_: Any) -> torch.Tensor | None:
        return self._state(layer_idx).conv

    def get_recurrent_state(self, layer_idx: int, **_: Any) -> torch.Tensor | None:
        return self._state(layer_idx).recurrent

    def update_conv_state(self, rows: torch.Tensor, layer_idx: int, *, conv_kernel_size: int, **_: Any) -> torch.Tensor:
        """Append (1, channels, n) to the last inputs; returns all of them, of which the last kernel_size are kept."""
        state = self._state(layer_idx)
        missing = conv_kernel_size - rows.shape[-1] if state.conv is None else 0
        seen = (
            nn.functional.pad(rows, (max(missing, 0), 0)) if state.conv is None else torch.cat((state.conv, rows), -1)
        )
        state.conv = seen[..., -conv_kernel_size:].clone()
        return seen

    def update_recurrent_state(self, after: torch.Tensor, layer_idx: int, **_: Any) -> torch.Tensor:
        self._state(layer_idx).recurrent = after
        return after

    def _state(self, layer_idx: int) -> RecurrentState:
        return self._sessions[self._row].state(layer_idx - self._first_layer)


class OneByOne(nn.Module):
    """Runs a layer's mixer for one session of the batch at a time, each with the state that it has."""

    def __init__(self, mixer: Any) -> None:
        super().__init__()
        self.mixer = mixer

    def forward(self, hidden_states: torch.Tensor, cache: HybridStepCache, **others: Any) -> torch.Tensor:
        """(batch, n, hidden) → the same."""
        out = []
        for row in range(hidden_states.shape[0]):
            cache.select(row, self.mixer.layer_idx)
            out.append(self.mixer(hidden_states=hidden_states[row : row + 1], cache=cache, **others))
        cache.advance(self.mixer.layer_idx, hidden_states.shape[1])
        return out[0] if len(out) == 1 else torch.cat(out)


def wrap_mixers(layers: Iterable[Any], kinds: Sequence[str], name: str) -> bool:
    """Put each linear-attention layer's mixer behind `OneByOne`; False where there is none."""
    found = False
    for layer, kind in zip(layers, kinds, strict=True):
        if kind != LINEAR_ATTENTION:
            continue
        mixer = getattr(layer, _MIXER, None)
        if mixer is None or not hasattr(mixer, "layer_idx"):
            raise LoadRefused(f"architecture {name!r} cannot be served: its linear attention keeps its state elsewhere")
        setattr(layer, _MIXER, OneByOne(mixer))
        found = True
    return found
