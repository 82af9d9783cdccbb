"""Which stored tensors make up each parameter: the names of a checkpoint against those of the built model.

Most parameters are one tensor of the same name. Transformers keeps a layer's experts as one parameter where checkpoints
have a tensor per expert and projection; its own table of conversions says which, and each tensor is read straight to
its place in the whole. Conversions that move numbers about (transposes, splits) are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from swarmnode.catalog.safetensors_header import read_header
from swarmnode.errors import LoadFailed, LoadRefused

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    import torch

    from swarmnode.catalog.safetensors_header import TensorEntry

FLOATS = ("F32", "BF16", "F16", "F64")


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor's bytes are."""

    name: str
    path: Path
    entry: TensorEntry


@dataclass(frozen=True, slots=True)
class Part:
    """A stored tensor and its place in the parameter: all of it, or rows `begin` … `end` of one expert."""

    stored: Stored
    expert: int | None = None
    begin: int = 0
    end: int = 0

    def place(self, whole: torch.Tensor) -> torch.Tensor:
        return whole if self.expert is None else whole[self.expert, self.begin : self.end]


def find_tensors(files: Iterable[Path]) -> dict[str, Stored]:
    """All tensors of the files; where a name occurs twice (tied embeddings) the first one is as good."""
    found: dict[str, Stored] = {}
    for path in files:
        if path.suffix == ".safetensors":
            for name, entry in read_header(path).items():
                found.setdefault(name, Stored(name, path, entry))
    if not found:
        raise LoadFailed("no tensors in the stage's files; fetch them again")
    return found


def parts_of(
    wanted: Mapping[str, tuple[int, ...]], stored: Mapping[str, Stored], model: Any
) -> dict[str, tuple[Part, ...]]:
    """The parts of every wanted parameter (its shape by its name in the whole model); raises LoadFailed where one is
    missing or of another shape, LoadRefused where it would have to be computed."""
    found: dict[str, tuple[Part, ...]] = {name: (Part(stored[name]),) for name in wanted if name in stored}
    missing = {name: shape for name, shape in wanted.items() if name not in found}
    if missing:
        found |= _converted(missing, stored, get_model_conversion_mapping(model))
    for name, shape in wanted.items():
        _check(name, shape, found.get(name, ()))
    return found


def _converted(
    missing: Mapping[str, tuple[int, ...]], stored: Mapping[str, Stored], transforms: Sequence[Any]
) -> dict[str, tuple[Part, ...]]:
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    sources: dict[str, dict[str, list[Stored]]] = {}
    found: dict[str, tuple[Part, ...]] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters)
        if target in missing and pattern is None:
            found[target] = (Part(stored[name]),)
        elif target in missing and pattern is not None:
            sources.setdefault(target, {}).setdefault(pattern, []).append(stored[name])
    for target, by_pattern in sources.items():
        converter = next(c for c in converters if set(by_pattern) <= set(c.source_patterns))
        _check_operations(target, converter)
        found[target] = _experts([by_pattern.get(pattern, []) for pattern in converter.source_patterns])
    return found


def _check_operations(target: str, converter: WeightConverter) -> None:
    """Experts one after the other, and in each the projections one below the other."""
    match converter.operations:
        case [MergeModulelist(dim=0)] if len(converter.source_patterns) == 1:
            return
        case [MergeModulelist(dim=0), Concatenate(dim=1)]:
            return
    names = ", ".join(type(operation).__name__ for operation in converter.operations)
    raise LoadRefused(f"{target!r} is stored in another form than it is computed in ({names}), which is not read")


def _experts(projections: Sequence[Sequence[Stored]]) -> tuple[Part, ...]:
    parts, begin = [], 0
    for tensors in projections:
        rows = tensors[0].entry.shape[0] if tensors else 0
        parts += [Part(tensor, expert, begin, begin + rows) for expert, tensor in enumerate(tensors)]
        begin += rows
    return tuple(parts)


def _check(name: str, shape: tuple[int, ...], parts: Sequence[Part]) -> None:
    if not parts:
        raise LoadFailed(f"the stage's files lack tensor {name!r}")
    whole = parts[0].expert is None
    for part in parts:
        entry = part.stored.entry
        expected = shape if whole else (part.end - part.begin, *shape[2:])
        if entry.shape != expected or entry.dtype not in FLOATS:
            raise LoadFailed(
                f"tensor {part.stored.name!r} is {entry.dtype} {list(entry.shape)}, "
                f"the model needs a float {list(expected)}"
            )
    if whole:
        return
    rows = sum(part.end - part.begin for part in parts)
    if rows != shape[0] * shape[1] or max(part.end for part in parts) != shape[1]:
        raise LoadFailed(
            f"the stage's files hold {rows} rows of {name!r} over all experts, the model needs {shape[0] * shape[1]}"
        )
