"""The command line: `swarmnode COMMAND`. Each command's work is imported when it runs, so that `--help` is quick."""

from __future__ import annotations

import sys

import typer

from swarmnode.cli import admin, ask, bench, demo, doctor, importing, nodes, promote, tokens, top, up
from swarmnode.errors import SwarmError

EXIT_ERROR = 1
EXIT_USAGE = 2

app = typer.Typer(
    name="swarmnode",
    help="One language model across several home PCs, behind one OpenAI endpoint.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (up, demo, importing, admin, ask, bench, nodes, top, tokens, doctor, promote):
    command.register(app)


def main() -> None:
    """Run a command; an expected failure prints its message and ends with exit code 1."""
    try:
        app()
    except SwarmError as error:
        print(f"swarmnode: {error.message}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE if error.status == 400 else EXIT_ERROR) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
