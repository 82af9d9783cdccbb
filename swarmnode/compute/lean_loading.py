"""Build a stage's lean decoder while its tensors are read, block by block, and prove each block as it is complete.

Tensors are read straight into the fused matrices; transformers' own block gets views of them, so both exist at the
cost of one. Then both run the same probe. Only a block that reproduced transformers' result is packed to fewer bits,
and only then is its dense memory let go: a quantized load holds its slice and one dense block. A head that is packed is
read some rows at a time, for it may be larger than any block.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from swarmnode.catalog.slices import layer_of
from swarmnode.cluster.quantization import HEAD_BYTES_PER_PARAM
from swarmnode.compute.attention import attention_mode
from swarmnode.compute.compiled_dense import dense
from swarmnode.compute.compiled_step import compiled_step
from swarmnode.compute.few_rows import hasten_few_rows
from swarmnode.compute.kv_cache import SessionCache, StepCache
from swarmnode.compute.lean_block import MATRICES, LeanBlock, Norm, NotLean, fused_room, rows_of
from swarmnode.compute.lean_decoder import LeanDecoder, LeanTail, RotaryTable, signed
from swarmnode.compute.one_layer import drive_layer, family_logits, see_entry, see_head
from swarmnode.compute.tiled_projections import packed
from swarmnode.errors import KernelsFailed, StageFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from swarmnode.compute.attention import AttentionSettings
    from swarmnode.compute.compiled_step import BlockParts
    from swarmnode.compute.gguf_blocks import Q4Blocks
    from swarmnode.compute.lean_block import FusedWeights
    from swarmnode.compute.lora import StageAdapter
    from swarmnode.compute.projections import Placed
    from swarmnode.compute.stage_model import StageModel
    from swarmnode.compute.tensor_reader import StoredMatrix

    Tail = Callable[[torch.Tensor], torch.Tensor]
    """(batch, n, hidden) → logits of the last position."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference between the two results of a block, as a share of the largest change the block makes. bfloat16
