"""One Llama-shaped block over fused weights: what a lean decoder runs layer by layer.

A block is recognised by its parts (which projections, norms and biases it has), never by its family's name, and shares
its weights with transformers' own block, whose parameters become views of the fused ones. Whether the recognition was
right is proved at load: `lean_decoder.py` runs both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import rms_norm, silu

from swarmnode.cluster.quantization import INT4_CARD
from swarmnode.compute.attention import attend
from swarmnode.compute.card_projection import on_card
from swarmnode.compute.compiled_dense import CompiledDense, dense
from swarmnode.compute.compiled_step import BlockParts, Gain
from swarmnode.compute.projections import DenseProjection
from swarmnode.compute.tiled_projections import TiledProjection, packed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from swarmnode.compute.attention import AttentionSettings
    from swarmnode.compute.kv_cache import StepCache
    from swarmnode.compute.projections import Placed, Projection

_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
MATRICES: Mapping[str, tuple[str, ...]] = {
    "qkv": tuple(f"self_attn.{name}" for name in _QKV),
    "o": ("self_attn.o_proj",),
    "gate_up": tuple(f"mlp.{name}" for name in _GATE_UP),
    "down": ("mlp.down_proj",),
}
"""A block's matrices in the order they are multiplied, each with the projections whose rows it holds one below the
other."""
_PRE_NORMS = {"input_layernorm", "post_attention_layernorm"}
_SANDWICH_NORMS = _PRE_NORMS | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}


class NotLean(Exception):
    """This block is not one that the lean decoder computes; says why. Never leaves the loader."""


class Norm:
    """RMS norm. `offset`: the gain is stored as its distance from one and applied in float32 (Gemma)."""

    __slots__ = ("_eps", "_offset", "_shape", "_weight")

    def __init__(self, module: Any) -> None:
        weight = module.weight
        self._eps = float(module.eps if hasattr(module, "eps") else module.variance_epsilon)
        self._shape = (weight.shape[-1],)
        ones = torch.ones_like(weight)
        self._offset = bool((module(ones).float() - weight.float()).mean() > 0.5)
        self._weight = (1.0 + weight.float()) if self._offset else weight

    def gain(self) -> Gain:
        """As compiled code takes it."""
        return Gain(self._weight.detach().float().contiguous(), self._eps)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self._offset:
            return rms_norm(rows.float(), self._shape, self._weight, self._eps).to(rows.dtype)
        return rms_norm(rows, self._shape, self._weight, self._eps)


@dataclass(slots=True)
class FusedWeights:
    """Room for one block's matrices; the parts are row slices, in the order they are multiplied."""

    rooms: dict[str, torch.Tensor]
    """By parameter name within the block, each a view of its matrix."""
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None


def fused_room(block: Any, dtype: torch.dtype, device: torch.device) -> FusedWeights:
    """Allocate a block's fused matrices; raises NotLean if its parts are not a Llama-shaped block's."""
    _check_parts(block)
    rooms: dict[str, torch.Tensor] = {}
    matrices = [
        _joined(getattr(block, owner), owner, names, leaf, rooms, dtype, device)
        for owner, names in (("self_attn", _QKV), ("mlp", _GATE_UP))
        for leaf in ("weight", "bias")
    ]
    qkv, qkv_bias, gate_up, gate_up_bias = matrices
    assert qkv is not None
    assert gate_up is not None
    return FusedWeights(rooms, qkv, qkv_bias, gate_up, gate_up_bias)


def _check_parts(block: Any) -> None:
    parts = {name for name, _ in block.named_children()}
    norms = parts - {"self_attn", "mlp"}
    if norms not in (_PRE_NORMS, _SANDWICH_NORMS):
        raise NotLean(f"its blocks are made of {', '.join(sorted(parts))}")
    attention = {name for name, _ in block.self_attn.named_children()}
    if attention - {"q_norm", "k_norm"} != {*_QKV, "o_proj"} or len(attention & {"q_norm", "k_norm"}) == 1:
        raise NotLean(f"its attention is made of {', '.join(sorted(attention))}")
    mlp = {name for name, _ in block.mlp.named_children()}
    if mlp - {"act_fn"} != {*_GATE_UP, "down_proj"}:
        raise NotLean(f"its MLP is made of {', '.join(sorted(mlp))}")
    direct = [
        name for module in (block, block.self_attn, block.mlp) for name, _ in module.named_parameters(recurse=False)
    ]
    if direct:
        raise NotLean(f"its blocks hold {', '.join(direct)}")


