"""One stage's slice of a transformers model: build it without memory, prove its shape, run it.

The whole model is built on the meta device, which costs no memory, so that every layer is made with its true index
(sliding or global, rope kind). Then only the slice's layers are kept and the family's own `forward` is driven: what a
family does before, between and after its layers stays its own code. What a stage does not have is replaced: embeddings
of later stages by the rows that arrived, the final norm and the head of earlier stages by nothing.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from swarmnode.compute import bnb
from swarmnode.compute.attention import ATTENTION_NAME, attention_mode
from swarmnode.compute.hybrid import HybridStepCache, wrap_mixers
from swarmnode.compute.kv_cache import StepCache
from swarmnode.compute.lean_decoder import LeanTail
from swarmnode.compute.spec import BNB_METHODS
from swarmnode.compute.supported import architecture_name, check_supported
from swarmnode.errors import LoadRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from swarmnode.compute.kv_cache import SessionCache
    from swarmnode.compute.lean_decoder import LeanDecoder
    from swarmnode.compute.spec import StageSpec

_PARTS = {"embed_tokens", "layers", "norm", "rotary_emb", "rotary_emb_local"}
_OUTER_PARTS = {"model", "lm_head"}


class _Entry(nn.Module):
    """A later stage's first layer: takes the rows that arrived, whatever the family did to its input embeddings
    (Gemma 2 and Granite scale them in `forward`)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.arrived: torch.Tensor | None = None

    def forward(self, _: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        arrived, self.arrived = self.arrived, None
        return self.layer(arrived, *args, **kwargs)


class _Exit(nn.Module):
    """An earlier stage's final norm: lets rows pass, and counts; a family that norms its inputs with the same module
    (NanoChat does) would lose that norm here."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return rows


class StageModel:
    """The slice, ready to be filled (`parameters`) and run (`hidden`, `logits`)."""

    def __init__(self, spec: StageSpec, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        check_supported(config)
        self.name = architecture_name(config)
        self.first_layer, self.is_first, self.is_last = spec.first_layer, spec.is_first, spec.is_last
        self.num_layers = spec.end_layer - spec.first_layer
        self.dtype, self.device = dtype, device
        self.quantized = spec.quantization != "none"
        self.outer: Any = _build_on_meta(config, dtype, self.name)
        if spec.quantization in BNB_METHODS:
            bnb.replace_linears(self.outer, spec.quantization, dtype)
        _check_parts(self.outer, spec, self.name)
        self.base: Any = self.outer.model
        self.config: Any = self.outer.config
        self.tied = bool(getattr(self.config, "tie_word_embeddings", False))
        _slice(self.outer, spec)
        _fill_buffers(self.outer, device, self.name)
        self.hidden_size = int(self.config.hidden_size)
        self._entry: _Entry | None = None
        self.recurrent = False
        """Some layers keep a recurrent state, known after `finish`."""
        self.lean: LeanDecoder | None = None
        self._lean_tail: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.attention_mode = attention_mode()

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters to fill, by their names in the checkpoint; a tied head appears under the embeddings' name."""
        found: dict[str, nn.Parameter] = {}
        for name, parameter in self.outer.named_parameters():
            found[self._checkpoint_name(name)] = parameter
        if self.tied and self.is_last:
            # Transformers may have tied them already, then only the embeddings are listed.
            head = found.pop("lm_head.weight", None)
            if head is not None:
                found.setdefault(self.embedding_name, head)
        return found

    @property
    def embedding_name(self) -> str:
        return "model.embed_tokens.weight"

    @property
    def head_name(self) -> str:
        """The name under which `parameters` lists the last stage's head."""
        return self.embedding_name if self.tied else "lm_head.weight"

    def set_parameter(self, name: str, value: torch.Tensor) -> None:
        """Put a loaded tensor in place of the meta parameter of this checkpoint name, quantized where that one is."""
        parameter = nn.Parameter(value, requires_grad=False)
        if name != self.embedding_name or self.is_first:
            owner, _, leaf = self.module_name(name).rpartition(".")
            module = self.outer.get_submodule(owner)
            low_bit = bnb.quantized(module, leaf, value)
            setattr(module, leaf, parameter if low_bit is None else low_bit)
        if name == self.embedding_name and self.tied and self.is_last:
            self.outer.lm_head.weight = parameter

    def block(self, layer: int) -> Any:
        """Transformers' own block of `layer`, counted over the whole model."""
        return self.base.layers[layer - self.first_layer]

    def layer_kind(self, layer: int) -> str:
        """The config's name for the layer's type; layers of one type share their rotary positions."""
        kinds = getattr(self.config, "layer_types", None)
        return "" if kinds is None else str(kinds[layer - self.first_layer])

    def use_lean(self, decoder: LeanDecoder, tail: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        """From here on `decoder` runs the blocks, and on the last stage `tail` what follows them."""
        self.lean, self._lean_tail = decoder, tail

    def kernels(self) -> str | None:
        """Whose multiply the weights; None for those of transformers' own blocks that are not quantized."""
        if self.lean is not None:
            return self.lean.kernels()
        return "bitsandbytes" if self.quantized else None

    def tail_bytes(self) -> int:
        """Bytes of the head that one step reads."""
        if isinstance(self._lean_tail, LeanTail):
            return self._lean_tail.size_bytes()
        return int(self.outer.lm_head.weight.nbytes) if self.is_last else 0

    def finish(self) -> None:
        """Call after every parameter is set: from here on the slice is only run."""
        self.outer.eval()
        kinds = getattr(self.config, "layer_types", None)
        self.recurrent = kinds is not None and wrap_mixers(self.base.layers, kinds, self.name)
        if not self.is_first:
            self._entry = _Entry(self.base.layers[0])
            self.base.layers[0] = self._entry

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids (batch, n) → the rows that enter layer 0, as the family's embedding module gives them."""
        embedded: torch.Tensor = self.base.embed_tokens(ids)
        return embedded

    def hidden(self, rows: torch.Tensor, positions: torch.Tensor, caches: Sequence[SessionCache]) -> torch.Tensor:
        """Run the slice over (batch, n, hidden) at positions (batch, n). On the last stage nobody takes the result, so
        whether it is normed is open."""
        if self.lean is not None:
            return self.lean.run(rows, positions, caches)
        out = self._run(self.base, rows, positions, caches).last_hidden_state
        assert isinstance(out, torch.Tensor)
        return out

    def logits(self, rows: torch.Tensor, positions: torch.Tensor, caches: Sequence[SessionCache]) -> torch.Tensor:
        """Last stage: run the slice and return the last position's logits, (batch, vocab)."""
        if self.lean is not None and self._lean_tail is not None:
            return self._lean_tail(self.lean.run(rows, positions, caches))
        out = self._run(self.outer, rows, positions, caches, logits_to_keep=1).logits
        assert isinstance(out, torch.Tensor)
        return out[:, -1]

    def _run(
        self,
        model: Any,
        rows: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[SessionCache],
        **more: Any,
    ) -> Any:
        step = (HybridStepCache if self.recurrent else StepCache)(caches, self.first_layer, self.attention_mode)
        if self._entry is not None:
            self._entry.arrived = rows
        out = model(inputs_embeds=rows, position_ids=positions, cache=step, use_cache=True, **more)
        if step.updates != list(range(self.num_layers)):
            # A layer that keeps its state elsewhere would silently forget it between steps.
            raise LoadRefused(
                f"architecture {self.name!r} cannot be served: of {self.num_layers} layers "
                f"{step.updates} used the cache"
            )
        if not self.is_last:
            calls, self.base.norm.calls = self.base.norm.calls, 0
            if calls != 1:
                raise LoadRefused(f"architecture {self.name!r} cannot be served: it uses its final norm {calls} times")
        return out

    def _checkpoint_name(self, name: str) -> str:
        prefix = "model.layers."
        if not name.startswith(prefix):
            return name
        index, _, rest = name.removeprefix(prefix).partition(".")
        return f"{prefix}{int(index) + self.first_layer}.{rest}"

    def module_name(self, name: str) -> str:
        """A checkpoint's name as the slice has it, whose layers count from its first."""
        prefix = "model.layers."
        if not name.startswith(prefix):
            return name
        index, _, rest = name.removeprefix(prefix).partition(".")
        return f"{prefix}{int(index) - self.first_layer}.{rest}"


def _build_on_meta(config: Mapping[str, Any], dtype: torch.dtype, name: str) -> Any:
    """The whole model without memory; LoadRefused if this transformers does not know the architecture."""
    model_type = str(config["model_type"])
    if model_type not in CONFIG_MAPPING:
        raise LoadRefused(f"architecture {name!r} ({model_type}) is unknown to the installed transformers")
    try:
        parsed = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(dict(config)))
        parsed._attn_implementation = ATTENTION_NAME
        with torch.device("meta"):
            auto: Any = AutoModelForCausalLM
            return auto.from_config(parsed, dtype=dtype, attn_implementation=ATTENTION_NAME)
    except Exception as error:  # whatever a library makes of a stranger's config
        raise LoadRefused(f"architecture {name!r} cannot be built from its config: {str(error)[:500]}") from error


def _check_parts(outer: Any, spec: StageSpec, name: str) -> None:
    """A stage knows what to do with embeddings, one list of layers, a norm, rotary tables and a head; nothing else."""
    base = getattr(outer, "model", None)
    extra = [part for part, _ in outer.named_children() if part not in _OUTER_PARTS]
    if base is not None:
        extra += [part for part, _ in base.named_children() if part not in _PARTS]
    if extra or base is None or not all(hasattr(base, part) for part in ("embed_tokens", "layers", "norm")):
        raise LoadRefused(
            f"architecture {name!r} cannot be served: it is not embeddings, layers, norm and head "
            f"(parts: {', '.join(part for part, _ in outer.named_modules() if part.count('.') == 1)[:500]})"
        )
    if len(base.layers) != spec.num_layers:
        raise LoadRefused(f"config.json says {len(base.layers)} layers, the load says {spec.num_layers}")


def _slice(outer: Any, spec: StageSpec) -> None:
    base, config = outer.model, outer.config
    base.layers = nn.ModuleList(base.layers[spec.first_layer : spec.end_layer])
    # Layers have read their own entry when they were made; the model's forward reads this list by position.
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = list(config.layer_types[spec.first_layer : spec.end_layer])
    config.num_hidden_layers = spec.end_layer - spec.first_layer
    if not spec.is_first:
        base.embed_tokens = nn.Identity()
    if not spec.is_last:
        base.norm = _Exit()
        outer.lm_head = nn.Identity()


def _fill_buffers(outer: Any, device: torch.device, name: str) -> None:
    """Compute what is not in the checkpoint (rotary tables, embedding scale) by the family's own initialisation.

    The parameters are still on meta, where initialising costs nothing. A buffer that stays NaN was not computed.
    """
    for module in outer.modules():
        buffers = {key: b for key, b in module.named_buffers(recurse=False) if b.device.type == "meta"}
        for key, buffer in buffers.items():
            module._buffers[key] = torch.full(buffer.shape, float("nan"), dtype=buffer.dtype)
        if buffers:
            outer._init_weights(module)
        for key in buffers:
            computed = module._buffers[key]
            if computed.isnan().any():
                raise LoadRefused(f"architecture {name!r} cannot be served: its buffer {key!r} is not in its config")
            module._buffers[key] = computed.to(device)
