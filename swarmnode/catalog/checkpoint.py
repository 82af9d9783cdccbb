"""Read a checkpoint in the Hugging Face layout: its config, where every tensor lies, and its tokenizer files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swarmnode.catalog.kept_blocks import BLOCKS_DTYPE, BLOCKS_FILE, blocks_shape, weight_and_kind
from swarmnode.catalog.manifest import MAX_LAYERS
from swarmnode.catalog.refusals import read_json_object, refuse_own_code, refuse_pickles
from swarmnode.catalog.safetensors_header import TensorEntry, read_header
from swarmnode.errors import InvalidModel

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from swarmnode.catalog.manifest import WeightDtype

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
FLOAT_DTYPES: Mapping[str, WeightDtype] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}

_LAYER = re.compile(r"model\.layers\.(\d{1,5})\..+")
_UNUSED = re.compile(r".*rotary_emb\.inv_freq|mtp\..+")
"""A buffer that old Llama checkpoints stored and every loader computes for itself; layers that guess a further token
(Qwen3-Next), which transformers leaves out too."""
_SHARD_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\.safetensors")


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor and the file that holds it."""

    path: Path
    entry: TensorEntry


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that passed every refusal. `layers[i]` maps full tensor names of layer i to where they lie."""

    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    layers: tuple[Mapping[str, SourceTensor], ...]
    embedding: SourceTensor
    final_norm: SourceTensor
    head: SourceTensor
    """The embedding where the head is tied to it."""
    blocks: tuple[Mapping[str, SourceTensor], ...]
    """By layer, blocks of a GGUF file that some of its matrices were dequantized from; see `kept_blocks`."""

    @property
    def tokenizer_paths(self) -> tuple[Path, ...]:
        """Tokenizer files, config.json and generation_config.json, as far as they exist."""
        names = (*TOKENIZER_FILES, CONFIG, GENERATION_CONFIG)
        return tuple(self.folder / name for name in names if (self.folder / name).is_file())


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read and check a checkpoint's folder; raises InvalidModel that says what is refused and why."""
    if (folder / "adapter_config.json").is_file() and not (folder / CONFIG).is_file():
        raise InvalidModel(f"{folder}: is an adapter; import the model it was trained on, then this with --base ID")
    if not (folder / CONFIG).is_file():
        raise InvalidModel(
            f"{folder}: no {CONFIG}; a Hugging Face directory has config.json, *.safetensors and a tokenizer"
        )
    _refuse_links_elsewhere(folder)
    config = read_json_object(folder / CONFIG)
    check_config(config, CONFIG)
    generation = folder / GENERATION_CONFIG
    _check_tokenizer(folder)
    tensors = _tensors(folder)
    layers = _layers(tensors, config)
    embedding = _required(tensors, EMBEDDING)
    checkpoint = Checkpoint(
        folder=folder,
        config=config,
        generation_config=read_json_object(generation) if generation.is_file() else {},
        layers=layers,
        embedding=embedding,
        final_norm=_required(tensors, FINAL_NORM),
        head=_head(tensors, config, embedding),
        blocks=_blocks(folder / BLOCKS_FILE, layers),
    )
    _check_vocabulary(checkpoint)
    return checkpoint


def check_config(config: dict[str, Any], where: str) -> None:
    """Refuse what can be known from config.json alone, before any weight is fetched."""
    refuse_own_code(config, where)
    if "quantization_config" in config:
        method = str(config["quantization_config"])[:120]
        raise InvalidModel(
            f"{where}: the checkpoint is already quantized ({method}); import the original weights instead "
            "(a .gguf file is taken: it is dequantized)"
        )
    if "text_config" in config or "vision_config" in config or config.get("is_encoder_decoder"):
        raise InvalidModel(
            f"{where}: {config.get('architectures')} wraps a text model in something else (pictures, sound or an "
            "encoder); only plain text decoders are served. Look for the text-only checkpoint of this family"
        )
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not str(names[0]).endswith("ForCausalLM"):
        raise InvalidModel(f"{where}: architectures is {str(names)[:120]}, expected is one …ForCausalLM")


