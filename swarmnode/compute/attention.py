"""The attention function that transformers' blocks call: every session of the batch attends to its own cache.

Registered under ATTENTION_NAME. It gets `SessionViews` where other implementations get keys and values (see
`kv_cache.py`). No mask comes from the model: transformers makes none for implementations it does not know, and
causality and the sliding window follow from lengths alone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from swarmnode.errors import LoadRefused, StageFailed

if TYPE_CHECKING:
    from swarmnode.compute.kv_cache import SessionViews

ATTENTION_NAME = "swarmnode_sessions"
_HARMLESS = frozenset(
    {"position_ids", "use_cache", "is_causal", "output_attentions", "output_hidden_states", "output_router_logits"}
)
"""Arguments that blocks pass along and that change nothing here; any other that is set is refused, not ignored."""

MODES = ("auto", "grouped", "sdpa")
"""SWARM_SERVE_ATTENTION. `grouped`: the query heads that share a KV head become its query rows, so no key is copied per
head. `sdpa`: torch's own handling of grouped heads. `auto`: see `groups_pieces`; every decode step is grouped."""


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """What a block asks of attention; `mode` is the stage's."""

    scaling: float | None
    window: int | None
    softcap: float | None
    mode: str = "auto"
    sinks: torch.Tensor | None = None
    """A score per query head that takes part in the softmax and brings no value (gpt-oss)."""

    @property
    def explicit(self) -> bool:
        """Scores are changed in a way that no fused kernel knows."""
        return self.softcap is not None or self.sinks is not None


def attention_mode() -> str:
    """SWARM_SERVE_ATTENTION; raises LoadRefused for a value that is none of MODES."""
    mode = os.environ.get("SWARM_SERVE_ATTENTION", "auto") or "auto"
    if mode not in MODES:
        raise LoadRefused(f"SWARM_SERVE_ATTENTION is {mode[:40]!r}; allowed are {', '.join(MODES)}")
    return mode


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
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attend (batch, heads, n, head_dim) → (batch, n, heads, head_dim). n > 1 only for a batch of one (a piece)."""
    _refuse_unknown(attention_mask, others)
    settings = AttentionSettings(scaling, sliding_window, softcap, key.mode, s_aux)
    if key.asked is not None:
        key.asked.append(settings)
    return attend(query, key, settings), None


def attend(query: torch.Tensor, views: SessionViews, settings: AttentionSettings) -> torch.Tensor:
    """(batch, heads, n, head_dim) → (batch, n, heads, head_dim); n > 1 only for a batch of one (a piece)."""
    batch, heads, n, _ = query.shape
    if n > 1:
        return _attend_piece(query, views, settings).transpose(1, 2)
    rows = [_attend_row(query[i : i + 1], views.keys[i], views.values[i], settings) for i in range(batch)]
    joined = rows[0] if batch == 1 else torch.cat(rows)
    return joined.view(batch, 1, heads, joined.shape[-1])


def _attend_row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, settings: AttentionSettings
) -> torch.Tensor:
    """One position against all of its past: needs no mask. Returns (1, kv_heads, group, head_dim), or as asked."""
    window = settings.window
    if window is not None and keys.shape[2] > window:
        keys, values = keys[:, :, -window:], values[:, :, -window:]
    if settings.mode == "sdpa" and not settings.explicit:
        return _own_grouping(query, keys, values, settings.scaling, None, causal=False)
    grouped = query.reshape(1, keys.shape[1], -1, query.shape[-1])
    if settings.explicit:
        return _explicit(grouped, keys, values, settings, None)
    return scaled_dot_product_attention(grouped, keys, values, scale=settings.scaling)


def _attend_piece(query: torch.Tensor, views: SessionViews, settings: AttentionSettings) -> torch.Tensor:
    """Several positions of one session, causal against its past. Returns (1, heads, n, head_dim)."""
    keys, values, window = views.keys[0], views.values[0], settings.window
    n = query.shape[2]
    if window is not None and keys.shape[2] > window + n - 1:
        # Nothing before the first query's window is ever seen.
        keys, values = keys[:, :, -(window + n - 1) :], values[:, :, -(window + n - 1) :]
    length = keys.shape[2]
    windowed = window is not None and length > window
    masked = length != n or windowed
    grouping = settings.explicit or (
        query.shape[1] != keys.shape[1] and groups_pieces(settings.mode, query.dtype, query.device.type, masked=masked)
    )
    if not masked and not grouping:
        return _own_grouping(query, keys, values, settings.scaling, None, causal=True)
    mask = _mask(views.masks, n, length, window if windowed else None, query)
    if not grouping:
        return _own_grouping(query, keys, values, settings.scaling, mask, causal=False)
    grouped = query.reshape(1, keys.shape[1], -1, query.shape[-1])
    tiled = _tiled(views.masks, mask, query.shape[1] // keys.shape[1], window if windowed else None)
    if settings.explicit:
        out = _explicit(grouped, keys, values, settings, tiled)
    else:
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=tiled, scale=settings.scaling)
    return out.reshape(query.shape)


def groups_pieces(mode: str, dtype: torch.dtype, device: str, *, masked: bool) -> bool:
    """Whether the query heads of a KV head become its rows in a prompt piece, too; `masked`: causality alone does not
    say what it sees, for it continues or has a window.

    By `auto` on a CPU where torch's own was slower when measured: in bfloat16. On a card where flash attention, which
    groups by itself, cannot serve: it takes neither a mask nor float32, and what may serve instead copies keys and
    values per head and holds all scores.
    """
    if mode != "auto":
        return mode == "grouped"
    if device == "cpu":
        return dtype == torch.bfloat16
    return masked or dtype == torch.float32


def _own_grouping(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float | None,
    mask: torch.Tensor | None,
    *,
    causal: bool,
) -> torch.Tensor:
    return scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=mask,
        is_causal=causal,
        scale=scaling,
        enable_gqa=query.shape[1] != keys.shape[1],
    )


def _explicit(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    settings: AttentionSettings,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Attention step by step over (1, kv_heads, group × n, head_dim) queries: scores squashed to ±softcap by tanh as
    Gemma 2 has it, and each query head's sink as one more score. No fused kernel does either."""
    scores = query @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if settings.scaling is None else settings.scaling)
    if settings.softcap is not None:
        scores = torch.tanh(scores / settings.softcap) * settings.softcap
    if mask is not None:
        scores = scores + mask
    if settings.sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ values
    heads = settings.sinks.view(keys.shape[1], -1)
    sinks = heads.repeat_interleave(query.shape[2] // heads.shape[1], 1)[None, ..., None].to(scores.dtype)
    shares = torch.cat((scores, sinks), -1).softmax(-1, dtype=torch.float32)
    return shares[..., :-1].to(query.dtype) @ values


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


def _tiled(masks: dict[object, torch.Tensor], mask: torch.Tensor, group: int, window: int | None) -> torch.Tensor:
    """The mask once per query head of a group, made once for all layers of a kind."""
    key = (*mask.shape, window, group)
    if key not in masks:
        masks[key] = mask.repeat(group, 1)
    return masks[key]


def _refuse_unknown(attention_mask: torch.Tensor | None, others: dict[str, Any]) -> None:
    unknown = [name for name, value in others.items() if value is not None and name not in _HARMLESS]
    if attention_mask is not None:
        unknown.append("attention_mask")
    if unknown:
        raise StageFailed(f"the model's attention uses {', '.join(unknown)}, which stages do not compute")


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, session_attention)
