"""LoRA adapters on a stage's projections: merged into full-precision weights, kept beside quantized ones.

W + s·B·A is merged as the weight is read, in float32, before it is packed or used; with DoRA its rows are then scaled
to the trained magnitudes. Beside a quantized weight the product is added to each row's result: by a few lines here
(`lean` in float32, `lean16` in the serving dtype), or by PEFT's own modules (`peft`, and DoRA over NF4).
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import linear

from swarmnode.catalog.adapter import MAGNITUDE, A, B, read_scales
from swarmnode.cluster.quantization import merges_adapter
from swarmnode.compute.lean_block import rows_of
from swarmnode.compute.spec import BNB_METHODS
from swarmnode.compute.stored_tensors import Part
from swarmnode.compute.tensor_reader import TensorReader
from swarmnode.errors import LoadFailed, LoadRefused

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from swarmnode.catalog.adapter import AdaptedModule
    from swarmnode.compute.lean_block import LeanBlock
    from swarmnode.compute.projections import Projection
    from swarmnode.compute.stage_model import StageModel
    from swarmnode.compute.stored_tensors import Stored

MODES = ("lean", "lean16", "peft")
_MISSING = (
    "peft is not installed on this peer, which DoRA over NF4 and SWARM_SERVE_LORA=peft need; install it there, name "
    "other peers, or load without quantization"
)
_MERGED_ELEMENTS = 1 << 20
"""Of a weight, merged at a time: what is held beside the slice is 4 MiB."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """One projection's adapter: result + (rows · aᵀ) · bᵀ, the scale already in b."""

    a: torch.Tensor
    b: torch.Tensor


def lora_mode() -> str:
    """SWARM_SERVE_LORA; raises LoadRefused for a value that is none of MODES."""
    mode = os.environ.get("SWARM_SERVE_LORA", "lean") or "lean"
    if mode not in MODES:
        raise LoadRefused(f"SWARM_SERVE_LORA is {mode[:40]!r}; allowed are {', '.join(MODES)}")
    return mode


def find_adapter(
    folder: Path, stored: Mapping[str, Stored], quantization: str, device: torch.device
) -> StageAdapter | None:
    """The servable's adapter; None where it has none."""
    scales = read_scales(folder)
    return None if scales is None else StageAdapter(scales, stored, quantization, device, lora_mode())


