"""What a node makes of its API options: who may reach the port, and with what."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from swarmnode.config import read_settings
from swarmnode.errors import InvalidRequest
from swarmnode.roles.api_port import ApiOptions, check_closed, open_tokens
from swarmnode.wire.address import Address

if TYPE_CHECKING:
    from pathlib import Path


def test_a_reachable_port_stays_closed_when_its_last_token_goes(tmp_path: Path) -> None:
    settings = read_settings(tmp_path, {})
    reachable = ApiOptions(Address("0.0.0.0", 0))
    with pytest.raises(InvalidRequest, match="token-create"):
        check_closed(reachable, settings)
    closed = read_settings(tmp_path, {"SWARM_REQUIRE_API_TOKEN": "1"})
    check_closed(reachable, closed)
    assert open_tokens(reachable, closed).enforced()
    assert not open_tokens(ApiOptions(Address("0.0.0.0", 0), insecure_open=True), settings).enforced()
    assert not open_tokens(ApiOptions(Address("127.0.0.1", 0)), settings).enforced()
    assert open_tokens(ApiOptions(Address("127.0.0.1", 0)), closed).enforced()


async def test_a_reachable_port_with_tokens_is_enforced_without_them(tmp_path: Path) -> None:
    from swarmnode.cluster.token_book import Scope

    settings = read_settings(tmp_path, {})
    record, _ = await open_tokens(ApiOptions(Address("127.0.0.1", 0)), settings).issue("mine", Scope.READ, None)
    check_closed(ApiOptions(Address("0.0.0.0", 0)), settings)
    reachable = open_tokens(ApiOptions(Address("0.0.0.0", 0)), settings)
    await reachable.revoke(record.id)
    assert reachable.enforced()


@pytest.mark.parametrize(("text", "meaning"), [("1", True), ("true", True), ("0", False), ("", False), ("Off", False)])
def test_the_switch(tmp_path: Path, text: str, meaning: bool) -> None:
    assert read_settings(tmp_path, {"SWARM_REQUIRE_API_TOKEN": text}).require_api_token is meaning


def test_a_switch_that_is_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="SWARM_REQUIRE_API_TOKEN"):
        read_settings(tmp_path, {"SWARM_REQUIRE_API_TOKEN": "maybe"})


def test_the_tokens_file(tmp_path: Path) -> None:
    assert read_settings(tmp_path, {}).api_tokens_file == tmp_path / "api_tokens.json"
    elsewhere = {"SWARM_API_TOKENS_FILE": "/elsewhere/tokens"}
    assert str(read_settings(tmp_path, elsewhere).api_tokens_file) == "/elsewhere/tokens"
