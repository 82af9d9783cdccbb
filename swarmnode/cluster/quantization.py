"""Which weight quantizations a load may ask for, what they cost in bytes, what a peer must declare to serve them."""

from __future__ import annotations

from collections.abc import Mapping

from swarmnode.errors import LoadRefused

NONE = "none"
INT8 = "int8"
"""Packed for torch's CPU kernels, as INT4_FAST is."""
INT4_FAST = "int4-fast"
INT4_CARD = "int4-fast on a card"
"""What INT4_FAST is stored as there: torchao's tiles; never asked for by this name."""
NF4 = "nf4"
"""bitsandbytes' 4 bits, on CPUs and cards."""
BNB_INT8 = "bnb-int8"
METHODS = (NONE, INT8, INT4_FAST, NF4, BNB_INT8)
"""Names as they travel in specs."""
SERVE_QUANTIZED = "serve-quantized"
"""bitsandbytes is installed."""
SERVE_INT8 = "serve-int8"
SERVE_INT4_FAST = "serve-int4-fast"
"""On a CPU its packed kernels; on a card torchao's: the card and torchao are there."""
SERVE_ON_CARD = "serve-on-card"
"""Its stages compute on a card."""
NEEDED_CAPABILITY = {INT8: SERVE_INT8, INT4_FAST: SERVE_INT4_FAST, NF4: SERVE_QUANTIZED, BNB_INT8: SERVE_QUANTIZED}
BYTES_PER_PARAM = {INT8: 1.05, INT4_FAST: 0.65, INT4_CARD: 0.65, NF4: 0.6, BNB_INT8: 1.05}
"""Codes and their scales, as placement prices them: four bits and 32 more for every 32 weights (int4-fast) or every 64
(nf4). The source's 0.55 is that of scales quantized in their turn."""
HEAD_BYTES_PER_PARAM = {INT8: 1.05, INT4_FAST: 1.05}
"""The CPU's packed methods pack the head to eight bits; the others leave it in the serving dtype."""
CARD_INPUTS = 1024
"""torchao pads every matrix to a multiple of as many input features."""
_MEANINGS: Mapping[str, Mapping[str | int, str]] = {
    "method": {method: method for method in METHODS},
    "backend": {"torchao": INT4_FAST},
    "bits": {4: NF4, 8: BNB_INT8},
}
_RECORDED: Mapping[str, Mapping[str | int, str]] = {**_MEANINGS, "quant_type": {"nf4": NF4}}
"""What says the method in a servable's record, the first word first; other keys are details of it."""
_BITS = {NF4: 4, INT4_FAST: 4, INT8: 8, BNB_INT8: 8}
_ALLOWED = (
    '{"method": "none"}, {"method": "nf4"} (or {"bits": 4}), {"bits": 8} (or {"method": "bnb-int8"}), '
    '{"method": "int8"} and {"method": "int4-fast"} (or {"backend": "torchao"})'
)


def read_quantization(asked: object) -> str:
    """A load's `quantization` object as one of METHODS; raises LoadRefused that names what is allowed."""
    if isinstance(asked, Mapping) and len(asked) == 1:
        ((key, value),) = asked.items()
        if (method := _meaning(_MEANINGS, key, value)) is not None:
            return method
    raise LoadRefused(f"quantization {str(asked)[:120]} is not served; allowed are {_ALLOWED}", param="quantization")


def stored_as(method: str, *, on_card: bool) -> str:
    """The form that a method's weights take on a device."""
    return INT4_CARD if on_card and method == INT4_FAST else method


def default_quantization(trained_with: Mapping[str, str | int] | None) -> tuple[str, str]:
    """What a servable's own record means for a load that asks for nothing, and why that is full precision where the
    record says something else: its method is not one that stages serve, or it contradicts itself."""
    if trained_with is None:
        return NONE, ""
    named = [_meaning(_RECORDED, key, trained_with[key]) for key in _RECORDED if key in trained_with]
    if named and named[0] is not None and len({_BITS.get(method or "") for method in named}) == 1 and None not in named:
        return named[0], ""
    return NONE, f"its record says quantization {str(dict(trained_with))[:120]}, which stages do not serve"


def _meaning(meanings: Mapping[str, Mapping[str | int, str]], key: object, value: object) -> str | None:
    known = meanings.get(key, {}) if isinstance(key, str) else {}
    return known.get(value) if type(value) in (str, int) else None  # type: ignore[call-overload]


def as_served(method: str) -> str:
    """How a ring serves, for people."""
    return "in full precision" if method == NONE else f"with {method}"


def merges_adapter(method: str, *, dora: bool) -> bool:
    """Whether a LoRA adapter is merged into the weights before they are stored by `method`, or kept beside them.

    int4-fast: Q2's kernels take no adapter beside them, and so they are packed from merged weights everywhere. DoRA is
    merged before eight bits, too: PEFT 0.21 does not run it over those of bitsandbytes 0.50, which lose their scales.
    """
    return method in (NONE, INT4_FAST, INT4_CARD) or (dora and method != NF4)


def degraded(method: str) -> tuple[str, ...]:
    """What serves in the place of `method` where too few peers have its kernels, best first: as few bits by
    bitsandbytes, then full precision."""
    return {NONE: (), INT4_FAST: (NF4, NONE), INT8: (BNB_INT8, NONE)}.get(method, (NONE,))
