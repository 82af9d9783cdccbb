"""Which weight quantizations a load may ask for, what they cost in bytes, what a peer must declare to serve them."""

from __future__ import annotations

from collections.abc import Mapping

from swarmnode.errors import LoadRefused

NONE = "none"
INT8 = "int8"
INT4_FAST = "int4-fast"
METHODS = (NONE, INT8, INT4_FAST)
"""Names as they travel in specs."""
SERVE_QUANTIZED = "serve-quantized"
SERVE_INT4_FAST = "serve-int4-fast"
NEEDED_CAPABILITY = {INT8: SERVE_QUANTIZED, INT4_FAST: SERVE_INT4_FAST}
BYTES_PER_PARAM = {INT8: 1.05, INT4_FAST: 0.55}
"""Codes and their scales, as placement prices them."""
HEAD_BYTES_PER_PARAM = 1.05
"""The head is packed to eight bits whatever the blocks are packed to."""
_ALLOWED = '{"method": "none"}, {"method": "int8"} and {"method": "int4-fast"} (or {"backend": "torchao"})'


def read_quantization(asked: object) -> str:
    """A load's `quantization` object as one of METHODS; raises LoadRefused that names what is allowed."""
    if isinstance(asked, Mapping):
        if set(asked) == {"method"} and asked["method"] in METHODS:
            return str(asked["method"])
        if dict(asked) == {"backend": "torchao"}:
            return INT4_FAST
    raise LoadRefused(f"quantization {str(asked)[:120]} is not served; allowed are {_ALLOWED}", param="quantization")


def default_quantization(trained_with: object) -> str:
    """What a servable's own entry means for a load that asks for nothing: full precision where its method is not one
    that stages serve."""
    try:
        return NONE if trained_with is None else read_quantization(trained_with)
    except LoadRefused:
        return NONE
