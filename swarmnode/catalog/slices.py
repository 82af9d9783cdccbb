"""Which tensors of its shards a stage reads, by their names: the rest of a shard is never fetched.

What belongs to another stage is left out by name, and everything else is taken: the loader must never ask for bytes
that are not there.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from swarmnode.catalog.checkpoint import EMBEDDING, FINAL_NORM, HEAD
from swarmnode.catalog.kept_blocks import weight_and_kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from swarmnode.catalog.safetensors_header import TensorEntry

_LAYER = re.compile(r"model\.layers\.(\d{1,5})\.")


def layer_of(name: str) -> int | None:
    """The layer in the whole model that a checkpoint name belongs to."""
    match = _LAYER.match(name)
    return None if match is None else int(match[1])


def slice_tensors(
    headers: Sequence[Mapping[str, TensorEntry]],
    first_layer: int,
    end_layer: int,
    num_layers: int,
    *,
    from_blocks: bool = False,
) -> tuple[dict[str, TensorEntry], ...]:
    """Of each shard, the tensors that layers first_layer … end_layer-1 read; embeddings and head where they live. Of a
    matrix that is there in blocks, too, those are read or the weight itself, as `from_blocks` says."""
    is_first, is_last = first_layer == 0, end_layer == num_layers
    has_head = any(HEAD in header for header in headers)
    blocks = {name: parsed[0] for header in headers for name in header if (parsed := weight_and_kind(name))}
    unread = set(blocks.values()) if from_blocks else set(blocks)

    def reads(name: str) -> bool:
        if name in unread:
            return False
        if (layer := layer_of(name)) is not None:
            return first_layer <= layer < end_layer
        if name == EMBEDDING:  # the head where a checkpoint ties them and has one table
            return is_first or (is_last and not has_head)
        return is_last or name not in (FINAL_NORM, HEAD)

    return tuple({name: entry for name, entry in header.items() if reads(name)} for header in headers)
