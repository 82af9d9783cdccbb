"""HTTP manners of the API port: methods, paths, CORS, content types, body limits, connections."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
import trio

CHAT = "/v1/chat/completions"
GETS = ["/", "/health", "/v1/models", "/v1/models/replay-1", "/api/v1/models", "/api/v1/nodes", "/openapi.json"]


async def send_until_cut(raw: Any, data: bytes, pause_s: float) -> None:
    """Returns once the server has closed the connection."""
    with suppress(trio.BrokenResourceError):
        while True:
            await raw.send(data)
            await trio.sleep(pause_s)


async def test_health(gateway: Any) -> None:
    reply = await gateway.client.get("/health")
    assert (reply.status_code, reply.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("path", [*GETS, "/api/v1/models/replay-1/archive"])
async def test_head_is_get_without_body(gateway: Any, path: str) -> None:
    """Row 63; on one socket, so that a stray body byte would break the next answer."""
    raw = await gateway.raw()
    for _ in range(2):
        await raw.send(f"HEAD {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        head = await raw.until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
    got = await gateway.client.get(path)
    assert got.headers["content-type"].encode() in head
    assert got.content


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PUT", "/v1/models", "GET, HEAD, OPTIONS"),
        ("GET", CHAT, "POST, OPTIONS"),
        ("HEAD", CHAT, "POST, OPTIONS"),
        ("DELETE", "/health", "GET, HEAD, OPTIONS"),
        ("GET", "/api/v1/models/replay-1/load", "POST, OPTIONS"),
    ],
)
async def test_wrong_method(gateway: Any, method: str, path: str, allow: str) -> None:
    reply = await gateway.client.request(method, path)
    assert (reply.status_code, reply.headers["allow"]) == (405, allow)
    if method != "HEAD":
        assert reply.json()["error"]["code"] == "method_not_allowed"


async def test_unknown_url(gateway: Any) -> None:
    for method in ("GET", "POST"):
        reply = await gateway.client.request(method, "/v1/nothing")
        assert reply.status_code == 404
        assert reply.json()["error"]["code"] == "unknown_url"
        assert "/v1/nothing" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "target", ["//v1//models/", "/v1/models/", "///v1/models", "http://x/v1/models", "HTTP://x:1/v1/models?a=b"]
)
async def test_paths_are_normalised(gateway: Any, target: str) -> None:
    raw = await gateway.raw()
    await raw.send(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert (await raw.reply()).json()["object"] == "list"


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/nowhere"])
async def test_options_before_anything(gateway: Any, path: str) -> None:
    """Row 62: the preflight allows Authorization and the headers of OpenAI's own clients."""
    reply = await gateway.client.options(
        path,
        headers={
            "origin": "http://page.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "Authorization, content-type, X-Stainless-OS, openai-beta, x-evil",
            "content-type": "text/plain",
        },
    )
    assert reply.status_code == 204
    assert reply.headers["access-control-allow-origin"] == "*"
    assert "POST" in reply.headers["access-control-allow-methods"]
    allowed = reply.headers["access-control-allow-headers"].split(", ")
    assert {"authorization", "content-type", "x-api-key", "x-stainless-os", "openai-beta"} <= set(allowed)
    assert "x-evil" not in allowed


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/health", 200), ("GET", "/no", 404), ("PUT", CHAT, 405), ("POST", CHAT, 400)],
)
async def test_every_response_has_cors_and_a_request_id(gateway: Any, method: str, path: str, status: int) -> None:
    reply = await gateway.client.request(method, path, headers={"origin": "http://page.example"})
    assert reply.status_code == status
    assert reply.headers["access-control-allow-origin"] == "*"
    assert "x-request-id" in reply.headers["access-control-expose-headers"]
    assert reply.headers["x-request-id"]
    assert "server" not in reply.headers


@pytest.mark.parametrize(
    ("given", "echoed"), [("abc-1.2_3", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("é", False)]
)
async def test_request_id(gateway: Any, given: str, echoed: bool) -> None:
    reply = await gateway.client.get("/health", headers={"x-request-id": given.encode("latin-1")})
    assert (reply.headers["x-request-id"] == given) is echoed
    again = await gateway.client.get("/health")
    assert len({reply.headers["x-request-id"], again.headers["x-request-id"]}) == 2


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        (None, 200),
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 415),
        ("text/plain;charset=utf-8", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/octet-stream", 415),
    ],
)
async def test_content_types(gateway: Any, body: Any, content_type: str | None, status: int) -> None:
    """Row 52; what a foreign page can send without a preflight never reaches a route."""
    headers = {} if content_type is None else {"content-type": content_type}
    reply = await gateway.client.post(CHAT, content=json.dumps(body()), headers=headers)
    assert reply.status_code == status
    if status == 415:
        assert reply.json()["error"]["code"] == "unsupported_media_type"
        assert gateway.backend.requests == []


async def test_forms_do_not_reach_administration(gateway: Any) -> None:
    reply = await gateway.client.post("/api/v1/models/replay-1/unload", data={"force": "1"})
    assert reply.status_code == 415
    assert gateway.backend.loaded


