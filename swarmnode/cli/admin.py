"""`models`, `model-load`, `model-unload`, `model-remove`, `ps`, `config`: what an operator asks a coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from swarmnode.cli.client import DEFAULT_API, ApiClient, ApiOption, TokenOption, model_path
from swarmnode.cli.output import JsonFlag, console, print_json

LOAD_HELP = """Load a model over the peers of the swarm.

Without --stages and --peer the model is cut as it was imported, over the peers with the most memory.

Examples:

    swarmnode model-load smollm2-135m-instruct --wait

    swarmnode model-load my-model --stages 3 --dtype float32 --wait

    swarmnode model-load my-model --peer den --peer attic
"""
UNLOAD_HELP = """Give a model's memory back on every peer. Running replies may finish first (60 s at most).

Example:

    swarmnode model-unload smollm2-135m-instruct
"""
REMOVE_HELP = """Take a model out of the swarm, and delete its files from the coordinator's disk.

On other machines nothing is deleted: a folder of it there, or one that is copied from there, stays and is not served.
While that machine coordinates, this command deletes it, too. Import the model again to serve it. What peers fetched
of it stays in their caches.

Example:

    swarmnode model-remove smollm2-135m-instruct
"""
UNLOAD_SILENCE_S = 120.0
"""An unload answers when running replies have ended and the memory is back."""


def register(app: typer.Typer) -> None:
    app.command("models")(models)
    app.command("model-load", help=LOAD_HELP)(model_load)
    app.command("model-unload", help=UNLOAD_HELP)(model_unload)
    app.command("model-remove", help=REMOVE_HELP)(model_remove)
    app.command("ps")(ps)
    app.command("config")(config)


def models(api: ApiOption = DEFAULT_API, token: TokenOption = None, json_output: JsonFlag = False) -> None:
    """List the servable models and what they are doing."""
    from swarmnode.ui.tables import models_table

    answer = ApiClient(api, token=token).get("/api/v1/models")
    if json_output:
        print_json(answer)
    else:
        console().print(models_table(answer))


def model_load(
    model: Annotated[str, typer.Argument(help="The model's id.")],
    stages: Annotated[int | None, typer.Option("--stages", min=1, help="How many peers share the layers.")] = None,
    peer: Annotated[list[str] | None, typer.Option("--peer", help="A peer's name, in stage order; repeat it.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32 or bfloat16.")] = "auto",
    quantization: Annotated[
        str | None,
        typer.Option("--quantization", help="none, nf4, bnb-int8, int8 or int4-fast; else what the model records."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the load until the model is ready.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Show what it would take and where; load nothing.")] = False,
    api: ApiOption = DEFAULT_API,
    token: TokenOption = None,
    json_output: JsonFlag = False,
) -> None:
    from swarmnode.cli.loading import follow_load, load_display

    options: dict[str, Any] = {"dtype": dtype}
    options |= {"num_stages": stages} if stages is not None else {}
    options |= {"peers": peer} if peer else {}
    options |= {"quantization": {"method": quantization}} if quantization is not None else {}
    client = ApiClient(api, token=token)
    if plan:
        _print_plan(client.post(model_path(model, "load"), options | {"plan": True}), json_output=json_output)
        return
    if not wait:
        status = client.post(model_path(model, "load"), options)
    elif json_output:
        status = follow_load(client, model, options, lambda _: None)
    else:
        with load_display(console(stderr=True)) as show:
            status = follow_load(client, model, options, show)
    _print_status(status, json_output=json_output)
    if not json_output:
        _print_left_out(status)


def model_unload(
    model: Annotated[str, typer.Argument(help="The model's id.")],
    force: Annotated[bool, typer.Option("--force", help="Cut running replies off.")] = False,
    api: ApiOption = DEFAULT_API,
    token: TokenOption = None,
    json_output: JsonFlag = False,
) -> None:
    client = ApiClient(api, token=token, silence_s=UNLOAD_SILENCE_S)
    status = client.post(model_path(model, "unload"), {"force": force})
    _print_status(status, json_output=json_output)


def model_remove(
    model: Annotated[str, typer.Argument(help="The model's id.")],
    force: Annotated[bool, typer.Option("--force", help="Unload it, too; running replies are cut off.")] = False,
    api: ApiOption = DEFAULT_API,
    token: TokenOption = None,
    json_output: JsonFlag = False,
) -> None:
    client = ApiClient(api, token=token, silence_s=UNLOAD_SILENCE_S)
    removed = client.delete(model_path(model), {"force": force})
    if json_output:
        print_json(removed)
    else:
        console().print(f"{removed['id']} is removed", markup=False)


def ps(api: ApiOption = DEFAULT_API, token: TokenOption = None, json_output: JsonFlag = False) -> None:
    """Show the nodes, the rings with their stages, memory and sessions."""
    from swarmnode.ui.tables import ps_view

    answer = ApiClient(api, token=token).get("/api/v1/nodes?last_known=1")
    if json_output:
        print_json(answer)
    else:
        console().print(ps_view(answer))


def config(
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="As for `up`.")] = None,
    json_output: JsonFlag = False,
) -> None:
    """Show the environment variables: value, where it came from, meaning."""
    from rich.table import Table

    from swarmnode.config import explain, read_settings

    read_settings(data_dir)
    rows = explain()
    if json_output:
        print_json({"variables": rows})
        return
    table = Table("variable", "value", "from", "read by", "meaning", box=None, pad_edge=False)
    for row in rows:
        table.add_row(row["name"], row["value"], row["source"], row["role"], row["meaning"])
    console().print(table)


def _print_left_out(status: dict[str, Any]) -> None:
    from swarmnode.ui.plan_table import left_out_lines

    for line in left_out_lines(status.get("left_out") or []):
        console().print(line)


def _print_plan(plan: dict[str, Any], *, json_output: bool) -> None:
    from swarmnode.ui.plan_table import plan_view

    if json_output:
        print_json(plan)
    else:
        console().print(plan_view(plan))


def _print_status(status: dict[str, Any], *, json_output: bool) -> None:
    from swarmnode.ui.tables import status_view

    if json_output:
        print_json(status)
    else:
        console().print(status_view(status))
