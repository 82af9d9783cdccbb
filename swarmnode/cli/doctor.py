"""`swarmnode doctor`: is this machine fit for the swarm, and what to do where it is not."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmnode.cli.output import JsonFlag, console, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarmnode.roles.diagnosis import Finding

EXIT_UNFIT = 1
COLOURS = {"pass": "green", "warn": "yellow", "fail": "red"}

DOCTOR_HELP = """Check this machine: versions, memory, disk, ports, certificate, clock, and whether others reach it.

Works while the node runs and while it does not. Exit code 1 where something fails.

Examples:

    swarmnode doctor

    swarmnode doctor --data-dir /srv/swarm --json
"""


def register(app: typer.Typer) -> None:
    app.command("doctor", help=DOCTOR_HELP)(doctor)


def doctor(
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="As for `up`.")] = None,
    json_output: JsonFlag = False,
) -> None:
    import trio

    from swarmnode.available_memory import available_memory_bytes
    from swarmnode.config import read_settings
    from swarmnode.roles.diagnosis import Patient, examine

    findings = trio.run(examine, Patient.look(read_settings(data_dir), available_memory_bytes()))
    fit = all(finding.status != "fail" for finding in findings)
    if json_output:
        print_json({"fit": fit, "findings": [asdict(finding) for finding in findings]})
    else:
        _print(findings)
    if not fit:
        raise typer.Exit(EXIT_UNFIT)


def _print(findings: Sequence[Finding]) -> None:
    screen = console()
    for finding in findings:
        colour = COLOURS[finding.status]
        screen.print(f"[{colour}]{finding.status}[/] ", end="", soft_wrap=True)
        screen.print(f"{finding.check}: {finding.text}", markup=False, soft_wrap=True)
        if finding.fix:
            screen.print(f"     fix: {finding.fix}", markup=False, soft_wrap=True)