def _joined(
    module: Any,
    owner: str,
    names: Sequence[str],
    leaf: str,
    rooms: dict[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor | None:
    parts = [getattr(getattr(module, name), leaf, None) for name in names]
    present = [part for part in parts if part is not None]
    if not present:
        return None
    if len(present) != len(parts):
        raise NotLean(f"only some of {', '.join(names)} have a {leaf}")
    sizes = [part.shape[0] for part in present]
    matrix = torch.empty((sum(sizes), *present[0].shape[1:]), dtype=dtype, device=device)
    for name, view in zip(names, torch.split(matrix, sizes), strict=True):
        rooms[f"{owner}.{name}.{leaf}"] = view
    return matrix


def rows_of(block: Any, matrix: str) -> Iterator[tuple[str, int, int]]:
    """The projections of one of MATRICES, with the rows begin … end-1 that are theirs."""
    begin = 0
    for name in MATRICES[matrix]:
        end = begin + block.get_submodule(name).out_features
        yield name, begin, end
        begin = end


class LeanBlock:
    """One block, its weights filled. `settings` are what transformers' own block asks of attention."""

    def __init__(self, block: Any, fused: FusedWeights, settings: AttentionSettings) -> None:
        attention = block.self_attn
        self.settings = settings
        self.rotates = bool(getattr(attention, "use_rope", True))
        self._head_dim = int(attention.head_dim)
        self._heads = attention.q_proj.out_features // self._head_dim
        self._kv_heads = attention.k_proj.out_features // self._head_dim
        self._q_norm = Norm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self._k_norm = Norm(attention.k_norm) if hasattr(attention, "k_norm") else None
        sandwich = hasattr(block, "pre_feedforward_layernorm")
        self._norm = Norm(block.input_layernorm)
        self._attention_norm = Norm(block.post_attention_layernorm) if sandwich else None
        self._mlp_norm = Norm(block.pre_feedforward_layernorm if sandwich else block.post_attention_layernorm)
        self._output_norm = Norm(block.post_feedforward_layernorm) if sandwich else None
        self._activation: Callable[[torch.Tensor], torch.Tensor] = block.mlp.act_fn
        if isinstance(block.mlp.act_fn, nn.SiLU) or type(block.mlp.act_fn).__name__ == "SiLUActivation":
            self._activation = silu
        o_proj, down = attention.o_proj, block.mlp.down_proj
        self._matrices: tuple[tuple[torch.Tensor, torch.Tensor | None], ...] = (
            (fused.qkv, fused.qkv_bias),
            (o_proj.weight, o_proj.bias),
            (fused.gate_up, fused.gate_up_bias),
            (down.weight, down.bias),
        )
        self._bind([DenseProjection(weight, bias) for weight, bias in self._matrices])

    def settle(self, method: str, blocks: Mapping[str, Sequence[Placed]]) -> None:
        """Choose the kernels: "none" keeps the dense matrices, the others replace them by packed ones. A CPU's four
        bits are made from `blocks`, by matrix, where there are some."""
        if method == INT4_CARD:
            self._bind([on_card(weight, bias) for weight, bias in self._matrices])
            self._matrices = ()
            return
        if method != "none":
            named = zip(MATRICES, self._matrices, strict=True)
            self._bind([packed(method, weight, bias, blocks.get(name, ())) for name, (weight, bias) in named])
            self._matrices = ()
            return
        products = [dense(weight, bias) for weight, bias in self._matrices]
        for product in products:
            product.measure()
        self._bind(products)

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The block's matrix products, in the order they run."""
        return self._qkv, self._o, self._gate_up, self._down

    def wrap(self, wrapped: Callable[[str, Projection], Projection]) -> None:
        """Replace each projection by what `wrapped` makes of it; its name is qkv, o, gate_up or down."""
        named = {"qkv": self._qkv, "o": self._o, "gate_up": self._gate_up, "down": self._down}
        self._bind([wrapped(name, projection) for name, projection in named.items()])

    def size_bytes(self) -> int:
        return sum(projection.size_bytes() for projection in self.projections)

    def parts(self) -> BlockParts | None:
        """What a compiled step computes with; None where it would compute something else. It knows neither norms behind
        attention and MLP, nor other gates than silu, nor changed scores; a mode that was asked for is torch's."""
        products = [each for each in self.projections if isinstance(each, TiledProjection | CompiledDense)]
        settings = self.settings
        sandwich = self._attention_norm is not None or self._output_norm is not None
        if len(products) != len(MATRICES) or sandwich or self._activation is not silu:
            return None
        if settings.explicit or settings.mode != "auto":
            return None
        qkv, o, gate_up, down = products
        return BlockParts(
            qkv=qkv,
            o=o,
            gate_up=gate_up,
            down=down,
            heads=self._heads,
            kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            window=settings.window,
            scaling=self._head_dim**-0.5 if settings.scaling is None else settings.scaling,
            rotates=self.rotates,
            input_gain=self._norm.gain(),
            mlp_gain=self._mlp_norm.gain(),
            query_gain=None if self._q_norm is None else self._q_norm.gain(),
            key_gain=None if self._k_norm is None else self._k_norm.gain(),
        )

    def _bind(self, projections: Sequence[Projection]) -> None:
        self._qkv, self._o, self._gate_up, self._down = projections

    def __call__(
        self,
        rows: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        step: StepCache,
        layer: int,
    ) -> torch.Tensor:
        """(batch, n, hidden) → the same, the layer's KV appended."""
        attended = self._o(self._attend(self._norm(rows), rotation, step, layer))
        if self._attention_norm is not None:
            attended = self._attention_norm(attended)
        rows = rows + attended
        gate, up = torch.chunk(self._gate_up(self._mlp_norm(rows)), 2, -1)
        out = self._down(self._activation(gate).mul_(up))
        if self._output_norm is not None:
            out = self._output_norm(out)
        return rows.add_(out)

    def _attend(
        self, rows: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], step: StepCache, layer: int
    ) -> torch.Tensor:
        batch, n, _ = rows.shape
        heads = self._qkv(rows).view(batch, n, -1, self._head_dim)
        turned, values = torch.split(heads, [self._heads + self._kv_heads, self._kv_heads], 2)
        if self._q_norm is not None and self._k_norm is not None:
            query, keys = torch.split(turned, [self._heads, self._kv_heads], 2)
            turned = torch.cat((self._q_norm(query), self._k_norm(keys)), 2)
        if self.rotates:
            cos, sin = rotation
            turned = torch.addcmul(turned * cos, turned.roll(self._head_dim // 2, -1), sin)
        query, keys = torch.split(turned.transpose(1, 2), [self._heads, self._kv_heads], 1)
        views = step.append(layer, keys, values.transpose(1, 2))
        return attend(query, views, self.settings).reshape(batch, n, -1)
