"""`promote`: what a person says when the coordinator is gone for good and no majority is left to elect another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from swarmnode.cli.client import DataDirOption
from swarmnode.cli.output import JsonFlag, console, print_json
from swarmnode.config import read_settings
from swarmnode.errors import InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path

PROMOTE_HELP = """Let this machine's node coordinate the swarm, because the others that could are gone for good.

For swarms of two nodes that may coordinate, and for the last of three: with fewer than a majority, nobody is elected.
What the lost coordinator was told last may be missing. If it comes back after all, it follows this one.

Stop the node first, and start it again afterwards, with --voter as before.

Example:

    swarmnode promote --force
"""


def register(app: typer.Typer) -> None:
    app.command("promote", help=PROMOTE_HELP)(promote)


def promote(
    force: Annotated[bool, typer.Option("--force", help="The others are gone for good.")] = False,
    data_dir: DataDirOption = None,
    json_output: JsonFlag = False,
) -> None:
    from swarmnode.roles.promoting import promote as make_coordinator

    if not force:
        raise InvalidRequest(
            "only with --force: if another coordinator still runs somewhere, what it was told last is lost"
        )
    folder: Path = read_settings(data_dir).data_dir
    entry = make_coordinator(folder)
    if json_output:
        print_json({"data_dir": str(folder), "term": entry.term, "version": entry.version})
        return
    console().print(
        f"the node of {folder} coordinates from its next start on (version {entry.version} of the swarm's document)",
        markup=False,
        soft_wrap=True,
    )