async def test_compressed_bodies_are_refused(gateway: Any) -> None:
    reply = await gateway.client.post(CHAT, content=b"x", headers={"content-encoding": "gzip"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_content_encoding")


async def test_chunked_request_body(gateway: Any, body: Any) -> None:
    """Row 58: any chunk boundaries, one of them inside a character."""
    text = json.dumps(body(messages=[{"role": "user", "content": "你😀"}]), ensure_ascii=False).encode()
    raw = await gateway.raw()
    await raw.send(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
    for start in range(0, len(text), 7):
        part = text[start : start + 7]
        await raw.send(b"%x\r\n%b\r\n" % (len(part), part))
    await raw.send(b"0\r\n\r\n")
    assert (await raw.reply()).status == 200
    assert gateway.backend.requests[0].messages[0]["content"] == "你😀"


async def test_expect_continue(gateway: Any, body: Any) -> None:
    """curl asks for 100 before a body of more than a megabyte."""
    text = json.dumps(body()).encode()
    raw = await gateway.raw()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\nExpect: 100-continue\r\n\r\n"
    await raw.send(head.encode())
    assert b" 100 " in await raw.until(b"\r\n\r\n")
    await raw.send(text)
    assert (await raw.reply()).status == 200


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [100 << 10, 3 << 20])
async def test_a_huge_body_is_413_and_the_client_sees_it(gateway: Any, chunked: bool, size: int) -> None:
    """The answer survives although the body is still coming; the server stays well."""

    async def parts() -> Any:
        for _ in range(size >> 14):
            yield b" " * (1 << 14)

    content = parts() if chunked else b" " * size
    reply = await gateway.client.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
    assert (await gateway.client.get("/health")).status_code == 200


async def test_an_endless_body_is_cut(gateway: Any) -> None:
    raw = await gateway.raw()
    await raw.send(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
    with trio.fail_after(5):
        await send_until_cut(raw, b"4000\r\n" + b" " * 0x4000 + b"\r\n", 0.001)


async def test_a_body_that_stands_still_is_408(gateway: Any) -> None:
    raw = await gateway.raw()
    await raw.send(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n".encode() + b"{")
    with trio.fail_after(5):
        reply = await raw.reply()
        assert (reply.status, reply.json()["error"]["code"]) == (408, "request_timeout")
        assert await raw.until(b"never") == b""


async def test_a_body_that_drips_is_408(gateway: Any) -> None:
    raw = await gateway.raw()
    await raw.send(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 10000\r\n\r\n".encode())
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_until_cut, raw, b" ", 0.05)
            assert (await raw.reply()).status == 408


async def test_two_posts_on_one_socket(gateway: Any, body: Any) -> None:
    """Row 60: the connection is kept, after whole replies, streams and refusals alike."""
    raw = await gateway.raw()
    for fields, status in [({}, 200), ({"stream": True}, 200), ({"n": 2}, 400), ({"model": "no"}, 404), ({}, 200)]:
        await raw.post(CHAT, body(**fields))
        reply = await raw.reply()
        assert (reply.status, reply.complete) == (status, True)
        assert "connection" not in reply.headers


async def test_pipelined_requests(gateway: Any) -> None:
    raw = await gateway.raw()
    await raw.send(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
    for _ in range(3):
        assert (await raw.reply()).json() == {"status": "ok"}


async def test_idle_connections_outlive_client_pools(gateway: Any) -> None:
    """Row 60, by the numbers: the limit that the server runs on by default."""
    from swarmnode.api.connection import hypercorn_config
    from swarmnode.api.limits import DEFAULT_LIMITS

    assert DEFAULT_LIMITS.idle_connection_s >= 120
    assert hypercorn_config().alpn_protocols == ["http/1.1"]


async def test_no_http2_on_the_api_port(gateway: Any) -> None:
    raw = await gateway.raw()
    await raw.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    with trio.fail_after(5):
        answer = await raw.until(b"never")
    assert b" 505 " in answer


async def test_an_offered_upgrade_to_http2_is_not_taken(gateway: Any) -> None:
    """Java's client offers it with every request, and goes on in HTTP/1.1."""
    raw = await gateway.raw()
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    for _ in range(2):
        await raw.send(b"GET /health HTTP/1.1\r\nHost: x\r\n" + upgrade + b"\r\n")
        with trio.fail_after(5):
            reply = await raw.reply()
        assert (reply.status, reply.body) == (200, b'{"status":"ok"}')


async def test_websockets_are_refused(gateway: Any) -> None:
    raw = await gateway.raw()
    await raw.send(
        b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    with trio.fail_after(5):
        assert (await raw.until(b"\r\n")).startswith(b"HTTP/1.1 403")


@pytest.mark.parametrize(
    "data", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a" * 70000, b"\x16\x03\x01\x02\x00\r\n\r\n"]
)
async def test_garbage_ends_the_connection_only(gateway: Any, data: bytes) -> None:
    raw = await gateway.raw()
    with trio.fail_after(5):
        await raw.send(data)
        answer = await raw.until(b"never")
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert (await gateway.client.get("/health")).status_code == 200


async def test_two_content_types_are_none(gateway: Any) -> None:
    """A proxy in between might have looked at the other one."""
    raw = await gateway.raw()
    await raw.post("/v1/chat/completions", {"model": "replay-1"}, "Content-Type: text/plain")
    assert (await raw.reply()).status == 415


@pytest.mark.parametrize("swapped", [False, True])
async def test_a_request_with_two_lengths_ends_the_connection(gateway: Any, swapped: bool) -> None:
    """A proxy that goes by the other length would take what follows for somebody else's request."""
    lengths = [b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n"]
    raw = await gateway.raw()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + b"".join(sorted(lengths, reverse=swapped))
    with trio.fail_after(5):
        await raw.send(head + b"\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await raw.until(b"never")
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1
