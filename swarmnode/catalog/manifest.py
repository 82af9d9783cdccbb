"""The servable manifest, `servable.json`: what a model is, how it was cut, and every file with size and sha256.

Layout of a servable: `<model>/servable.json`, `<model>/shards/stage-<i>/*.safetensors`, `<model>/tokenizer/*`
(tokenizer files, `config.json`, `generation_config.json`). Weights are safetensors only, some of them in blocks, too
(see `kept_blocks`); `NAME.chunks` beside one lists the sha256 of its parts (see `chunks`).
"""

from __future__ import annotations

import hashlib
import re
from itertools import pairwise
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from swarmnode.ids import ModelId, parse_model_id

MANIFEST_NAME = "servable.json"
FORMAT: Final = 1
MAX_MANIFEST_BYTES = 8 << 20
"""A thousand shards of a hundred files each still fit; anything larger is not a manifest."""
MAX_LAYERS = 1024
MAX_FILES = 20_000

_PATH = re.compile(r"(?:tokenizer|shards/stage-\d{1,4})/[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
WeightDtype = Literal["float32", "bfloat16", "float16"]
SERVED_SUFFIXES = (".safetensors", ".chunks", ".json", ".txt", ".model", ".jinja")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class FileEntry(_Record):
    """One file of the servable; `path` is relative, two or three parts, never leaves the servable's folder."""

    path: str
    size: int = Field(ge=0, le=1 << 44)
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]

    @model_validator(mode="after")
    def _safe(self) -> FileEntry:
        if not _PATH.fullmatch(self.path) or ".." in self.path or not self.path.endswith(SERVED_SUFFIXES):
            raise ValueError(
                f"file {self.path[:200]!r} is not allowed in a servable: only tokenizer/NAME and "
                f"shards/stage-N/NAME with {', '.join(SERVED_SUFFIXES)}"
            )
        return self


class SamplingDefaults(_Record):
    """What a request that does not say gets; the model's generation_config where it has one."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, ge=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)


class Architecture(_Record):
    """The shape of the model: enough for placement and admission arithmetic without torch."""

    name: str
    """Class name in the checkpoint's config (`LlamaForCausalLM`) or `Scripted` (see `compute/scripted.py`)."""
    model_type: str
    num_layers: int = Field(ge=1, le=MAX_LAYERS)
    hidden_size: int = Field(ge=1, le=1 << 20)
    vocab_size: int = Field(ge=1, le=1 << 24)
    context_tokens: int = Field(ge=1, le=1 << 28)
    """Longest conversation the model was made for (max_position_embeddings)."""
    kv_values_per_token_layer: int = Field(ge=0)
    """Numbers the KV cache keeps per position and layer: 2 × kv heads × head size."""
    layer_params: tuple[int, ...]
    """Parameters of each layer, from the safetensors headers."""
    embed_params: int = Field(ge=0)
    head_params: int = Field(ge=0)
    """Parameters of the head and the final norm; a tied head counts, the last stage holds it too."""
    tied: bool = False
    """The head is the embedding's table; a stage that has both holds it once."""
    recurrent_layers: tuple[int, ...] = ()
    """Layers that keep a state of fixed size per session and no KV (linear attention)."""
    state_values_per_layer: int = Field(default=0, ge=0)
    """Numbers in such a state."""
    adapter_params: tuple[int, ...] = ()
    """Parameters of the LoRA adapter on each layer; empty where the model has none."""
    dora: bool = False
    """The adapter is DoRA."""


class Manifest(_Record):
    """`servable.json`. Boundaries are the first layers of stages 1, 2, …; `split` says who made the cut."""

    format: Literal[1]
    id: str
    base: str
    """Where the weights came from, for people."""
    architecture: Architecture
    num_stages: int = Field(ge=1, le=MAX_LAYERS)
    boundaries: tuple[int, ...] | None
    """Where the shards are cut; None: unknown, so the model serves over num_stages only."""
    split: Literal["import", "training"] = "import"
    dtype: WeightDtype
    """dtype of the stored weights."""
    quantization: dict[str, str | int] | None = None
    export: Literal["full", "adapters"] = "full"
    codecs: tuple[dict[str, str | int | float], ...] = ()
    sampling: SamplingDefaults = SamplingDefaults()
    eos_token_ids: tuple[int, ...] = ()
    created: int = Field(default=0, ge=0)
    """Unix seconds of the import."""
    import_id: str = Field(default="", max_length=64)
    """Random: no two imports have the same manifest, whatever they are made of."""
    files: tuple[FileEntry, ...] = Field(max_length=MAX_FILES)

    @property
    def model_id(self) -> ModelId:
        return parse_model_id(self.id)

    @property
    def digest(self) -> str:
        """Of this import and its copies, sha256; the same in versions that know more fields."""
        return hashlib.sha256(self.model_dump_json(exclude_defaults=True).encode()).hexdigest()

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        parse_model_id(self.id)
        layers = self.architecture.num_layers
        if len(self.architecture.layer_params) != layers:
            raise ValueError(f"layer_params lists {len(self.architecture.layer_params)} layers, num_layers is {layers}")
        if self.num_stages > layers:
            raise ValueError(f"num_stages {self.num_stages} is more than the model's {layers} layers")
        if self.boundaries is not None:
            cuts = (0, *self.boundaries, layers)
            if len(self.boundaries) != self.num_stages - 1 or any(a >= b for a, b in pairwise(cuts)):
                raise ValueError(
                    f"boundaries {list(self.boundaries)} do not cut {layers} layers into {self.num_stages} stages"
                )
        paths = [f.path for f in self.files]
        if len(set(paths)) != len(paths):
            raise ValueError("a file is listed twice")
        return self

    def shard_files(self, stage: int) -> tuple[FileEntry, ...]:
        """The files of one exported shard."""
        return tuple(f for f in self.files if f.path.startswith(f"shards/stage-{stage}/"))

    def tokenizer_files(self) -> tuple[FileEntry, ...]:
        """Tokenizer, config.json and generation_config.json; every stage needs the config."""
        return tuple(f for f in self.files if f.path.startswith("tokenizer/"))
