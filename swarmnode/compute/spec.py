"""What one stage is asked to load: which layers, from which files, in which dtype and on which device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarmnode.errors import LoadRefused

if TYPE_CHECKING:
    from pathlib import Path

DTYPES = ("auto", "float32", "bfloat16")
_HALF_FORMATS = frozenset({"bfloat16", "float16", "BF16", "F16"})
"""In the words of manifests and of safetensors headers."""
PACKED_METHODS = ("int8", "int4-fast")
"""Weights packed for torch's CPU kernels, by the lean decoder."""
BNB_METHODS = ("nf4", "bnb-int8")
"""Weights as bitsandbytes quantizes them, in transformers' own blocks; on CPUs and cards."""
QUANTIZATIONS = ("none", *PACKED_METHODS, *BNB_METHODS)


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage of one loaded model: layers first_layer … end_layer-1 of num_layers.

    `folder` holds `tokenizer/` (with `config.json`) and `shards/`; `files` are the shard files that hold the slice.
    `dtype` "auto" serves float32 weights in float32 and both half formats in bfloat16 (see `serving_dtype`).
    `device` is "auto" (CUDA if there is a card), "cpu", "cuda" or "cuda:N". `threads` 0 leaves torch's own choice.
    `lean` False keeps transformers' own blocks where the lean decoder could serve. `quantization` is one of
    QUANTIZATIONS; the quantized ones compute in bfloat16 unless `dtype` says float32.
    """

    folder: Path
    files: tuple[Path, ...]
    first_layer: int
    end_layer: int
    num_layers: int
    is_first: bool
    is_last: bool
    dtype: str = "auto"
    device: str = "auto"
    threads: int = 0
    lean: bool = True
    quantization: str = "none"

    def __post_init__(self) -> None:
        if not 0 <= self.first_layer < self.end_layer <= self.num_layers:
            raise LoadRefused(
                f"layers {self.first_layer} to {self.end_layer} are not a slice of a model with "
                f"{self.num_layers} layers; a stage needs at least one layer"
            )
        if self.is_first != (self.first_layer == 0) or self.is_last != (self.end_layer == self.num_layers):
            raise LoadRefused(
                f"layers {self.first_layer} to {self.end_layer} of {self.num_layers} do not fit "
                f"is_first={self.is_first}, is_last={self.is_last}"
            )
        check_dtype(self.dtype)
        if self.quantization not in QUANTIZATIONS:
            raise LoadRefused(f"quantization {self.quantization!r} is not one of {', '.join(QUANTIZATIONS)}")


def check_dtype(asked: str) -> None:
    """Raise LoadRefused for a dtype that is none of DTYPES."""
    if asked not in DTYPES:
        raise LoadRefused(f"dtype {asked!r} is not one of {', '.join(DTYPES)}", param="dtype")


def serving_dtype(asked: str, stored: str, quantization: str = "none") -> str:
    """The dtype a stage computes in, from what was asked and what the files hold, as a manifest or a file names it.
    Quantized weights are computed with in bfloat16, which the packed kernels take and QLoRA trains in.

    float16 is served in bfloat16: the same size, no overflow in the residual stream, and the wire knows only float32
    and bfloat16. Who wants float16's extra mantissa bits asks for float32, which holds every float16 exactly.
    """
    check_dtype(asked)
    if asked != "auto":
        return asked
    return "bfloat16" if quantization != "none" or stored in _HALF_FORMATS else "float32"
