"""API tokens over real processes: made by the command line, needed by everybody, revoked in the middle of a reply."""

from __future__ import annotations

import json
import stat
import time
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from local_swarms import REPLY, Swarm, start_swarm, swarmnode, wait_until

from swarmnode.cli.client import ApiClient
from swarmnode.cli.local_swarm import LocalSwarm, NodeProcess
from swarmnode.errors import LoadFailed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e
MODEL = "scripted-two"
REFUSED_WITHIN_S = 4.0
CUT_WITHIN_S = 5.0


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, models_root: Path) -> Iterator[Swarm]:
    swarm = start_swarm(tmp_path_factory.mktemp("guarded"), models_root, peers=2)
    swarm.load(MODEL)
    yield swarm
    swarm.close()


def command(swarm: Swarm, *arguments: str, **environment: str) -> Any:
    """A command on the coordinator's machine, by the user who runs the coordinator."""
    where = {"SWARM_DATA_DIR": str(swarm.local.folder / "coordinator"), **environment}
    done = swarmnode(*arguments, "--api", swarm.local.api, "--json", **where)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def client_with(swarm: Swarm, token: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{swarm.local.api}/v1", api_key=token, max_retries=0)


def test_the_whole_life_of_tokens(guarded: Swarm) -> None:
    swarm = guarded
    messages: Any = [{"role": "user", "content": "hello"}]
    assert swarm.openai.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content == REPLY
    made = command(swarm, "token-create", "--label", "laptop", "--scope", "operate")
    reader = command(swarm, "token-create", "--label", "display", "--scope", "read", "--expires", "1h")
    with pytest.raises(openai.AuthenticationError):
        swarm.openai.chat.completions.create(model=MODEL, messages=messages)
    with client_with(swarm, made["token"]) as laptop, client_with(swarm, reader["token"]) as display:
        assert laptop.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content == REPLY
        assert [model.id for model in display.models.list()]
        with pytest.raises(openai.PermissionDeniedError, match="operate"):
            display.chat.completions.create(model=MODEL, messages=messages)
    listed = command(swarm, "tokens")
    assert [(t["label"], t["scopes"]) for t in listed["tokens"]] == [
        ("laptop", ["read", "operate"]),
        ("display", ["read"]),
    ]
    assert made["token"] not in json.dumps(listed)
    foreign = swarmnode("ps", "--api", swarm.local.api, SWARM_DATA_DIR=str(swarm.local.folder / "other"))
    assert foreign.returncode != 0
    assert "token" in foreign.stderr
    given = swarmnode(
        "ps", "--api", swarm.local.api, SWARM_DATA_DIR=str(swarm.local.folder), SWARM_API_TOKEN=reader["token"]
    )
    assert given.returncode == 0, given.stderr
    for row in listed["tokens"]:
        command(swarm, "token-revoke", row["id"])
    assert swarm.openai.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content == REPLY


def test_a_token_revoked_in_the_middle_of_a_reply(guarded: Swarm) -> None:
    swarm = guarded
    made = command(swarm, "token-create", "--label", "leaked")
    keep = command(swarm, "token-create", "--label", "keeps the API closed")
    with client_with(swarm, made["token"]) as leaked:
        stream = leaked.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "long"}], stream=True
        )
        assert next(iter(stream))
        command(swarm, "token-revoke", made["id"])
        revoked_s = time.monotonic()
        with pytest.raises(openai.APIError) as raised:
            for _ in stream:
                pass
        assert raised.value.code == "token_revoked"
        assert time.monotonic() - revoked_s < CUT_WITHIN_S
        with pytest.raises(openai.AuthenticationError):
            leaked.models.list()
        assert time.monotonic() - revoked_s < REFUSED_WITHIN_S
    operator = ApiClient(swarm.local.api, token=keep["token"])
    wait_until(lambda: not operator.get(f"/api/v1/models/{MODEL}/status")["requests"], "the ring is free again")
    operator.close()
    command(swarm, "token-revoke", keep["id"])


def test_the_secrets_are_private_and_tokens_survive_a_restart(tmp_path: Path, models_root: Path) -> None:
    with LocalSwarm(tmp_path, models_root) as local:
        local.start_coordinator()
        swarm = Swarm(local)
        made = command(swarm, "token-create", "--label", "laptop")
        folder = tmp_path / "coordinator"
        for name in ("local_api.json", "api_tokens.json"):
            assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
            assert made["token"] not in (folder / name).read_text()
        before = (folder / "local_api.json").read_text()
        swarm.local.start_coordinator()
        assert (folder / "local_api.json").read_text() != before, "the local secret is new"
        models = f"{swarm.local.api}/v1/models"
        assert httpx.get(models, trust_env=False).status_code == 401
        headers = {"authorization": f"Bearer {made['token']}"}
        assert httpx.get(models, headers=headers, trust_env=False).status_code == 200
        swarm.close()


def start(tmp_path: Path, *arguments: str, **environment: str) -> NodeProcess:
    base = ["--role", "coordinator", "--data-dir", str(tmp_path), "--swarm-listen", "127.0.0.1:0"]
    return NodeProcess([*base, *arguments], environment)


def test_a_port_that_others_reach_is_not_opened_without_tokens(tmp_path: Path) -> None:
    node = start(tmp_path, "--api-listen", "0.0.0.0:0")
    try:
        with pytest.raises(LoadFailed, match="token-create"):
            node.wait_for("ready")
    finally:
        node.stop()


@pytest.mark.parametrize(("flag", "status"), [("--insecure-open-api", 200), ("", 401)])
def test_the_explicit_ways_to_open_it(tmp_path: Path, flag: str, status: int) -> None:
    environment = {} if flag else {"SWARM_REQUIRE_API_TOKEN": "1"}
    node = start(tmp_path, "--api-listen", "0.0.0.0:0", *([flag] if flag else []), **environment)
    try:
        api = node.wait_for("ready")["api"].replace("0.0.0.0", "127.0.0.1")
        warnings = [event["text"] for event in node.seen if event["event"] == "warning"]
        assert any("unencrypted" in text for text in warnings)
        assert any("everybody" in text for text in warnings) is bool(flag)
        assert httpx.get(f"{api}/v1/models", trust_env=False).status_code == status
    finally:
        node.stop()


def test_a_damaged_token_file_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "api_tokens.json").write_text("{")
    node = start(tmp_path, "--api-listen", "127.0.0.1:0")
    try:
        with pytest.raises(LoadFailed, match=r"api_tokens\.json"):
            node.wait_for("ready")
    finally:
        node.stop()
