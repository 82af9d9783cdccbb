"""The KV cache of the sessions on one stage, and the view of it that one forward sees.

Each session owns one key and one value buffer per layer, (1, kv_heads, capacity, head_dim). Positions are written in
place; the past is copied only when a buffer grows. Transformers' attention blocks see a `StepCache`: its `update`
appends row i of the batch to session i and hands the sessions' own views to the attention function of `attention.py`,
so the linear layers run over the whole batch while every session attends to its own past.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swarmnode.compute.recurrent_state import RecurrentState, copy_states, crop_states
from swarmnode.errors import CacheGap

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from swarmnode.compute.attention import AttentionSettings

GROWTH_TOKENS = 64
"""Buffers grow by this many positions (K4); beyond 8 × this by an eighth of their size, so that a long conversation
does not copy its whole past every 64 tokens (amortised: at most 8 copies of each position)."""
_LARGE_UNUSED = 4
"""A cache taken over with more than a fourth of its buffers unused is cut to size. Growth alone leaves an eighth."""


class SessionCache:
    """Keys and values of one session for the layers of one stage. Lengths are per layer: a forward that failed
    halfway has appended to some layers only, and `crop` brings all of them back to one length."""

    __slots__ = ("_keys", "_lengths", "_states", "_values")

    def __init__(self, num_layers: int) -> None:
        self._keys: list[torch.Tensor | None] = [None] * num_layers
        self._values: list[torch.Tensor | None] = [None] * num_layers
        self._lengths = [0] * num_layers
        self._states: dict[int, RecurrentState] = {}
        """Of layers with a recurrent state; they have neither keys nor values."""

    @property
    def length(self) -> int:
        """Positions that every layer holds."""
        return min(self._lengths)

    def crop(self, length: int) -> None:
        """Forget all positions from `length` on; raises CacheGap if fewer are held, StageFailed where a layer's
        recurrent state cannot go back there."""
        if self.length < length:
            raise CacheGap(f"the cache holds {self.length} positions, the work starts at position {length}")
        crop_states(self._states, length)
        self._lengths = [length] * len(self._lengths)

    def copy(self, length: int, room: int) -> SessionCache:
        """The first `length` positions in buffers of their own, with room for `room`; raises CacheGap like `crop`."""
        made = SessionCache(len(self._lengths))
        made._lengths = list(self._lengths)
        made._states = copy_states(self._states, length)
        made.crop(length)
        capacity = grown_capacity(room, 0)
        made._keys = [_resized(buffer, length, capacity) for buffer in self._keys]
        made._values = [_resized(buffer, length, capacity) for buffer in self._values]
        return made

    def fit(self, room: int) -> None:
        """Give back what is unused beyond `room` positions, where that is much; one buffer at a time is held twice."""
        capacity = grown_capacity(room, 0)
        for layer, length in enumerate(self._lengths):
            for buffers in (self._keys, self._values):
                buffer = buffers[layer]
                if buffer is not None and (buffer.shape[2] - capacity) * _LARGE_UNUSED > buffer.shape[2]:
                    buffers[layer] = _resized(buffer, length, capacity)

    def trim(self) -> None:
        """Give back all that is unused; the next position to be written makes the buffers grow again."""
        for layer, length in enumerate(self._lengths):
            for buffers in (self._keys, self._values):
                buffer = buffers[layer]
                if buffer is not None and buffer.shape[2] > length:
                    buffers[layer] = _resized(buffer, length, length)

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (1, kv_heads, n, head_dim) behind the past of `layer`; return views of past and new together."""
        start = self._lengths[layer]
        end = start + keys.shape[2]
        key_buffer, value_buffer = self._make_room(layer, keys, values, end)
        key_buffer[:, :, start:end] = keys
        value_buffer[:, :, start:end] = values
        self._lengths[layer] = end
        return key_buffer[:, :, :end], value_buffer[:, :, :end]

    def extend(self, layer: int, position: torch.Tensor) -> tuple[int, int, int, int]:
        """Room for one more position, shaped as `position`, which the caller is to write behind the past of `layer`:
        the addresses of keys and values, (kv_heads, capacity, head_dim) each, their capacity, and the past's length."""
        start = self._lengths[layer]
        keys, values = self._make_room(layer, position, position, start + 1)
        self._lengths[layer] = start + 1
        return keys.data_ptr(), values.data_ptr(), keys.shape[2], start

    def _make_room(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, end: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start = self._lengths[layer]
        key_buffer = self._keys[layer] = _with_room(self._keys[layer], keys, start, end)
        value_buffer = self._values[layer] = _with_room(self._values[layer], values, start, end)
        return key_buffer, value_buffer

    def state(self, layer: int) -> RecurrentState:
        """The recurrent state of `layer`, a new one at first."""
        return self._states.setdefault(layer, RecurrentState())

    def advance(self, layer: int, n: int) -> None:
        """`layer`, which has a recurrent state, has read `n` positions."""
        self._states[layer].finish(n)
        self._lengths[layer] += n

    def size_bytes(self) -> int:
        """Bytes of the buffers, unused room included, and of recurrent states."""
        buffers = sum(b.numel() * b.element_size() for b in (*self._keys, *self._values) if b is not None)
        return buffers + sum(state.size_bytes() for state in self._states.values())

    def token_bytes(self) -> int:
        """Bytes of one position in all layers; 0 before the first one was written."""
        buffers = (b for b in (*self._keys, *self._values) if b is not None)
        return sum(b.shape[1] * b.shape[3] * b.element_size() for b in buffers)


class SessionViews:
    """What one layer's attention gets in place of keys: for each session of the batch its own keys and values."""

    __slots__ = ("asked", "keys", "masks", "mode", "values")

    def __init__(
        self,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        masks: dict[object, torch.Tensor],
        mode: str = "auto",
        asked: list[AttentionSettings] | None = None,
    ) -> None:
        self.keys = keys
        self.values = values
        self.masks = masks
        """Masks of this forward by shape and window: layers of one kind share one mask."""
        self.mode = mode
        self.asked = asked
        """Where given, attention notes there what each block asked of it."""


class StepCache:
    """Stands in for transformers' `Cache` during one forward over sessions' caches (row i is session i)."""

    is_compileable = False

    def __init__(
        self,
        sessions: Sequence[SessionCache],
        first_layer: int,
        mode: str = "auto",
        asked: list[AttentionSettings] | None = None,
    ) -> None:
        self._sessions = sessions
        self._first_layer = first_layer
        self._mode = mode
        self._asked = asked
        self._masks: dict[object, torch.Tensor] = {}
        self.updates: list[int] = []
        """Layers that appended, in order."""

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[SessionViews, SessionViews]:
        """Append row i of (batch, kv_heads, n, head_dim) to session i."""
        layer = layer_idx - self._first_layer
        self.updates.append(layer)
        views = self.append(layer, keys, values)
        return views, views

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> SessionViews:
        """As `update`, for layer `layer` of the slice."""
        if len(self._sessions) == 1:
            pairs = [self._sessions[0].append(layer, keys, values)]
        else:
            pairs = [
                session.append(layer, keys[i : i + 1], values[i : i + 1]) for i, session in enumerate(self._sessions)
            ]
        return SessionViews(
            [key for key, _ in pairs], [value for _, value in pairs], self._masks, self._mode, self._asked
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Longest past among the sessions. Positions are always given explicitly, so no model reads it for those."""
        return max(session.length for session in self._sessions)


def grown_capacity(needed: int, current: int) -> int:
    """Positions a buffer of `current` positions gets when `needed` must fit: a multiple of GROWTH_TOKENS."""
    step = GROWTH_TOKENS if current < 8 * GROWTH_TOKENS else current // 8
    target = max(needed, current + step if current else 0)
    return -(-target // GROWTH_TOKENS) * GROWTH_TOKENS


def _with_room(buffer: torch.Tensor | None, like: torch.Tensor, used: int, needed: int) -> torch.Tensor:
    """The buffer itself if `needed` positions fit, else a larger one with the `used` positions copied."""
    current = 0 if buffer is None else buffer.shape[2]
    if buffer is not None and needed <= current:
        return buffer
    capacity = grown_capacity(needed, current)
    grown = like.new_empty((1, like.shape[1], capacity, like.shape[3]))
    if buffer is not None and used:
        grown[:, :, :used] = buffer[:, :, :used]
    return grown


def _resized(buffer: torch.Tensor | None, used: int, capacity: int) -> torch.Tensor | None:
    """The first `used` positions in a buffer of its own, of `capacity` positions."""
    if buffer is None:
        return None
    resized = buffer.new_empty((1, buffer.shape[1], capacity, buffer.shape[3]))
    resized[:, :, :used] = buffer[:, :, :used]
    return resized
