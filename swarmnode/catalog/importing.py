"""`model-import`: turn a source into a servable under the models root."""

from __future__ import annotations

import re
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from swarmnode.catalog.checkpoint import FLOAT_DTYPES, Checkpoint, config_int, read_checkpoint
from swarmnode.catalog.defaults import eos_token_ids, sampling_defaults
from swarmnode.catalog.disk import check_space, full_disk_as_no_space
from swarmnode.catalog.layer_kinds import recurrent_layers, state_values
from swarmnode.catalog.manifest import FORMAT, MANIFEST_NAME, Architecture, FileEntry, Manifest
from swarmnode.catalog.progress import ImportProgress, Report, ignore
from swarmnode.catalog.refusals import is_pickle, refuse_pickles
from swarmnode.catalog.shards import Shard, cut, default_boundaries, write_copy, write_shard
from swarmnode.catalog.source_gguf import checkpoint_from_gguf
from swarmnode.catalog.source_hub import HUB_ID, fetch_snapshot
from swarmnode.catalog.source_wheel import DEMO_MODEL_ID, DEMO_SOURCE, is_wheel_source, unpack_demo_gguf
from swarmnode.catalog.workspace import Workspace
from swarmnode.errors import InvalidModel, InvalidRequest
from swarmnode.ids import MODEL_ID_RULE, ModelId, parse_model_id

if TYPE_CHECKING:
    from collections.abc import Iterator

DEFAULT_STAGES = 2
SOURCES_RULE = f"a Hugging Face directory, a hub id (owner/name), a .gguf file or {DEMO_SOURCE}"
_HEADER_SLACK_BYTES = 16 << 20
"""Headers, manifest and rounding up to disk blocks."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A checkpoint's folder, and where it came from for people."""

    folder: Path
    base: str


def import_model(
    source: str,
    root: Path,
    *,
    model_id: str | None = None,
    stages: int = DEFAULT_STAGES,
    replace: bool = False,
    report: Report = ignore,
) -> Manifest:
    """Import `source` into `root` as a servable cut into `stages` shards; returns its manifest.

    The model appears under its id in one rename, or not at all. Synchronous; run it in a thread. Raises InvalidModel
    (refused, with the reason), InvalidRequest (id or source), Conflict (the id exists, or is being imported), NoSpace,
    FetchFailed.
    """
    chosen = _model_id(source, model_id)
    workspace = Workspace(root, chosen)
    with _file_errors(chosen), full_disk_as_no_space(f"importing {chosen}"), workspace.opened():
        if not replace:
            workspace.refuse_existing()
        found = _find(source, workspace, report)
        checkpoint = read_checkpoint(found.folder)
        manifest = _export(checkpoint, workspace.model, chosen, found.base, stages, report)
        workspace.publish(replace=replace)
    return manifest


@contextmanager
def _file_errors(model_id: ModelId) -> Iterator[None]:
    """Map what the file system refuses (rights, a read-only disk) to an answer that names the file."""
    try:
        yield
    except OSError as error:
        raise InvalidRequest(f"importing {model_id}: {error.strerror}: {error.filename}") from error


def suggested_id(source: str) -> str:
    """The id a source gets when nobody chose one; may break the rule of ids (import_model then says so)."""
    if is_wheel_source(source):
        return DEMO_MODEL_ID
    name = Path(source.rstrip("/")).expanduser().resolve().name if Path(source).expanduser().exists() else source
    name = re.sub(r"\.gguf$", "", name.rsplit("/", 1)[-1], flags=re.IGNORECASE).lower()
    return re.sub(r"[^a-z0-9._-]+|\.\.+", "-", name).strip(".-_")


def _model_id(source: str, model_id: str | None) -> ModelId:
    try:
        return parse_model_id(suggested_id(source) if model_id is None else model_id)
    except ValueError as error:
        hint = "" if model_id else f" (taken from the source; choose one with --id: {MODEL_ID_RULE})"
        raise InvalidRequest(f"{error}{hint}", param="id") from error


