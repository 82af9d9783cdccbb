"""What a node makes of its API options, and how a peer learns where the coordinator's API is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from swarmnode.config import read_settings
from swarmnode.errors import InvalidRequest, ProtocolError
from swarmnode.roles.api_port import ApiOptions, api_notice, follow_notice, is_loopback, open_tokens
from swarmnode.roles.forwarder import Forwarder
from swarmnode.wire.address import Address
from swarmnode.wire.bodies import pack_body
from swarmnode.wire.frames import Frame

if TYPE_CHECKING:
    from pathlib import Path

DIALED = Address("192.168.1.7", 7700)


class Heard:
    """In a forwarder's place."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str | None]] = []

    def connect(self, url: str, certificate: str | None) -> None:
        self.calls.append((url, certificate))


@pytest.mark.parametrize(
    ("announced", "followed"),
    [
        ("http://192.168.1.9:7701", "http://192.168.1.9:7701"),
        ("https://0.0.0.0:7701", "https://192.168.1.7:7701"),
        ("http://[::]:7701", "http://192.168.1.7:7701"),
        ("http://[fd00::7]:7701", "http://[fd00::7]:7701"),
    ],
)
def test_a_notice_leads_to_the_api(announced: str, followed: str) -> None:
    heard: Any = Heard()
    follow_notice(heard, api_notice(ApiOptions(DIALED), announced), DIALED)
    assert heard.calls == [(followed, None)]


@pytest.mark.parametrize(("dialed", "followed"), [("127.0.0.1", True), ("localhost", True), ("192.0.2.7", False)])
def test_another_machines_loopback_is_not_followed(dialed: str, followed: bool) -> None:
    """Here it would be this machine's own, perhaps the very port that forwards: a request would go in circles."""
    forwarder = Forwarder(closed=False)
    follow_notice(forwarder, api_notice(ApiOptions(DIALED), "http://127.0.0.1:7701"), Address(dialed, 7700))
    assert (forwarder._client is not None) is followed
    assert ("its own machine only" in forwarder._why_not) is not followed


def test_the_certificate_travels_with_it(tmp_path: Path) -> None:
    heard: Any = Heard()
    (tmp_path / "cert.pem").write_text("a certificate")
    options = ApiOptions(DIALED, certificate=tmp_path / "cert.pem", key=tmp_path / "key.pem")
    follow_notice(heard, api_notice(options, "https://den:7701"), DIALED)
    assert heard.calls == [("https://den:7701", "a certificate")]


@pytest.mark.parametrize("url", ["http://x:y", "file:///etc/passwd", "nonsense", "", "http://"])
def test_a_notice_that_is_no_address_is_refused(url: str) -> None:
    heard: Any = Heard()
    with pytest.raises(ProtocolError, match="announced"):
        follow_notice(heard, Frame("api", {"url": url}, pack_body({"certificate": None})), DIALED)
    assert heard.calls == []


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("den", False)],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_a_reachable_port_stays_closed_when_its_last_token_goes(tmp_path: Path) -> None:
    settings = read_settings(tmp_path, {})
    reachable = ApiOptions(Address("0.0.0.0", 0))
    with pytest.raises(InvalidRequest, match="token-create"):
        open_tokens(reachable, settings)
    closed = read_settings(tmp_path, {"SWARM_REQUIRE_API_TOKEN": "1"})
    assert open_tokens(reachable, closed).enforced()
    assert not open_tokens(ApiOptions(Address("0.0.0.0", 0), insecure_open=True), settings).enforced()
    assert not open_tokens(ApiOptions(Address("127.0.0.1", 0)), settings).enforced()
    assert open_tokens(ApiOptions(Address("127.0.0.1", 0)), closed).enforced()


async def test_a_reachable_port_with_tokens_is_enforced_without_them(tmp_path: Path) -> None:
    from swarmnode.cluster.token_book import Scope

    settings = read_settings(tmp_path, {})
    record, _ = await open_tokens(ApiOptions(Address("127.0.0.1", 0)), settings).issue("mine", Scope.READ, None)
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