rounds every intermediate to 8 bits, in another order in each of the two."""
_PIECE, _SCALE = 5, 0.05
"""A probe is a piece of five positions and one decode step; small rows, so that what the block adds is what counts."""
HEAD_METHOD = "int8"
"""A head decides between near-equal tokens: it is packed to eight bits whatever the blocks are packed to, and on a card
it is left as it is."""

_log = logging.getLogger("swarmnode.compute.lean")


class LeanBuilder:
    """Told of every tensor in turn: `room` before it is read, `loaded` after, `finish` at the end."""

    def __init__(
        self, model: StageModel, names: Iterable[str], method: str, adapter: StageAdapter | None = None
    ) -> None:
        self._model, self._method, self._adapter = model, method, adapter
        self._mode = attention_mode()
        self._missing: dict[int, set[str]] = {}
        for name in names:
            if (layer := layer_of(name)) is not None:
                self._missing.setdefault(layer, set()).add(name)
        self._fused: dict[int, FusedWeights] = {}
        self._kept: dict[int, dict[str, Q4Blocks]] = {}
        self._blocks: dict[int, LeanBlock] = {}
        self.stored_head: StoredMatrix | None = None
        """The head, where `packs_from_file` said so."""
        self.reason: str | None = None
        """Why transformers' own blocks serve; None while the lean ones do."""

    def packs_from_file(self, name: str) -> bool:
        """Whether this is a head of which nobody needs the full precision: it is then not to be read before."""
        model = self._model
        if not model.is_last or name != model.head_name or self._method not in HEAD_BYTES_PER_PARAM:
            return False
        return not (model.tied and model.is_first)

    def room(self, name: str) -> torch.Tensor | None:
        """Where to read a tensor; None where it stands alone."""
        layer = layer_of(name)
        if layer is None or self.reason is not None:
            return None
        try:
            if layer not in self._fused:
                block = self._model.block(layer)
                self._fused[layer] = fused_room(block, self._model.dtype, self._model.device)
        except NotLean as error:
            self._give_up(str(error))
            return None
        return self._fused[layer].rooms.get(_within_block(name))

    def loaded(self, name: str, blocks: Q4Blocks | None = None) -> None:
        """A tensor was read, dequantized from `blocks` if given, and set; completes its layer's block if it was the
        last one."""
        layer = layer_of(name)
        if layer is None or self.reason is not None:
            return
        if blocks is not None:
            self._kept.setdefault(layer, {})[_within_block(name)] = blocks
        self._missing[layer].discard(name)
        if not self._missing[layer]:
            with torch.inference_mode():
                self._complete(layer)

    def finish(self) -> None:
        """Hand the proven decoder to the model, or say in the log why there is none."""
        model = self._model
        if self.reason is None:
            with torch.inference_mode():
                self._finish()
        if self.reason is not None:
            _log.warning("%s: transformers' own blocks serve this stage: %s", model.name, self.reason)

    def _finish(self) -> None:
        model = self._model
        layers = sorted(self._blocks)
        try:
            if model.is_first:
                _check_entry(model)
            kinds = [model.layer_kind(layer) for layer in layers]
            tables = {kind: _rotary_table(model, layers[kinds.index(kind)]) for kind in set(kinds)}
        except NotLean as error:
            self._give_up(str(error))
            return
        decoder = LeanDecoder([self._blocks[layer] for layer in layers], kinds, tables)
        tail = self._tail() if model.is_last else None
        hasten_few_rows(projection for block in decoder.blocks for projection in block.projections)
        hasten_few_rows([tail.head] if isinstance(tail, LeanTail) else [])
        _use_compiled(model, decoder)
        model.use_lean(decoder, tail)

    def _tail(self) -> Tail:
        """Norm and head if that is all the family does after its last block, else the family's own code."""
        model, stored = self._model, self.stored_head
        try:
            norm = _proven_norm(model)
        except (AttributeError, NotLean) as error:
            _log.info("%s: its own norm and head serve the last stage: %s", model.name, error)
            if stored is not None:
                model.set_parameter(model.head_name, stored[:])
            return lambda rows: _family_logits(model, rows)
        weight, bias = model.outer.lm_head.weight, model.outer.lm_head.bias
        if self._method not in HEAD_BYTES_PER_PARAM:
            head = dense(weight, bias)
            head.measure()
            return LeanTail(norm, head)
        with self._packing():
            packed_head = packed(HEAD_METHOD, weight if stored is None else stored, bias)
        if stored is not None:
            model.outer.lm_head.to("meta")
        return LeanTail(norm, packed_head)

    def _complete(self, layer: int) -> None:
        model, fused = self._model, self._fused.pop(layer)
        try:
            block = _prove(model, layer, fused, self._mode)
        except NotLean as error:
            self._give_up(str(error))
            return
        with self._packing():
            block.settle(self._method, _placed(model.block(layer), self._kept.pop(layer, {})))
        if self._adapter is not None:
            self._adapter.beside(model, layer, block)
        self._blocks[layer] = block
        if self._method != "none":
            model.block(layer).to("meta")

    @contextmanager
    def _packing(self) -> Iterator[None]:
        """Packing runs the kernels: what they raise in this block is why another quantization serves."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, RuntimeError) as error:
            if self._method == "none":
                raise
            raise KernelsFailed(
                f"the kernels for {self._method} do not run here: {type(error).__name__}: {str(error)[:200]}"
            ) from error

    def _give_up(self, reason: str) -> None:
        if self._method != "none":
            raise KernelsFailed(
                f"architecture {self._model.name!r} cannot be served with {self._method}, whose kernels need "
                f"Llama-shaped blocks: {reason}"
            )
        self.reason = reason


def _within_block(name: str) -> str:
    return name.split(".", 3)[3]


def _placed(block: Any, kept: Mapping[str, Q4Blocks]) -> dict[str, list[Placed]]:
    """By matrix, the blocks of its parts."""
    return {
        matrix: [
            (begin, kept[f"{name}.weight"]) for name, begin, _ in rows_of(block, matrix) if f"{name}.weight" in kept
        ]
        for matrix in MATRICES
    }


def _prove(model: StageModel, layer: int, fused: FusedWeights, mode: str) -> LeanBlock:
    """The lean block, having reproduced the family's own on a piece and a step; raises NotLean if it did not."""
    rows = _probe_rows(model, _PIECE + 1)
    theirs, ours = SessionCache(1), SessionCache(1)
    lean: LeanBlock | None = None
    for part, start in ((rows[:, :_PIECE], 0), (rows[:, _PIECE:], _PIECE)):
        positions = torch.arange(start, start + part.shape[1], device=model.device)[None]
        asked: list[AttentionSettings] = []
        seen = drive_layer(model.base, layer - model.first_layer, part, positions, [theirs], asked)
        if seen.rotation is None or len(asked) != 1:
            raise NotLean("its rotary positions or its attention are computed inside its blocks")
        try:
            lean = lean or LeanBlock(model.block(layer), fused, replace(asked[0], mode=mode))
            cos, sin = signed(seen.rotation)
            found = lean(part, (cos.unsqueeze(2), sin.unsqueeze(2)), StepCache([ours], 0), 0)
        except (AttributeError, RuntimeError) as error:  # a part is not what its name says
            raise NotLean(f"block {layer}: {error}") from error
        _compare(found, seen.result, part, TOLERANCE[model.dtype], f"block {layer}")
    assert lean is not None
    return lean