def _find(source: str, workspace: Workspace, report: Report) -> _Found:
    """Bring the source to a checkpoint's folder on this machine."""
    scratch = workspace.scratch
    if is_wheel_source(source):
        gguf = unpack_demo_gguf(source, scratch, report)
        return _Found(checkpoint_from_gguf(gguf, scratch / "checkpoint", report), f"{source} {gguf.name}")
    path = Path(source).expanduser()
    if path.is_dir():
        return _Found(path, f"directory {path.resolve().name}")
    if path.is_file():
        return _Found(_file_checkpoint(path, scratch, report), f"file {path.name}")
    if HUB_ID.fullmatch(source) and not source.startswith((".", "/", "~")):
        folder = fetch_snapshot(source, workspace.download, report)
        return _Found(folder, f"hub {source}@{folder.name}")
    raise InvalidRequest(f"{source[:200]!r} is not there; a model source is {SOURCES_RULE}", param="source")


def _file_checkpoint(path: Path, scratch: Path, report: Report) -> Path:
    if path.suffix.lower() == ".gguf":
        return checkpoint_from_gguf(path, scratch / "checkpoint", report)
    if is_pickle(path.name):
        refuse_pickles([path.name], str(path.parent))
    raise InvalidRequest(f"{path.name} is a file but not a .gguf; a model source is {SOURCES_RULE}", param="source")


def _export(
    checkpoint: Checkpoint, folder: Path, model_id: ModelId, base: str, stages: int, report: Report
) -> Manifest:
    boundaries = default_boundaries(checkpoint, stages)
    shards = cut(checkpoint, boundaries)
    total = sum(s.size_bytes for s in shards) + sum(p.stat().st_size for p in checkpoint.tokenizer_paths)
    check_space(folder, total + _HEADER_SLACK_BYTES, f"importing {model_id}")
    try:
        manifest = Manifest(
            format=FORMAT,
            id=model_id,
            base=base,
            architecture=_architecture(checkpoint),
            num_stages=stages,
            boundaries=boundaries,
            dtype=FLOAT_DTYPES[_main_dtype(checkpoint)],
            sampling=sampling_defaults(checkpoint.generation_config),
            eos_token_ids=eos_token_ids(checkpoint.folder, checkpoint.config, checkpoint.generation_config),
            created=int(time.time()),
            import_id=uuid.uuid4().hex,
            files=tuple(_write_files(checkpoint, shards, folder, total, report)),
        )
    except ValidationError as error:
        raise InvalidModel(f"{checkpoint.folder}: does not make a servable: {error.errors()[0]['msg']}") from error
    (folder / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    return manifest


def _write_files(
    checkpoint: Checkpoint, shards: tuple[Shard, ...], folder: Path, total_bytes: int, report: Report
) -> Iterator[FileEntry]:
    done = 0

    def advance(count: int, path: str) -> None:
        nonlocal done
        done += count
        report(ImportProgress("write", min(done, total_bytes), total_bytes, path))

    for path in checkpoint.tokenizer_paths:
        yield write_copy(path, folder, f"tokenizer/{path.name}", advance)
    for shard in shards:
        yield from write_shard(shard, folder, advance)


def _architecture(checkpoint: Checkpoint) -> Architecture:
    config = checkpoint.config
    heads, hidden = config_int(config, "num_attention_heads"), config_int(config, "hidden_size")
    head_size = config_int(config, "head_dim", hidden // heads)
    return Architecture(
        name=str(config["architectures"][0]),
        model_type=str(config.get("model_type", "")),
        num_layers=len(checkpoint.layers),
        hidden_size=hidden,
        vocab_size=config_int(config, "vocab_size"),
        context_tokens=config_int(config, "max_position_embeddings"),
        kv_values_per_token_layer=2 * config_int(config, "num_key_value_heads", heads) * head_size,
        layer_params=tuple(sum(t.entry.params for t in layer.values()) for layer in checkpoint.layers),
        embed_params=checkpoint.embedding.entry.params,
        head_params=checkpoint.final_norm.entry.params + checkpoint.head.entry.params,
        tied=checkpoint.head is checkpoint.embedding,
        recurrent_layers=recurrent_layers(config),
        state_values_per_layer=state_values(config),
    )


def _main_dtype(checkpoint: Checkpoint) -> str:
    """The dtype that holds most bytes: norms are sometimes kept wider than the rest."""
    sizes: dict[str, int] = {}
    for layer in checkpoint.layers:
        for tensor in layer.values():
            sizes[tensor.entry.dtype] = sizes.get(tensor.entry.dtype, 0) + tensor.entry.size_bytes
    return max(sizes, key=lambda dtype: sizes[dtype])
