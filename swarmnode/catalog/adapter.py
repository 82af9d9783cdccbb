"""Read a LoRA adapter in PEFT's layout, without torch: what its config asks for, and where its tensors lie.

What this version would compute wrongly is refused: other kinds of adapters, weights saved whole beside the adapter,
initialisations that change the base model, and parts outside the layers' linear projections.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swarmnode.catalog.checkpoint import FLOAT_DTYPES, SourceTensor
from swarmnode.catalog.refusals import read_json_object
from swarmnode.catalog.safetensors_header import read_header
from swarmnode.errors import InvalidModel

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from swarmnode.catalog.safetensors_header import TensorEntry

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
_NAME = re.compile(r"base_model\.model\.(model\.layers\.(\d{1,5})\.[A-Za-z0-9_.]+)\.(lora_[A-Za-z_.]+)")
_READ = (
    *("peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "rank_pattern", "alpha_pattern"),
    *("use_rslora", "use_dora", "bias", "init_lora_weights"),
)
_HARMLESS = (
    *("revision", "auto_mapping", "peft_version", "inference_mode", "lora_dropout", "runtime_config", "megatron_core"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying"),
    "qalora_group_size",
)
"""These say how it was trained, or which modules were chosen, which the tensors' names say too, or belong to a switch
that is refused. Any other that is set may change what is computed: PEFT adds some with every release."""
_KEPT_BASES = (None, True, False, "gaussian")
"""init_lora_weights that leave the base as it is; PiSSA, OLoRA, LoftQ and the like train on another one."""
MAX_RANK = 4096
SCALES_PATH = "tokenizer/adapter.json"
"""In a servable, beside its config.json: every stage reads both."""
ADAPTER_FILE = "adapter.safetensors"
"""In a servable, in each shard."""
_LAYER = re.compile(r"model\.layers\.\d{1,5}\.")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The part of adapter_config.json that changes what is computed."""

    base: str
    """The base model's name as it was trained; empty where the config names none."""
    rank: int
    alpha: float
    rslora: bool
    dora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]

    def rank_of(self, module: str) -> int:
        return int(_matching(self.rank_pattern, module, self.rank))

    def alpha_of(self, module: str) -> float:
        return float(_matching(self.alpha_pattern, module, self.alpha))

    def scale_of(self, module: str) -> float:
        """What B·A is multiplied by; `module` is the projection's full name."""
        rank = self.rank_of(module)
        return self.alpha_of(module) / (math.sqrt(rank) if self.rslora else rank)


@dataclass(frozen=True, slots=True)
class Adapter:
    """`tensors` by the base's own names: `model.layers.0.self_attn.q_proj.lora_A.weight`."""

    config: AdapterConfig
    tensors: Mapping[str, SourceTensor]


def read_adapter(folder: Path) -> Adapter:
    """Read and check an adapter's folder; raises InvalidModel that says what is refused and why."""
    if not (folder / ADAPTER_CONFIG).is_file() or not (folder / ADAPTER_WEIGHTS).is_file():
        raise InvalidModel(f"{folder}: a PEFT adapter directory has {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}")
    config = read_adapter_config(folder / ADAPTER_CONFIG)
    tensors: dict[str, SourceTensor] = {}
    for name, entry in read_header(folder / ADAPTER_WEIGHTS).items():
        match = _NAME.fullmatch(name)
        leaf = MAGNITUDE if match and match[3] == f"{MAGNITUDE}.weight" else match[3] if match else ""
        if match is None or leaf not in (A, B, MAGNITUDE) or entry.dtype not in FLOAT_DTYPES:
            raise InvalidModel(
                f"{ADAPTER_WEIGHTS}: tensor {name[:120]!r} ({entry.dtype}) is not a float {A}, {B} or {MAGNITUDE} of a "
                "layer's projection, and nothing else is adapted"
            )
        tensors[f"{match[1]}.{leaf}"] = SourceTensor(folder / ADAPTER_WEIGHTS, entry)
    if not tensors:
        raise InvalidModel(f"{ADAPTER_WEIGHTS}: has no tensors")
    return Adapter(config, tensors)


