"""Which files a stage needs, and which splits a model can be served in: M4's rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarmnode.catalog.slices import layer_of
from swarmnode.errors import LoadRefused

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from swarmnode.catalog.manifest import FileEntry, Manifest


def stage_files(
    manifest: Manifest, first_layer: int, end_layer: int, num_stages: int, stage: int | None = None
) -> tuple[FileEntry, ...]:
    """Tokenizer and config files, then the shards that layers first_layer … end_layer-1 overlap.

    With the recorded split that is exactly one shard. A model without a recorded split is served only over the number
    of stages it was exported with; stage number `stage` then reads shard `stage`, and all shards while it is None.
    Raises LoadRefused with the numbers.
    """
    shards = stage_shards(manifest, first_layer, end_layer, num_stages, stage)
    return (*manifest.tokenizer_files(), *(file for shard in shards for file in manifest.shard_files(shard)))


def stage_shards(
    manifest: Manifest, first_layer: int, end_layer: int, num_stages: int, stage: int | None = None
) -> tuple[int, ...]:
    """The numbers of the shards that `stage_files` names."""
    layers = manifest.architecture.num_layers
    if not 1 <= num_stages <= layers:
        raise LoadRefused(
            f"{manifest.id} has {layers} layers; {num_stages} stages were asked, allowed are 1 to {layers}"
        )
    if not 0 <= first_layer < end_layer <= layers:
        raise LoadRefused(
            f"{manifest.id} has layers 0 to {layers - 1}; a stage of {first_layer} to {end_layer - 1} is none"
        )
    if manifest.boundaries is None:
        return _unrecorded(manifest, num_stages, stage)
    cuts = (0, *manifest.boundaries, layers)
    return tuple(
        shard for shard in range(manifest.num_stages) if cuts[shard] < end_layer and first_layer < cuts[shard + 1]
    )


def _unrecorded(manifest: Manifest, num_stages: int, stage: int | None) -> tuple[int, ...]:
    if num_stages != manifest.num_stages:
        raise LoadRefused(
            f"{manifest.id} does not record where it was cut, so it serves only over the {manifest.num_stages} stages "
            f"it was exported with; {num_stages} were asked"
        )
    return tuple(range(num_stages)) if stage is None else (stage,)


def cut_of_shards(manifest: Manifest, tensors: Sequence[Iterable[str]]) -> tuple[int, ...]:
    """Where a model that records no split was cut: the first layers of its shards 1, 2, …, by the names of each shard's
    tensors. Raises LoadRefused that names a shard whose layers are not those that follow the one before."""
    begins, next_layer = [], 0
    for shard, names in enumerate(tensors):
        held = sorted({layer for name in names if (layer := layer_of(name)) is not None})
        if not held or held != list(range(next_layer, next_layer + len(held))):
            raise LoadRefused(
                f"{manifest.id} does not record where it was cut, and shard {shard} has layers {_told(held)} where "
                f"{next_layer} and what follows are next; export it again"
            )
        begins.append(next_layer)
        next_layer += len(held)
    if next_layer != (layers := manifest.architecture.num_layers):
        raise LoadRefused(f"{manifest.id} has {layers} layers, its shards hold {next_layer}; export it again")
    return tuple(begins[1:])


def _told(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))[:80] or "none"


def check_codecs(manifest: Manifest) -> None:
    """Raise LoadRefused for a model that learned with codecs: rows cross every boundary as they are, so it would be
    another model, also where a recorded boundary now lies inside a stage."""
    trained = [codec for codec in manifest.codecs if codec.get("method", "none") != "none"]
    if trained:
        raise LoadRefused(
            f"{manifest.id} was trained with codecs on its boundaries ({str(dict(trained[0]))[:120]}), which this "
            "version does not apply; export it without them"
        )
