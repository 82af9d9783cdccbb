"""Write a scripted servable to disk: a model for tests, demos without torch and the gateway benchmark."""

from __future__ import annotations

import hashlib
import json
import shutil
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from swarmnode.catalog.manifest import MANIFEST_NAME, Architecture, FileEntry, Manifest
from swarmnode.compute.byte_tokenizer import BYTE_EOS_ID, BYTE_VOCAB_SIZE, write_byte_tokenizer
from swarmnode.compute.script import SCRIPT_NAME, Script
from swarmnode.compute.supported import SCRIPTED
from swarmnode.ids import parse_model_id

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CONTEXT_TOKENS = 4096
_LAYER_PARAMS = 1_000


def write_scripted_servable(
    root: Path,
    model_id: str,
    script: Mapping[str, Any] | Sequence[Mapping[str, Any]],
    layers: int = 8,
    stages: int = 2,
    tokenizer_dir: Path | None = None,
    context_tokens: int = CONTEXT_TOKENS,
) -> Path:
    """Write `root/model_id` and return it. One script for all stages, or one per stage (delays may differ).

    Without `tokenizer_dir` the model has one token per byte (`byte_tokenizer.py`). A script without `eos` gets the
    byte tokenizer's.
    """
    folder = root / parse_model_id(model_id)
    per_stage = [script] * stages if isinstance(script, Mapping) else list(script)
    if len(per_stage) != stages:
        raise ValueError(f"{len(per_stage)} scripts for {stages} stages")
    scripts = [Script.model_validate({"eos": BYTE_EOS_ID, **one}) for one in per_stage]
    _write_tokenizer(folder / "tokenizer", tokenizer_dir, layers, context_tokens)
    for index, one in enumerate(scripts):
        path = folder / "shards" / f"stage-{index}" / SCRIPT_NAME
        path.parent.mkdir(parents=True)
        path.write_text(one.model_dump_json(), encoding="utf-8")
    manifest = _manifest(folder, scripts[0], layers, stages, context_tokens)
    (folder / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    return folder


def _write_tokenizer(target: Path, source: Path | None, layers: int, context_tokens: int) -> None:
    target.mkdir(parents=True)
    if source is None:
        write_byte_tokenizer(target)
    else:
        for file in source.iterdir():
            if file.is_file() and file.name != "config.json" and file.suffix in (".json", ".jinja", ".txt", ".model"):
                shutil.copyfile(file, target / file.name)
    config = {
        "architectures": [SCRIPTED],
        "model_type": "scripted",
        "num_hidden_layers": layers,
        "max_position_embeddings": context_tokens,
    }
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _manifest(folder: Path, script: Script, layers: int, stages: int, context_tokens: int) -> Manifest:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return Manifest(
        format=1,
        id=folder.name,
        base="scripted",
        architecture=Architecture(
            name=SCRIPTED,
            model_type="scripted",
            num_layers=layers,
            hidden_size=script.hidden,
            vocab_size=max(BYTE_VOCAB_SIZE, script.eos + 1),
            context_tokens=context_tokens,
            kv_values_per_token_layer=32,
            layer_params=(_LAYER_PARAMS,) * layers,
            embed_params=_LAYER_PARAMS,
            head_params=_LAYER_PARAMS,
        ),
        num_stages=stages,
        boundaries=tuple(layers * i // stages for i in range(1, stages)),
        dtype="float32",
        eos_token_ids=(script.eos,),
        import_id=uuid.uuid4().hex,
        files=tuple(_entry(folder, path) for path in files),
    )


def _entry(folder: Path, path: Path) -> FileEntry:
    content = path.read_bytes()
    name = path.relative_to(folder).as_posix()
    return FileEntry(path=name, size=len(content), sha256=hashlib.sha256(content).hexdigest())
