"""Commands about members and tokens: what they say where nobody could follow."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnode.cli import nodes as node_commands
from swarmnode.cli import tokens
from swarmnode.cli.nodes import stays_here
from swarmnode.cli.output import parse_duration_s
from swarmnode.errors import InvalidRequest
from swarmnode.node import NodeOptions
from swarmnode.roles.context import PeerResources
from swarmnode.wire.address import parse_address


@pytest.mark.parametrize(
    ("addresses", "stays"),
    [
        (["127.0.0.1:7700"], True),
        (["127.0.0.1:7700", "[::1]:7700", "localhost:1"], True),
        (["127.0.0.1:7700", "192.168.1.7:7700"], False),
        (["127.0.0.1:7700", "https://swarm.example"], False),
        (["den:7700"], False),
    ],
)
def test_a_token_that_no_other_machine_can_use_is_noticed(addresses: list[str], stays: bool) -> None:
    assert stays_here(addresses) is stays


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), (" 1H ", 3600), ("7d", 604_800)])
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration_s(text, "--ttl") == seconds


@pytest.mark.parametrize("text", ["", "1", "h", "1.5h", "-1h", "1w", "1h1m", "\u0661h"])
def test_what_is_no_duration_is_named_with_its_option(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--expires"):
        parse_duration_s(text, "--expires")


class TokenApi:
    """The API of a coordinator that enforces tokens from the first one on."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, *_: object, **__: object) -> TokenApi:
        return self

    def get(self, path: str) -> dict[str, Any]:
        return {"enforced": self.made > 0, "tokens": []}

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.made += 1
        return {**body, "id": f"id{self.made}", "token": f"secret{self.made}"}


def test_the_first_token_says_that_from_now_on_all_calls_need_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tokens, "ApiClient", TokenApi())
    said = []
    for number in (1, 2):
        tokens.token_create("laptop", api="http://127.0.0.1:1")
        shown = capsys.readouterr()
        assert shown.out == f"secret{number}\n", "nothing but the token, for pipes"
        said.append("every call to the API needs one" in shown.err)
    assert said == [True, False]


NODES = {
    "coordinator": {"node": "c" * 64, "name": "house"},
    "members": [
        {"node": number * 64, "name": "attic", "state": state, "certificate_ends": 4e9, "removed": None}
        for number, state in (("1", "removed"), ("2", "alive"))
    ],
}
"""A machine that was removed, and joined anew under its old name."""
SUCCEEDED = {
    "coordinator": {"node": "2" * 64, "name": "attic"},
    "members": [
        {"node": "2" * 64, "name": "attic", "state": "away", "certificate_ends": 4e9, "removed": None},
        {"node": "c" * 64, "name": "house", "state": "alive", "certificate_ends": None, "removed": None},
    ],
}


def test_after_a_failover_every_machine_is_listed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node_commands, "ApiClient", lambda *_, **__: SimpleNamespace(get=lambda _: SUCCEEDED))
    node_commands.nodes()
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0:3:2] for row in rows] == [["attic", "coordinator"], ["house", "alive"]]
    assert all("renews itself" in row for row in rows)


@pytest.mark.parametrize(("everything", "shown"), [(False, ["alive"]), (True, ["removed", "alive"])])
def test_removed_nodes_are_listed_only_with_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], everything: bool, shown: list[str]
) -> None:
    monkeypatch.setattr(node_commands, "ApiClient", lambda *_, **__: SimpleNamespace(get=lambda _: NODES))
    node_commands.nodes(everything, json_output=True)
    assert [node["state"] for node in json.loads(capsys.readouterr().out)["nodes"]] == shown
    node_commands.nodes(everything)
    out = capsys.readouterr().out
    assert out.count("attic") == len(shown)
    assert ("1 removed node not shown; --all lists them" in out) is not everything


@pytest.mark.parametrize("advertised", ["0.0.0.0:7700", "[::]:7700", "192.168.1.7:0"])
def test_what_nobody_can_dial_is_not_advertised(advertised: str) -> None:
    with pytest.raises(InvalidRequest, match="nothing that others can dial"):
        NodeOptions(
            roles=("coordinator",),
            swarm_listen=parse_address("0.0.0.0:7700"),
            api=None,
            join=None,
            data_dir=None,
            name=None,
            resources=PeerResources(0, "cpu", 1),
            advertise=(parse_address(advertised),),
        )
