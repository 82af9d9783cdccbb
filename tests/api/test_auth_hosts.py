"""Host and Origin: DNS rebinding, foreign pages, doubled and strange headers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.api.hosts import host_rules

LOOPBACK = host_rules("127.0.0.1", names=["Den.example."], origins=["http://page.example:8080/"])


async def status(gateway: Any, *headers: str, target: str = "/v1/models") -> int:
    raw = await gateway.raw()
    await raw.send("\r\n".join([f"GET {target} HTTP/1.1", *headers, "", ""]).encode("latin-1"))
    return int((await raw.reply()).status)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:7701",
        "127.0.0.1",
        "127.0.0.1:80",
        "[::1]:7701",
        "[::1]",
        "localhost.",
        "den.example:443",
    ],
)
async def test_known_hosts(run_gateway: Any, host: str) -> None:
    """The port is not looked at: tunnels and port forwards change it."""
    async with run_gateway(hosts=LOOPBACK) as gateway:
        assert await status(gateway, f"Host: {host}") == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evil.example:7701",
        "192.168.1.7",
        "0.0.0.0",
        "[::2]",
        "localhost@evil.example",
        "localhost:7701@evil.example",
        "localhost/",
        "localhost?",
        "localhost#",
        "localhost, evil.example",
        "localhost:",
        "localhost:999999",
        "[localhost]",
        "127.1",
        "2130706433",
        "0x7f.0.0.1",
        "localhost\x00",
        "löcalhost",
        "",
    ],
)
async def test_a_rebound_name_is_refused(run_gateway: Any, host: str) -> None:
    """The page's own name comes as Host, whatever address it was rebound to."""
    async with run_gateway(hosts=LOOPBACK) as gateway:
        assert await status(gateway, f"Host: {host}") in (400, 403)


async def test_no_host_or_two_are_refused(run_gateway: Any) -> None:
    async with run_gateway(hosts=LOOPBACK) as gateway:
        assert await status(gateway, "X: y") == 400
        assert await status(gateway, "Host: localhost", "Host: evil.example") == 400
        assert await status(gateway, "Host: localhost", "Host: localhost") == 400
        raw = await gateway.raw()
        await raw.send(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert (await raw.reply()).status == 403


async def test_the_refusal_says_what_to_do(run_gateway: Any) -> None:
    async with run_gateway(hosts=LOOPBACK) as gateway:
        reply = await gateway.client.get("/v1/models", headers={"host": "nas.local"})
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], error["type"]) == (403, "host_not_allowed", "permission_error")
        assert "nas.local" in error["message"]
        assert "--api-host" in error["message"]


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("http://localhost:7701", 200),  # its own page
        ("https://localhost:7701", 200),
        ("HTTP://LOCALHOST:7701", 200),
        ("http://page.example:8080", 200),
        ("http://page.example", 403),
        ("http://page.example:8081", 403),
        ("https://page.example:8080", 403),
        ("http://localhost:8080", 403),  # another page of this machine
        ("http://localhost:7701.evil.example", 403),
        ("http://localhost:7701@evil.example", 403),
        ("http://evil.example/localhost:7701", 403),
        ("file://localhost:7701", 403),
        ("null", 403),
        ("", 403),
        ("//localhost:7701", 403),
    ],
)
async def test_origins(run_gateway: Any, origin: str, expected: int) -> None:
    async with run_gateway(hosts=LOOPBACK) as gateway:
        assert await status(gateway, "Host: localhost:7701", f"Origin: {origin}") == expected


async def test_a_second_origin_does_not_hide_the_first(run_gateway: Any) -> None:
    own, foreign = "Origin: http://localhost", "Origin: http://evil.example"
    async with run_gateway(hosts=LOOPBACK) as gateway:
        for pair in ((own, foreign), (foreign, own)):
            assert await status(gateway, "Host: localhost", *pair) == 403


async def test_cors_headers_go_to_allowed_origins_only(run_gateway: Any) -> None:
    async with run_gateway(hosts=LOOPBACK) as gateway:
        allowed = await gateway.client.get("/health", headers={"origin": "http://page.example:8080"})
        assert allowed.headers["access-control-allow-origin"] == "http://page.example:8080"
        assert allowed.headers["vary"] == "origin"
        for origin in ("http://evil.example", "null"):
            ask = {"origin": origin, "access-control-request-method": "POST"}
            assert (
                "access-control-allow-origin" not in (await gateway.client.options("/v1/models", headers=ask)).headers
            )
            assert "access-control-allow-origin" not in (await gateway.client.get("/health", headers=ask)).headers


async def test_any_origin_needs_a_star(run_gateway: Any) -> None:
    async with run_gateway(hosts=host_rules("127.0.0.1", origins=["*"])) as gateway:
        reply = await gateway.client.get("/v1/models", headers={"origin": "null"})
        assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (200, "*")


@pytest.mark.parametrize("bound", ["0.0.0.0", "::"])
async def test_a_port_on_all_addresses_answers_to_addresses_and_to_named_hosts_only(bound: str) -> None:
    rules = host_rules(bound, names=["den.local"])
    assert all(rules.knows(name) for name in ("192.168.1.7", "fd00::7", "den.local", "localhost"))
    assert not any(rules.knows(name) for name in ("evil.example", "192.168.1.7.evil.example", ""))


def test_a_port_on_one_address_answers_to_that_one() -> None:
    rules = host_rules("192.168.1.7")
    assert rules.knows("192.168.1.7")
    assert not rules.knows("192.168.1.8")


@given(st.text(max_size=40), st.text(max_size=40))
def test_no_origin_is_allowed_by_accident(origin: str, host: str) -> None:
    """Whatever is sent: only an exact match of scheme, host and port gets through."""
    if LOOPBACK.allows(origin, host):
        assert origin.lower().split("://")[-1].split("/")[0].split("?")[0].split("#")[0] == host.lower()
