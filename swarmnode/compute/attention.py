"""The attention function that transformers' blocks call: every session of the batch attends to its own cache.

Registered under ATTENTION_NAME. It gets `SessionViews` where other implementations get keys and values (see
`kv_cache.py`). No mask comes from the model: transformers makes none for implementations it does not know, and
causality and the sliding window follow from lengths alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from swarmnode.errors import StageFailed

if TYPE_CHECKING:
    from swarmnode.compute.kv_cache import SessionViews

ATTENTION_NAME = "swarmnode_sessions"
_HARMLESS = frozenset({"position_ids", "use_cache", "is_causal", "output_attentions", "output_hidden_states"})
"""Arguments that blocks pass along and that change nothing here; any other that is set is refused, not ignored."""


def session_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: SessionViews,
    value: SessionViews,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend (batch, heads, n, head_dim) → (batch, n, heads, head_dim). n > 1 only for a batch of one (a piece)."""
    _refuse_unknown(attention_mask, others)
    batch, heads, n, _ = query.shape
    if n > 1:
        out = _attend_piece(query, key, scaling, sliding_window, softcap)
        return out.transpose(1, 2), None
    rows = [
        _attend_row(query[i : i + 1], key.keys[i], key.values[i], scaling, sliding_window, softcap)
        for i in range(batch)
    ]
    joined = rows[0] if batch == 1 else torch.cat(rows)
    return joined.view(batch, 1, heads, joined.shape[-1]), None


def _attend_row(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """One position against all of its past: the query heads that share a KV head become that head's query rows, so
    grouped heads need neither a mask nor a copy of the keys. Returns (1, kv_heads, group, head_dim)."""
    if window is not None and keys.shape[2] > window:
        keys, values = keys[:, :, -window:], values[:, :, -window:]
    grouped = query.reshape(1, keys.shape[1], -1, query.shape[-1])
    if softcap is not None:
        return _capped(grouped, keys, values, scaling, softcap, None)
    return scaled_dot_product_attention(grouped, keys, values, scale=scaling)


def _attend_piece(
    query: torch.Tensor,
    views: SessionViews,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Several positions of one session, causal against its past. Returns (1, heads, n, head_dim)."""
    keys, values = views.keys[0], views.values[0]
    n = query.shape[2]
    if window is not None and keys.shape[2] > window + n - 1:
        # Nothing before the first query's window is ever seen.
        keys, values = keys[:, :, -(window + n - 1) :], values[:, :, -(window + n - 1) :]
    length = keys.shape[2]
    windowed = window is not None and length > window
    if length == n and not windowed and softcap is None:
        return _grouped_sdpa(query, keys, values, scaling, None)
    mask = _mask(views.masks, n, length, window if windowed else None, query)
    if softcap is not None:
        grouped = query.reshape(1, keys.shape[1], -1, query.shape[-1])
        tiled = mask.repeat(query.shape[1] // keys.shape[1], 1)
        return _capped(grouped, keys, values, scaling, softcap, tiled).reshape(query.shape)
    return _grouped_sdpa(query, keys, values, scaling, mask)


def _grouped_sdpa(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    return scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != keys.shape[1],
    )


def _capped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    softcap: float,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with scores squashed to ±softcap by tanh, as Gemma 2 has it; no fused kernel does this."""
    scores = query @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ values


def _mask(
    masks: dict[object, torch.Tensor], n: int, length: int, window: int | None, like: torch.Tensor
) -> torch.Tensor:
    """(n, length), added to scores: the last n of `length` positions see themselves and what came before, within
    `window`. Floats, once for all layers of a kind: the CPU kernel would turn booleans into floats in every layer."""
    key = (n, length, window)
    mask = masks.get(key)
    if mask is None:
        query_positions = torch.arange(length - n, length, device=like.device)[:, None]
        key_positions = torch.arange(length, device=like.device)[None, :]
        hidden = key_positions > query_positions
        if window is not None:
            hidden |= key_positions <= query_positions - window
        mask = masks[key] = like.new_zeros((n, length)).masked_fill_(hidden, float("-inf"))
    return mask


def _refuse_unknown(attention_mask: torch.Tensor | None, others: dict[str, Any]) -> None:
    unknown = [name for name, value in others.items() if value is not None and name not in _HARMLESS]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if unknown:
        raise StageFailed(f"the model's attention uses {', '.join(unknown)}, which stages do not compute")


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, session_attention)