def config_int(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer of config.json; raises InvalidModel naming key and value."""
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or not 1 <= value <= 1 << 28:
        raise InvalidModel(f"{CONFIG}: {key} is {str(value)[:80]}, expected is a positive integer")
    return value


def _refuse_links_elsewhere(folder: Path) -> None:
    """Text files are served to others as they are: a link must not make one of them some private file.

    Links into the folder itself or the hub cache's blobs beside it are the way such folders are kept. Weights may lie
    on another disk: whatever a link names there has to be safetensors.
    """
    home = folder.resolve()
    allowed = (home, home.parent.parent / "blobs")
    for path in folder.iterdir():
        elsewhere = path.is_symlink() and not any(path.resolve().is_relative_to(place) for place in allowed)
        if elsewhere and path.suffix != ".safetensors":
            raise InvalidModel(f"{path.name}: is a link to a place outside {folder}; put the file itself there")


def _check_tokenizer(folder: Path) -> None:
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        raise InvalidModel(f"{folder}: no tokenizer; one of {', '.join(_VOCABULARIES)} is needed")
    if (folder / "tokenizer_config.json").is_file():
        refuse_own_code(read_json_object(folder / "tokenizer_config.json"), "tokenizer_config.json")


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX_FILE).is_file():
        weight_map = read_json_object(folder / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InvalidModel(f"{INDEX_FILE}: has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        bad = next((name for name in names if not _SHARD_NAME.fullmatch(name)), None)
        if bad is not None:
            raise InvalidModel(f"{INDEX_FILE}: {bad[:120]!r} is not the name of a .safetensors file in this folder")
        return [folder / name for name in names]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    refuse_pickles((p.name for p in folder.iterdir()), str(folder))
    raise InvalidModel(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")


def _tensors(folder: Path) -> dict[str, SourceTensor]:
    tensors: dict[str, SourceTensor] = {}
    for path in _weight_files(folder):
        for name, entry in read_header(path).items():
            if name in tensors:
                raise InvalidModel(f"{path.name}: tensor {name!r} is also in {tensors[name].path.name}")
            if _UNUSED.fullmatch(name):
                continue
            if entry.dtype not in FLOAT_DTYPES:
                raise InvalidModel(
                    f"{path.name}: tensor {name!r} is {entry.dtype}; allowed are {', '.join(FLOAT_DTYPES)} "
                    "(quantized weights are not imported)"
                )
            tensors[name] = SourceTensor(path, entry)
    return tensors


def _layers(tensors: dict[str, SourceTensor], config: dict[str, Any]) -> tuple[dict[str, SourceTensor], ...]:
    count = config_int(config, "num_hidden_layers")
    if count > MAX_LAYERS:
        raise InvalidModel(f"{CONFIG}: num_hidden_layers is {count}, allowed are {MAX_LAYERS}")
    layers: tuple[dict[str, SourceTensor], ...] = tuple({} for _ in range(count))
    for name, tensor in tensors.items():
        match = _LAYER.fullmatch(name)
        if match is None and name not in (EMBEDDING, FINAL_NORM, HEAD):
            raise InvalidModel(
                f"{tensor.path.name}: tensor {name!r} is neither model.layers.N.… nor {EMBEDDING}, {FINAL_NORM} or "
                f"{HEAD}; only plain decoder-only checkpoints are imported"
            )
        if match is not None:
            if int(match[1]) >= count:
                raise InvalidModel(f"{tensor.path.name}: tensor {name!r}, but num_hidden_layers is {count}")
            layers[int(match[1])][name] = tensor
    empty = [i for i, layer in enumerate(layers) if not layer]
    if empty:
        raise InvalidModel(f"layer {empty[0]} of {count} has no tensors; is a file of the checkpoint missing?")
    return layers


def _blocks(path: Path, layers: tuple[dict[str, SourceTensor], ...]) -> tuple[dict[str, SourceTensor], ...]:
    """What the GGUF converter wrote beside the weights; none of it where it wrote nothing."""
    blocks: tuple[dict[str, SourceTensor], ...] = tuple({} for _ in layers)
    for name, entry in read_header(path).items() if path.is_file() else ():
        weight, kind = weight_and_kind(name) or ("", "")
        match = _LAYER.fullmatch(weight)
        index = int(match[1]) if match is not None else len(layers)
        matrix = layers[index].get(weight) if index < len(layers) else None
        if matrix is None or entry.dtype != BLOCKS_DTYPE or entry.shape != blocks_shape(matrix.entry.shape, kind):
            raise InvalidModel(f"{path.name}: tensor {name!r} is not the blocks of one of the layers' matrices")
        blocks[index][name] = SourceTensor(path, entry)
    return blocks


def _head(tensors: dict[str, SourceTensor], config: dict[str, Any], embedding: SourceTensor) -> SourceTensor:
    """The head's weights. Configs often leave tie_word_embeddings to the family's default: a missing head is tied."""
    tied = config.get("tie_word_embeddings")
    if tied is True or (tied is None and HEAD not in tensors):
        return embedding
    return _required(tensors, HEAD)


def _required(tensors: dict[str, SourceTensor], name: str) -> SourceTensor:
    if name not in tensors:
        raise InvalidModel(f"tensor {name!r} is missing; is a file of the checkpoint missing?")
    return tensors[name]


def _check_vocabulary(checkpoint: Checkpoint) -> None:
    expected = (config_int(checkpoint.config, "vocab_size"), config_int(checkpoint.config, "hidden_size"))
    for name, tensor in ((EMBEDDING, checkpoint.embedding), (HEAD, checkpoint.head)):
        if tensor.entry.shape != expected:
            raise InvalidModel(
                f"{tensor.path.name}: {name} is {list(tensor.entry.shape)}, config says {list(expected)}"
            )
