"""`model-import ADAPTER --base ID`: a servable made of an imported model and a LoRA adapter on it.

The base's files are linked, not copied, and keep their sha256: a peer that holds the base fetches the adapter alone.
The adapter is cut as the base is, into one more shard file a stage.
"""

from __future__ import annotations

import hashlib
import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from swarmnode.catalog.adapter import ADAPTER_FILE, SCALES_PATH, check_fits, encode_scales, read_adapter
from swarmnode.catalog.disk import check_space, full_disk_as_no_space
from swarmnode.catalog.manifest import MANIFEST_NAME, FileEntry, Manifest
from swarmnode.catalog.progress import ImportProgress, Report, ignore
from swarmnode.catalog.registry import Registry
from swarmnode.catalog.safetensors_header import read_header
from swarmnode.catalog.shards import Shard, write_shard
from swarmnode.catalog.workspace import Workspace
from swarmnode.errors import InvalidModel, InvalidRequest
from swarmnode.ids import parse_model_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from swarmnode.catalog.adapter import Adapter
    from swarmnode.catalog.checkpoint import SourceTensor
    from swarmnode.catalog.safetensors_header import TensorEntry
    from swarmnode.ids import ModelId


def import_adapter(
    source: str, base_id: str, root: Path, *, model_id: str, replace: bool = False, report: Report = ignore
) -> Manifest:
    """Make the servable `model_id` of the adapter in `source` and the servable `base_id` under `root`.

    Raises as `import_model` does, ModelNotFound where the base is not imported, and InvalidModel that names the base
    where the adapter was trained on another one.
    """
    base = Registry(root).get(base_id)
    if base.export != "full":
        raise InvalidRequest(f"{base_id} has an adapter already; choose the model that it was made of", param="base")
    adapter = read_adapter(Path(source).expanduser())
    _check_name(adapter, base)
    check_fits(adapter, dict(_tensors(root / base.id, base)), base.id)
    chosen = _chosen(model_id)
    workspace = Workspace(root, chosen)
    with full_disk_as_no_space(f"importing {chosen}"), workspace.opened():
        if not replace:
            workspace.refuse_existing()
        check_space(workspace.model, sum(t.entry.size_bytes for t in adapter.tensors.values()), f"importing {chosen}")
        _link_base(root / base.id, base, workspace.model)
        files = [*base.files, *_write_adapter(adapter, base, workspace.model, report)]
        manifest = _manifest(base, adapter, chosen, f"adapter {Path(source).name} on {base.base}", files)
        (workspace.model / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
        workspace.publish(replace=replace)
    return manifest


def _chosen(model_id: str) -> ModelId:
    try:
        return parse_model_id(model_id)
    except ValueError as error:
        raise InvalidRequest(str(error), param="id") from error


def _check_name(adapter: Adapter, base: Manifest) -> None:
    """Shapes alone do not tell two models of one family apart: the name it was trained on has to be the base's."""
    trained = adapter.config.base
    ours = {base.id, *base.base.lower().replace("@", " ").split()}
    if trained and PurePath(trained.lower()).name not in {PurePath(name).name for name in ours}:
        raise InvalidModel(
            f"the adapter was trained on {trained[:120]!r}, and {base.id} is {base.base}; import that model and name "
            f"it with --base, or import it with --id {PurePath(trained.lower()).name[:60]} if it is the same"
        )


def _tensors(folder: Path, base: Manifest) -> Iterator[tuple[str, TensorEntry]]:
    for entry in base.files:
        if entry.path.endswith(".safetensors"):
            yield from read_header(folder / entry.path).items()


def _link_base(folder: Path, base: Manifest, target: Path) -> None:
    for entry in base.files:
        path = target / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # another file system, or one without links
            path.hardlink_to(folder / entry.path)
            continue
        shutil.copyfile(folder / entry.path, path)


def _write_adapter(adapter: Adapter, base: Manifest, target: Path, report: Report) -> Iterator[FileEntry]:
    total, done = sum(tensor.entry.size_bytes for tensor in adapter.tensors.values()), 0

    def advance(count: int, path: str) -> None:
        nonlocal done
        done += count
        report(ImportProgress("write", min(done, total), total, path))

    for stage in range(base.num_stages):
        chosen = {name: tensor for name, tensor in adapter.tensors.items() if _layer(name) in _layers(base, stage)}
        if chosen:
            yield from write_shard(Shard(f"shards/stage-{stage}/{ADAPTER_FILE}", chosen), target, advance)
    raw = encode_scales(adapter)
    (target / SCALES_PATH).write_bytes(raw)
    yield FileEntry(path=SCALES_PATH, size=len(raw), sha256=hashlib.sha256(raw).hexdigest())


def _layers(base: Manifest, stage: int) -> range:
    """The layers of a shard. Where the cut is not recorded every shard gets the whole adapter, which is small."""
    layers = base.architecture.num_layers
    if base.boundaries is None:
        return range(layers)
    cuts = (0, *base.boundaries, layers)
    return range(cuts[stage], cuts[stage + 1])


def _layer(name: str) -> int:
    return int(name.split(".")[2])


def _manifest(base: Manifest, adapter: Adapter, chosen: ModelId, source: str, files: list[FileEntry]) -> Manifest:
    arch = base.architecture.model_copy(
        update={"adapter_params": _params(adapter.tensors, base), "dora": adapter.config.dora}
    )
    changes = {"id": chosen, "base": source, "architecture": arch, "export": "adapters", "created": int(time.time())}
    return base.model_copy(update={**changes, "import_id": uuid.uuid4().hex, "files": tuple(files)})


def _params(tensors: Mapping[str, SourceTensor], base: Manifest) -> tuple[int, ...]:
    counts = [0] * base.architecture.num_layers
    for name, tensor in tensors.items():
        counts[_layer(name)] += tensor.entry.params
    return tuple(counts)
