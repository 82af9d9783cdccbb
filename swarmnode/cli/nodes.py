"""`join-token`, `nodes`, `node-remove`: who is in the swarm."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any
from urllib.parse import quote

import typer

from swarmnode.cli.client import DEFAULT_API, ApiClient, ApiOption, TokenOption
from swarmnode.cli.output import JsonFlag, console, print_json
from swarmnode.errors import InvalidRequest

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

JOIN_HELP = """Print one line that lets a machine join this swarm.

Whoever has the line can join for as long as it is good: send it the way you would send a password.

Examples:

    swarmnode join-token

    swarmnode join-token --ttl 1d --uses 3
"""
REMOVE_HELP = """Take a node out for good: its links are cut, and its certificate is not accepted any more.

Example:

    swarmnode node-remove attic
"""


def register(app: typer.Typer) -> None:
    app.command("join-token", help=JOIN_HELP)(join_token)
    app.command("nodes")(nodes)
    app.command("node-remove", help=REMOVE_HELP)(node_remove)


def join_token(
    ttl: Annotated[str, typer.Option("--ttl", help="How long it is good: 90s, 30m, 1h, 7d.")] = "1h",
    uses: Annotated[int, typer.Option("--uses", min=1, help="How many machines may join with it.")] = 1,
    api: ApiOption = DEFAULT_API,
    token: TokenOption = None,
    json_output: JsonFlag = False,
) -> None:
    made = ApiClient(api, token=token).post("/api/v1/join-tokens", {"ttl_s": parse_duration(ttl), "uses": uses})
    if json_output:
        print_json(made)
    else:
        print(made["token"])


def nodes(api: ApiOption = DEFAULT_API, token: TokenOption = None, json_output: JsonFlag = False) -> None:
    """List the machines that ever joined: state, and how long their certificates last."""
    answer = ApiClient(api, token=token).get("/api/v1/nodes")
    if json_output:
        print_json({"coordinator": answer["coordinator"], "nodes": answer["members"]})
        return
    from rich.table import Table

    table = Table("name", "node", "state", "certificate", box=None, pad_edge=False)
    me = answer["coordinator"]
    table.add_row(me["name"], me["node"][:8], "coordinator", "renews itself")
    for member in sorted(answer["members"], key=lambda member: str(member["name"])):
        table.add_row(member["name"], member["node"][:8], member["state"], _certificate(member))
    console().print(table)


def node_remove(
    name: Annotated[str, typer.Argument(help="The node's name or id, as `swarmnode nodes` lists it.")],
    api: ApiOption = DEFAULT_API,
    token: TokenOption = None,
    json_output: JsonFlag = False,
) -> None:
    removed = ApiClient(api, token=token).delete(f"/api/v1/nodes/{quote(name, safe='')}")
    if json_output:
        print_json(removed)
    else:
        print(f"{removed['name']} is removed; its certificate is revoked and its links are cut")


def parse_duration(text: str) -> float:
    """90s, 30m, 1h or 7d in seconds; raises InvalidRequest that names the text."""
    found = re.fullmatch(r"([0-9]{1,9})([smhd])", text, flags=re.ASCII)
    if found is None:
        raise InvalidRequest(f"--ttl {text[:40]!r} is not a number and a unit, like 90s, 30m, 1h or 7d")
    return float(int(found[1]) * _UNITS_S[found[2]])


def _certificate(member: dict[str, Any]) -> str:
    if member["state"] == "removed":
        return "revoked"
    days = (member["certificate_ends"] - time.time()) / 86_400
    return f"{days:.0f} more days" if days > 0 else "expired; join again with a new token"
