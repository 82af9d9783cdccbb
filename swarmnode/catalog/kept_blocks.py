"""Blocks of a GGUF file that a servable keeps beside the weights dequantized from them, and which loads read them.

`shards/stage-i/gguf_blocks.safetensors` holds them as uint8 (rows, bytes of a row), each named after its weight and its
type in llama.cpp's words. A load reads the one or the other of a matrix, and peers fetch no more than that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarmnode.cluster.quantization import INT4_FAST

if TYPE_CHECKING:
    from collections.abc import Mapping

BLOCKS_FILE = "gguf_blocks.safetensors"
BLOCKS_DTYPE = "U8"
BLOCK_WEIGHTS = 32
BLOCK_BYTES: Mapping[str, int] = {"q4_0": 18, "q4_1": 20}
"""By type, the bytes of 32 weights: a scale in float16, with q4_1 a minimum in float16, then 32 codes of four bits.

Q8_0 is not kept: of the kernels that torch and torchao ship for CPUs the 8-bit ones take one scale per output row
(`aten::_weight_int8pack_mm` in bfloat16, fbgemm's and oneDNN's in float32) or one per tensor, none a scale per 32
weights. Its blocks would have to be rounded to such rows, which is what `int8` does to the dequantized weights.
"""


def keeps_blocks(path: str) -> bool:
    """Whether a servable's file of this path holds blocks, or is the list of such a file's chunks."""
    return path.rpartition("/")[2].startswith(BLOCKS_FILE)


def blocks_name(weight: str, kind: str) -> str:
    """What the blocks of a weight are called."""
    return f"{weight}.{kind}"


def weight_and_kind(name: str) -> tuple[str, str] | None:
    """The weight whose blocks a tensor of this name holds, and their type; None where it holds something else."""
    weight, _, kind = name.rpartition(".")
    return (weight, kind) if kind in BLOCK_BYTES else None


def blocks_shape(shape: tuple[int, ...], kind: str) -> tuple[int, int] | None:
    """The shape of the blocks of an (out, in) weight; None where it has none."""
    if len(shape) != 2 or shape[1] % BLOCK_WEIGHTS:
        return None
    return shape[0], shape[1] // BLOCK_WEIGHTS * BLOCK_BYTES[kind]


def reads_blocks(quantization: str, *, adapted: bool) -> bool:
    """Whether a load takes blocks where there are some: only int4-fast's kernels have their layout, and an adapter is
    merged into the dequantized weights."""
    return quantization == INT4_FAST and not adapted
