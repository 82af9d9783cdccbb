"""Which layers of a model keep a recurrent state instead of KV, and how large it is, from config.json alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

LINEAR_ATTENTION = "linear_attention"
"""Layers that sum their past up in a state of fixed size (gated delta rule)."""
_DEFAULT_INTERVAL = 4
"""Every fourth layer attends in full where a config says nothing (Qwen3-Next, Qwen3.5)."""
_DEFAULT_KERNEL = 4
_KERNEL = "linear_conv_kernel_dim"
_SIZES = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", _KERNEL)


def recurrent_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """By the config's list of kinds, or by its interval of full attention."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return tuple(i for i, kind in enumerate(kinds) if kind == LINEAR_ATTENTION)
    count, interval = config.get("num_hidden_layers"), config.get("full_attention_interval", _DEFAULT_INTERVAL)
    if not config.get("linear_num_key_heads") or type(count) is not int or type(interval) is not int or interval < 1:
        return ()
    return tuple(i for i in range(count) if (i + 1) % interval)


def state_values(config: Mapping[str, Any]) -> int:
    """Numbers that one such layer keeps per session: the last inputs of its convolution, and its matrix."""
    if not recurrent_layers(config):
        return 0
    sizes = [config.get(name, _DEFAULT_KERNEL if name == _KERNEL else None) for name in _SIZES]
    known = [size for size in sizes if isinstance(size, int) and 0 < size < 1 << 20]
    if len(known) != len(sizes):
        return 0
    key_heads, value_heads, key_size, value_size, kernel = known
    channels = 2 * key_heads * key_size + value_heads * value_size
    return channels * kernel + value_heads * key_size * value_size
