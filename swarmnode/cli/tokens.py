"""`token-create`, `tokens`, `token-revoke`: who may use the API."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any

import typer

from swarmnode.cli.client import DEFAULT_API, ApiClient, ApiOption, DataDirOption, TokenOption
from swarmnode.cli.output import JsonFlag, console, parse_duration_s, print_json
from swarmnode.errors import InvalidRequest

PATH = "/api/v1/api-tokens"
CREATE_HELP = """Make an API token and print it, once: only its hash is kept.

From the first token on, every call needs one. Scopes: read (lists and states), operate (chat, load, unload; read too),
admin (tokens and nodes; everything).

Examples:

    swarmnode token-create --label laptop

    swarmnode token-create --label "home automation" --scope read --expires 30d
"""
FIRST = (
    "this is the first token: from now on every call to the API needs one, except the commands of whoever runs the "
    "coordinator, on its machine"
)
REVOKE_HELP = """Revoke an API token: its running replies are cut, and it opens nothing any more.

Example:

    swarmnode token-revoke 3f9c02aa71de
"""


def register(app: typer.Typer) -> None:
    app.command("token-create", help=CREATE_HELP)(token_create)
    app.command("tokens")(tokens)
    app.command("token-revoke", help=REVOKE_HELP)(token_revoke)


def token_create(
    label: Annotated[str, typer.Option("--label", help="What or whom it is for.")],
    scope: Annotated[list[str] | None, typer.Option("--scope", help="read, operate or admin. [operate]")] = None,
    expires: Annotated[str | None, typer.Option("--expires", help="After 90s, 30m, 12h or 30d. [never]")] = None,
    api: ApiOption = DEFAULT_API,
    token: TokenOption = None,
    data_dir: DataDirOption = None,
    json_output: JsonFlag = False,
) -> None:
    body: dict[str, Any] = {"label": label, "scopes": scope or ["operate"]}
    if expires is not None:
        body["expires_in_s"] = parse_duration_s(expires, "--expires")
    client = ApiClient(api, token=token, data_dir=data_dir)
    first = not client.get(PATH)["enforced"]
    made = client.post(PATH, body)
    if json_output:
        print_json(made)
        return
    print(made["token"], flush=True)
    note = f"{made['label']} ({', '.join(made['scopes'])}), id {made['id']}; this token is not shown again"
    notes = console(stderr=True)
    notes.print(note, style="dim", markup=False, soft_wrap=True)
    if first:
        notes.print(FIRST, style="yellow", markup=False, soft_wrap=True)


def tokens(
    api: ApiOption = DEFAULT_API,
    token: TokenOption = None,
    data_dir: DataDirOption = None,
    json_output: JsonFlag = False,
) -> None:
    """List the API tokens, without the tokens themselves."""
    from rich.table import Table
    from rich.text import Text

    answer = ApiClient(api, token=token, data_dir=data_dir).get(PATH)
    if json_output:
        print_json(answer)
        return
    table = Table("id", "label", "scopes", "created", "expires", box=None, pad_edge=False)
    for row in answer["tokens"]:
        expires = "never" if row["expires"] is None else _when(row["expires"])
        table.add_row(row["id"], Text(row["label"]), ", ".join(row["scopes"]), _when(row["created"]), expires)
    console().print(table)
    if not answer["enforced"]:
        console(stderr=True).print("no token is needed now: there is none", style="dim")


def token_revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="As `tokens` shows it.")],
    api: ApiOption = DEFAULT_API,
    token: TokenOption = None,
    data_dir: DataDirOption = None,
    json_output: JsonFlag = False,
) -> None:
    if not re.fullmatch(r"[0-9a-f]{1,64}", token_id):
        raise InvalidRequest(f"{token_id[:40]!r} is not a token's id; `swarmnode tokens` lists them")
    gone = ApiClient(api, token=token, data_dir=data_dir).delete(f"{PATH}/{token_id}")
    if json_output:
        print_json(gone)
    else:
        console().print(f"{gone['label']} is revoked", markup=False)


def _when(unix: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix))
