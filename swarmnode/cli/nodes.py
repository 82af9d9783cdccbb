"""`join-token`, `join-tokens`, `join-token-revoke`, `nodes`, `node-remove`: who is in the swarm, and who may come."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from swarmnode.cli.client import DEFAULT_API, ApiClient, ApiOption, DataDirOption, TokenOption
from swarmnode.cli.output import JsonFlag, console, parse_duration_s, print_json
from swarmnode.cluster.join_token import parse_join_token
from swarmnode.errors import InvalidRequest
from swarmnode.ui.plain_text import plain
from swarmnode.ui.quantities import plural
from swarmnode.wire.address import Address, is_loopback, parse_place

if TYPE_CHECKING:
    from collections.abc import Sequence

JOIN_HELP = """Print one line that lets a machine join this swarm.

Whoever has the line can join for as long as it is good: send it the way you would send a password.

Examples:

    swarmnode join-token

    swarmnode join-token --ttl 1d --uses 3
"""
WITHDRAW_HELP = """Withdraw a join token before it is used up or expires.

Example:

    swarmnode join-token-revoke 3f9c02aa71de4b05
"""
REMOVE_HELP = """Take a node out for good: its links are cut, and its certificate is not accepted any more.

Example:

    swarmnode node-remove attic
"""


def register(app: typer.Typer) -> None:
    app.command("join-token", help=JOIN_HELP)(join_token)
    app.command("join-tokens")(join_tokens)
    app.command("join-token-revoke", help=WITHDRAW_HELP)(join_token_revoke)
    app.command("nodes")(nodes)
    app.command("node-remove", help=REMOVE_HELP)(node_remove)


def join_token(
    ttl: Annotated[str, typer.Option("--ttl", help="How long it is good: 90s, 30m, 1h, 7d.")] = "1h",
    uses: Annotated[int, typer.Option("--uses", min=1, help="How many machines may join with it.")] = 1,
    api: ApiOption = DEFAULT_API,
    token: TokenOption = None,
    data_dir: DataDirOption = None,
    json_output: JsonFlag = False,
) -> None:
    asked = {"ttl_s": float(parse_duration_s(ttl, "--ttl")), "uses": uses}
    made = ApiClient(api, token=token, data_dir=data_dir).post("/api/v1/join-tokens", asked)
    if json_output:
        print_json(made)
    else:
        print(made["token"], flush=True)
    if stays_here(parse_join_token(made["token"]).addresses):
        console(stderr=True).print(
            "warning: the coordinator listens on this machine alone, so no other machine can join with this token; "
            "start it with --swarm-listen 0.0.0.0:7700 --advertise HOST:7700, HOST being this machine's address on "
            "your network, and make a new one",
            markup=False,
            soft_wrap=True,
        )


def stays_here(addresses: Sequence[str]) -> bool:
    """Whether no other machine can reach any of a coordinator's addresses."""
    places = map(parse_place, addresses)
    return all(isinstance(place, Address) and is_loopback(place.host) for place in places)


def join_tokens(
    api: ApiOption = DEFAULT_API,
    token: TokenOption = None,
    data_dir: DataDirOption = None,
    json_output: JsonFlag = False,
) -> None:
    """List the join tokens that are still good, without the tokens themselves."""
    answer = ApiClient(api, token=token, data_dir=data_dir).get("/api/v1/join-tokens")
    if json_output:
        print_json(answer)
        return
    from rich.table import Table

    table = Table("id", "uses left", "good for", box=None, pad_edge=False)
    for row in answer["tokens"]:
        table.add_row(row["id"], str(row["uses_left"]), f"{max(0, row['expires'] - time.time()) / 60:.0f} more min")
    console().print(table)


def join_token_revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="As `join-tokens` shows it.")],
    api: ApiOption = DEFAULT_API,
    token: TokenOption = None,
    data_dir: DataDirOption = None,
    json_output: JsonFlag = False,
) -> None:
    path = f"/api/v1/join-tokens/{quote(token_id, safe='')}"
    gone = ApiClient(api, token=token, data_dir=data_dir).delete(path)
    if json_output:
        print_json(gone)
    else:
        print(f"join token {plain(gone['id'])} is withdrawn")


def nodes(
    everything: Annotated[bool, typer.Option("--all", help="Those too that were removed.")] = False,
    api: ApiOption = DEFAULT_API,
    token: TokenOption = None,
    data_dir: DataDirOption = None,
    json_output: JsonFlag = False,
) -> None:
    """List the machines of the swarm: state, and how long their certificates last."""
    answer = ApiClient(api, token=token, data_dir=data_dir).get("/api/v1/nodes")
    me = answer["coordinator"]
    others = [member for member in answer["members"] if member["node"] != me["node"]]
    members = [member for member in others if everything or member["state"] != "removed"]
    if json_output:
        print_json({"coordinator": me, "nodes": members})
        return
    from rich.table import Table
    from rich.text import Text

    table = Table("name", "node", "state", "certificate", box=None, pad_edge=False)
    table.add_row(Text(plain(me["name"])), plain(me["node"][:8]), "coordinator", "renews itself")
    for member in sorted(members, key=lambda member: str(member["name"])):
        name, node = Text(plain(member["name"])), plain(member["node"][:8])
        table.add_row(name, node, plain(member["state"]), _certificate(member))
    console().print(table)
    if hidden := len(others) - len(members):
        console().print(f"{plural(hidden, 'removed node')} not shown; --all lists them")


def node_remove(
    name: Annotated[
        str, typer.Argument(help="The node's name, its id or the beginning of it, as `swarmnode nodes` lists it.")
    ],
    api: ApiOption = DEFAULT_API,
    token: TokenOption = None,
    data_dir: DataDirOption = None,
    json_output: JsonFlag = False,
) -> None:
    if not name.strip(" ./"):
        raise InvalidRequest(f"{name!r} is not a node's name or id; `swarmnode nodes` lists them")
    removed = ApiClient(api, token=token, data_dir=data_dir).delete(f"/api/v1/nodes/{quote(name, safe='')}")
    if json_output:
        print_json(removed)
    else:
        print(f"{plain(removed['name'])} is removed; its certificate is revoked and its links are cut")


def _certificate(member: dict[str, Any]) -> str:
    if member["state"] == "removed":
        return "revoked"
    if member["certificate_ends"] is None:
        return "renews itself"
    days = (member["certificate_ends"] - time.time()) / 86_400
    return f"{days:.0f} more days" if days > 0 else "expired; join again with a new token"