def read_adapter_config(path: Path) -> AdapterConfig:
    """The config; raises InvalidModel naming what is not served."""
    raw = read_json_object(path)
    if raw.get("peft_type") != "LORA" or raw.get("task_type") not in (None, "CAUSAL_LM"):
        kind = f"{raw.get('peft_type')} for {raw.get('task_type')}"
        raise InvalidModel(f"{path.name}: is {kind[:80]}; only LORA for CAUSAL_LM is served")
    odd = next((key for key, value in raw.items() if value and key not in (*_READ, *_HARMLESS)), None)
    odd = odd or ("bias" if raw.get("bias") not in (None, "none") else None)
    odd = odd or ("init_lora_weights" if raw.get("init_lora_weights") not in _KEPT_BASES else None)
    if odd is not None:
        raise InvalidModel(
            f"{path.name}: {odd[:80]} is {str(raw[odd])[:80]}, which is not served; merge it with PEFT first"
        )
    return AdapterConfig(
        base=str(raw.get("base_model_name_or_path") or ""),
        rank=_rank(raw.get("r"), path),
        alpha=_number(raw.get("lora_alpha"), path),
        rslora=bool(raw.get("use_rslora")),
        dora=bool(raw.get("use_dora")),
        rank_pattern={key: _rank(value, path) for key, value in (raw.get("rank_pattern") or {}).items()},
        alpha_pattern={key: _number(value, path) for key, value in (raw.get("alpha_pattern") or {}).items()},
    )


@dataclass(frozen=True, slots=True)
class AdaptedModule:
    """One projection's adapter, as a servable records it: B·A times `scale`."""

    rank: int
    scale: float
    dora: bool


def encode_scales(adapter: Adapter) -> bytes:
    """What stages need of the config: patterns are resolved once, at the import."""
    config = adapter.config
    modules = sorted({name.rpartition(".lora_")[0] for name in adapter.tensors})
    rows = {name: [config.rank_of(name), config.scale_of(name)] for name in modules}
    return json.dumps({"dora": config.dora, "modules": rows}, indent=1).encode()


def read_scales(folder: Path) -> dict[str, AdaptedModule] | None:
    """By projection what `encode_scales` wrote into a servable's folder; None where there is no adapter."""
    path = folder / SCALES_PATH
    if not path.is_file():
        return None
    raw = read_json_object(path)
    modules, dora = raw.get("modules"), raw.get("dora")
    fits = isinstance(modules, dict) and all(
        _LAYER.match(name) and isinstance(row, list) and len(row) == 2 and type(row[0]) is int
        for name, row in modules.items()
    )
    if not fits or not isinstance(modules, dict) or type(dora) is not bool:
        raise InvalidModel(f"{path.name}: does not say which projections are adapted; import the adapter again")
    return {
        name: AdaptedModule(_rank(rank, path), _number(scale, path), dora) for name, (rank, scale) in modules.items()
    }


def check_fits(adapter: Adapter, base: Mapping[str, TensorEntry], base_name: str) -> None:
    """Raise InvalidModel that names the base and the tensor unless every part fits the base's weight of its name."""
    for module in sorted({name.rpartition(".lora_")[0] for name in adapter.tensors}):
        weight, rank = base.get(f"{module}.weight"), adapter.config.rank_of(module)
        if weight is None or len(weight.shape) != 2:
            raise InvalidModel(f"the adapter is for another base than {base_name}: that has no projection {module!r}")
        out, width = weight.shape
        expected = {A: (rank, width), B: (out, rank)} | ({MAGNITUDE: (out,)} if adapter.config.dora else {})
        for leaf, shape in expected.items():
            tensor = adapter.tensors.get(f"{module}.{leaf}")
            if tensor is None or tensor.entry.shape != shape:
                found = "missing" if tensor is None else str(list(tensor.entry.shape))
                raise InvalidModel(
                    f"the adapter is for another base than {base_name}: {module}.{leaf} is {found}, "
                    f"expected is {list(shape)}"
                )


def _matching(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """PEFT's rule: the first key that the module's name ends with, as a part of it or as an expression."""
    for key, value in pattern.items():
        try:
            if re.fullmatch(rf"(.*\.)?({key})", module):
                return value
        except re.error as error:
            raise InvalidModel(f"{ADAPTER_CONFIG}: pattern {key[:80]!r} is no expression: {error}") from error
    return default


def _rank(value: object, path: Path) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise InvalidModel(f"{path.name}: a rank is {str(value)[:40]}, expected is 1 to {MAX_RANK}")
    return value


def _number(value: object, path: Path) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e6:
        raise InvalidModel(f"{path.name}: an alpha is {str(value)[:40]}, expected is a positive number")
    return float(value)
