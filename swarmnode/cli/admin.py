"""`models`, `model-load`, `model-unload`, `ps`, `config`: what an operator asks a coordinator."""

from __future__ import annotations

from typing import Annotated

import typer

from swarmnode.cli.client import DEFAULT_API, ApiClient, ApiOption
from swarmnode.cli.output import JsonFlag, console, print_json


def register(app: typer.Typer) -> None:
    app.command("models")(models)


def models(api: ApiOption = DEFAULT_API, json_output: JsonFlag = False) -> None:
    """List the servable models."""
    answer = ApiClient(api).get("/api/v1/models")
    if json_output:
        print_json(answer)
        return
    for model in answer["models"]:
        console().print(f"{model['id']} {model['state']}")