def _use_compiled(model: StageModel, decoder: LeanDecoder) -> None:
    """Let compiled code take steps of few rows, where it knows all of the blocks and reproduced each of them."""
    parts = [block.parts() for block in decoder.blocks]
    if any(part is None or part.dtype != model.dtype for part in parts):
        return
    try:
        step = compiled_step(parts)
        if step is not None:
            _prove_compiled(model, decoder, parts)
            decoder.use_compiled(step, below=step.many_rows)
    except (NotLean, StageFailed, ValueError) as error:
        _log.warning("%s: torch's operations serve each step: %s", model.name, error)


def _prove_compiled(model: StageModel, decoder: LeanDecoder, parts: Sequence[BlockParts | None]) -> None:
    """Raises NotLean for a block whose compiled step gives something else, StageFailed or ValueError for one whose
    step takes something else."""
    rows, positions = _probe_rows(model, _PIECE + 1), torch.arange(_PIECE + 1)[None]
    before, now = (decoder.rotations(part) for part in (positions[:, :_PIECE], positions[:, _PIECE:]))
    for layer, block in enumerate(decoder.blocks):
        theirs, ours = SessionCache(1), SessionCache(1)
        for cache in (theirs, ours):
            block(rows[:, :_PIECE], before[layer], StepCache([cache], 0), 0)
        alone, last = compiled_step(parts[layer : layer + 1]), rows[:, _PIECE:]
        assert alone is not None
        expected = block(last, now[layer], StepCache([theirs], 0), 0)
        found = alone.run(last, now[layer : layer + 1], [ours])
        _compare(found, expected, last, TOLERANCE[model.dtype], f"compiled block {model.first_layer + layer}")


def _check_entry(model: StageModel) -> None:
    """Stage 0 feeds its blocks what the embeddings give; a family that changes that on the way is not computed."""
    ids = torch.arange(4, device=model.device)[None] % model.config.vocab_size
    embedded = model.embed(ids)
    entered = see_entry(model.base, 0, embedded, torch.arange(4, device=model.device)[None]).entered
    if not torch.equal(entered, embedded):
        raise NotLean("its forward changes the embeddings before the first block")


def _rotary_table(model: StageModel, layer: int) -> RotaryTable:
    def compute(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = positions.to(model.device)
        rows = torch.zeros((1, 1, 1), dtype=model.dtype, device=model.device)
        seen = see_entry(
            model.base, layer - model.first_layer, rows.expand(1, positions.shape[1], model.hidden_size), positions
        )
        if seen.rotation is None:
            raise NotLean("its rotary positions are computed inside its blocks")
        return seen.rotation

    return RotaryTable(compute)


def _proven_norm(model: StageModel) -> Norm:
    """The final norm, having given what the family gives its head; raises NotLean or AttributeError if it did not."""
    norm, rows = Norm(model.base.norm), _probe_rows(model, 2)
    entered, untouched = see_head(model.outer, rows, torch.arange(2, device=model.device)[None])
    if not untouched:
        raise NotLean("its forward changes the head's logits")
    _compare(norm(rows[:, -1]), entered, torch.zeros(()), TOLERANCE[model.dtype], "the final norm")
    return norm


def _family_logits(model: StageModel, rows: torch.Tensor) -> torch.Tensor:
    start = torch.zeros((rows.shape[0], 1), dtype=torch.long, device=model.device)
    return family_logits(model.outer, rows[:, -1:], start)


def _probe_rows(model: StageModel, n: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    rows = torch.randn((1, n, model.hidden_size), generator=generator) * _SCALE
    return rows.to(dtype=model.dtype, device=model.device)


def _compare(ours: torch.Tensor, theirs: torch.Tensor, before: torch.Tensor, tolerance: float, what: str) -> None:
    if ours.shape != theirs.shape:
        raise NotLean(f"{what} gives {list(ours.shape)} instead of {list(theirs.shape)}")
    change = (theirs.float() - before.float()).abs().max()
    difference = float((ours.float() - theirs.float()).abs().max() / change.clamp(min=1e-30))
    if not difference <= tolerance:
        raise NotLean(f"{what} differs by {difference:.1e} of what it changes, {tolerance:.0e} is allowed")