class StageAdapter:
    """What of an adapter the stage's files hold, and how it is applied under this quantization."""

    def __init__(
        self,
        modules: Mapping[str, AdaptedModule],
        stored: Mapping[str, Stored],
        quantization: str,
        device: torch.device,
        mode: str,
    ) -> None:
        self._modules, self._stored = modules, stored
        self._reader = TensorReader(torch.float32, device)
        self._dora = any(module.dora for module in modules.values())
        self.merges = merges_adapter(quantization, dora=self._dora)
        if mode == "peft" and not self.merges and quantization not in BNB_METHODS:
            raise LoadRefused(
                f"SWARM_SERVE_LORA=peft: PEFT runs over {' and '.join(BNB_METHODS)} weights, not {quantization}; load "
                "with one of those, or set lean or lean16 on this peer"
            )
        self._by_peft = quantization in BNB_METHODS and (mode == "peft" or self._dora)
        self._half = mode == "lean16"

    def merge(self, name: str, weight: torch.Tensor) -> None:
        """Add the adapter to a stored tensor that was just read, in place."""
        module = name.removesuffix(".weight")
        if not self.merges or module not in self._modules or name == module:
            return
        a, b = self._read(module, A), self._read(module, B)
        scale = self._modules[module].scale
        magnitude = self._read(module, MAGNITUDE) if self._dora else None
        step = max(1, _MERGED_ELEMENTS // weight.shape[1])
        for begin in range(0, weight.shape[0], step):
            rows = slice(begin, begin + step)
            whole = weight[rows].float() + scale * (b[rows] @ a)
            if magnitude is not None:
                whole *= (magnitude[rows] / torch.linalg.norm(whole, dim=1)).unsqueeze(1)
            weight[rows] = whole.to(weight.dtype)

    def attach(self, model: StageModel) -> None:
        """Put what was not merged beside the projections of transformers' own blocks; after all weights are set."""
        if self.merges:
            return
        layers = range(model.first_layer, model.first_layer + model.num_layers)
        ours = {name for name in self._modules if int(name.split(".")[2]) in layers}
        if self._by_peft:
            self._inject(model, sorted(ours))
            return
        for name in ours:
            owner, _, leaf = name.rpartition(".")
            parent = model.block(int(name.split(".")[2])).get_submodule(owner.split(".", 3)[3])
            setattr(parent, leaf, LoraLinear(getattr(parent, leaf), self._low_rank(name, model.dtype)))

    def beside(self, model: StageModel, layer: int, block: LeanBlock) -> None:
        """Put what was not merged beside a lean block's packed projections."""
        if self.merges:
            return
        own = model.block(layer)

        def adapted(matrix: str, projection: Projection) -> Projection:
            parts = [
                (begin, end, self._low_rank(full, model.dtype))
                for name, begin, end in rows_of(own, matrix)
                if (full := f"model.layers.{layer}.{name}") in self._modules
            ]
            return AdaptedProjection(projection, parts) if parts else projection

        block.wrap(adapted)

    def _inject(self, model: StageModel, names: Sequence[str]) -> None:
        """PEFT's own modules around the stage's projections, their layers counted from the stage's first."""
        if importlib.util.find_spec("peft") is None:
            raise LoadRefused(_MISSING)
        from peft import LoraConfig, inject_adapter_in_model

        local = {name: model.module_name(name) for name in names}
        ranks = {local[name]: self._modules[name].rank for name in names}
        alphas = {local[name]: self._modules[name].scale * self._modules[name].rank for name in names}
        make: Any = LoraConfig
        config = make(target_modules=list(ranks), rank_pattern=ranks, alpha_pattern=alphas, use_dora=self._dora)
        inject_adapter_in_model(config, model.outer)
        for name in names:
            layer: Any = model.outer.get_submodule(local[name])
            _fill(layer.lora_A["default"], self._read(name, A))
            _fill(layer.lora_B["default"], self._read(name, B))
            if self._dora:
                magnitude = layer.lora_magnitude_vector["default"]
                _fill(magnitude, self._read(name, MAGNITUDE))

    def _low_rank(self, name: str, dtype: torch.dtype) -> LowRank:
        kept = dtype if self._half else torch.float32
        b = self._read(name, B) * self._modules[name].scale
        return LowRank(self._read(name, A).to(kept), b.to(kept))

    def _read(self, module: str, leaf: str) -> torch.Tensor:
        """A tensor of the adapter in float32."""
        stored = self._stored.get(f"{module}.{leaf}")
        if stored is None:
            raise LoadFailed(f"the stage's files lack tensor {module}.{leaf!r} of the adapter")
        return self._reader.read((Part(stored),), stored.entry.shape)


class LoraLinear(nn.Module):
    """A quantized linear layer with its adapter beside it; what PEFT computes, without its bookkeeping per call."""

    def __init__(self, inner: nn.Module, low: LowRank) -> None:
        super().__init__()
        self.inner, self._low = inner, low

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(rows)
        return result + _product(rows, self._low).to(result.dtype)


class AdaptedProjection:
    """A packed projection with the adapters of its parts, each for the output rows begin … end-1."""

    __slots__ = ("_a", "_inner", "_parts", "_ranks")

    def __init__(self, inner: Projection, parts: Sequence[tuple[int, int, LowRank]]) -> None:
        self._inner = inner
        self._a = torch.cat([low.a for _, _, low in parts])
        self._ranks = [low.a.shape[0] for _, _, low in parts]
        self._parts = [(begin, end, low.b) for begin, end, low in parts]

    @property
    def kernels(self) -> str:
        return self._inner.kernels

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        result = self._inner(rows)
        shrunk = torch.split(linear(rows.to(self._a.dtype), self._a), self._ranks, -1)
        for (begin, end, b), narrow in zip(self._parts, shrunk, strict=True):
            result[..., begin:end] += linear(narrow, b).to(result.dtype)
        return result

    def size_bytes(self) -> int:
        return self._inner.size_bytes() + self._a.nbytes + sum(b.nbytes for _, _, b in self._parts)


def _product(rows: torch.Tensor, low: LowRank) -> torch.Tensor:
    return linear(linear(rows.to(low.a.dtype), low.a), low.b)


def _fill(module: Any, value: torch.Tensor) -> None:
    module.weight = nn.Parameter(value.to(module.weight.dtype), requires_grad=False)
