"""Load one stage: build the slice, then read its tensors by their offsets, straight into the memory they stay in.

Anonymous memory grows by the slice in the serving dtype and one small staging buffer: bytes are never held twice, the
page cache is not mapped, and tensors outside the slice are not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from swarmnode.catalog.kept_blocks import reads_blocks
from swarmnode.catalog.manifest import MAX_LAYERS
from swarmnode.catalog.slices import layer_of
from swarmnode.cluster.quantization import INT4_CARD, stored_as
from swarmnode.compute.device import int4_obstacle, pick_device
from swarmnode.compute.engine import TorchEngine
from swarmnode.compute.freed_memory import return_freed_memory, returning_large_blocks
from swarmnode.compute.gguf_blocks import Q4Blocks, check_blocks, find_blocks
from swarmnode.compute.lean_loading import LeanBuilder
from swarmnode.compute.lora import find_adapter
from swarmnode.compute.memory_errors import lacks_memory
from swarmnode.compute.model_config import read_config
from swarmnode.compute.spec import BNB_METHODS, PACKED_METHODS, serving_dtype
from swarmnode.compute.stage_model import StageModel
from swarmnode.compute.stored_tensors import Part, find_tensors, parts_of
from swarmnode.compute.tensor_reader import StoredMatrix, TensorReader
from swarmnode.errors import KernelsFailed, LoadRefused

if TYPE_CHECKING:
    from collections.abc import Mapping

    from swarmnode.compute.spec import StageSpec
    from swarmnode.compute.stored_tensors import Stored
    from swarmnode.compute.tensor_reader import Progress


def load_stage(spec: StageSpec, progress: Progress | None = None) -> TorchEngine:
    """Load the slice and prove with one position that it runs; raises LoadRefused, LoadFailed or InvalidModel."""
    with returning_large_blocks():
        engine = _load(spec, progress)
        return_freed_memory()
        _prove(engine)
        return_freed_memory()
    return engine


def _load(spec: StageSpec, progress: Progress | None) -> TorchEngine:
    if spec.threads:
        torch.set_num_threads(spec.threads)
    device = pick_device(spec.device)
    config = read_config(spec.folder)
    stored = find_tensors(spec.files)
    kernels = stored_as(spec.quantization, on_card=device.type == "cuda")
    _check_kernels(kernels, device)
    dtype = getattr(torch, serving_dtype(spec.dtype, _stored_dtype(stored), spec.quantization))
    model = StageModel(spec, config, dtype, device)
    adapter = find_adapter(spec.folder, stored, spec.quantization, device)
    wants_lean = (spec.lean and spec.quantization not in BNB_METHODS) or spec.quantization in PACKED_METHODS
    lean = LeanBuilder(model, model.parameters(), kernels, adapter) if wants_lean else None
    merge = None if adapter is None else adapter.merge
    blocks = find_blocks(stored) if reads_blocks(spec.quantization, adapted=adapter is not None) else {}
    reader = TensorReader(model.dtype, model.device, progress, merge)
    _fill(model, stored, blocks, reader, lean)
    if lean is not None:
        lean.finish()
        reader.report()
    elif adapter is not None:
        adapter.attach(model)
    model.finish()
    return TorchEngine(model)


def _check_kernels(kernels: str, device: torch.device) -> None:
    """Raise KernelsFailed where they do not run; makes the card the current one, where torchao looks for it."""
    if device.type == "cpu":
        return
    torch.cuda.set_device(device)
    if kernels in PACKED_METHODS:
        raise KernelsFailed(f"{kernels} packs weights for the CPU's kernels, and this stage is on {device}")
    if kernels == INT4_CARD and (obstacle := int4_obstacle(device)):
        raise KernelsFailed(f"{INT4_CARD} cannot be served: {obstacle}")


def _stored_dtype(stored: Mapping[str, Stored]) -> str:
    """The dtype that most of the bytes have."""
    sizes: dict[str, int] = {}
    for tensor in stored.values():
        sizes[tensor.entry.dtype] = sizes.get(tensor.entry.dtype, 0) + tensor.entry.size_bytes
    return max(sizes, key=sizes.__getitem__)


def _fill(
    model: StageModel,
    stored: dict[str, Stored],
    blocks: Mapping[str, tuple[Stored, str]],
    reader: TensorReader,
    lean: LeanBuilder | None,
) -> None:
    """Set every parameter, from its blocks where there are some; `blocks` are for a lean decoder only."""
    if model.tied and not model.is_first and "lm_head.weight" in stored:
        stored = {**stored, model.embedding_name: stored["lm_head.weight"]}
    shapes = {name: tuple(p.shape) for name, p in model.parameters().items()}
    chosen = parts_of({name: shape for name, shape in shapes.items() if name not in blocks}, stored, model.outer)
    for name in shapes.keys() & blocks.keys():
        check_blocks(*blocks[name], shapes[name])
        chosen[name] = (Part(blocks[name][0]),)
    reader.total = sum(part.stored.entry.size_bytes for parts in chosen.values() for part in parts)
    last_layer = None
    for name, parts in sorted(chosen.items(), key=lambda item: _reading_order(*item, is_first=model.is_first)):
        if model.quantized and layer_of(name) != last_layer:
            return_freed_memory()  # else the dense block that was quantized last stays beside the next one
            last_layer = layer_of(name)
        if lean is not None and lean.packs_from_file(name):
            lean.stored_head = StoredMatrix(reader, parts[0].stored)
            continue
        room = lean.room(name) if lean is not None else None
        if lean is not None and name in blocks:
            _fill_from_blocks(model, name, Q4Blocks(reader.read_bytes(parts[0].stored), blocks[name][1]), lean, room)
            continue
        model.set_parameter(name, reader.read(parts, shapes[name], room))
        if lean is not None:
            lean.loaded(name)
    reader.report()


def _fill_from_blocks(
    model: StageModel, name: str, blocks: Q4Blocks, lean: LeanBuilder, room: torch.Tensor | None
) -> None:
    """The dense weight for the proof of its layer, and the blocks to pack it from; the builder alone keeps them."""
    if room is None:
        room = torch.empty((blocks.rows, blocks.inputs), dtype=model.dtype, device=model.device)
    model.set_parameter(name, blocks.dequantized(model.dtype, room))
    lean.loaded(name, blocks)


def _reading_order(name: str, parts: tuple[Part, ...], *, is_first: bool) -> tuple[int, str, int]:
    """Layer by layer, so that a block is complete before the next begins; within it as the bytes lie in the files. A
    head, which may be the largest of all, comes when the blocks are quantized; on a later stage an embedding's table is
    one."""
    layer = layer_of(name)
    if layer is None:
        layer = -1 if "embed_tokens" in name and is_first else MAX_LAYERS
    return (layer, str(parts[0].stored.path), parts[0].stored.entry.begin)


def _prove(engine: TorchEngine) -> None:
    """One throwaway position: parts that were not understood raise here, before the ring counts on this stage."""
    try:
        engine.probe()
    except LoadRefused:
        raise
    except Exception as error:  # whatever the family's own code raises
        if lacks_memory(error):
            raise
        raise LoadRefused(f"the loaded slice does not run: {type(error).__name__}: {str(error)[:500]}") from error
