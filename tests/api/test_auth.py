"""API tokens on every route: who gets in, who does not and what they are told."""

from __future__ import annotations

import re
from typing import Any

import pytest

from swarmnode.api.app import create_app
from swarmnode.api.auth import Credentials
from swarmnode.api.replay import ReplayBackend
from swarmnode.roles.token_store import TokenStore

LOCAL_SECRET = "the command line's own secret"
CHAT = "/v1/chat/completions"
RANK = {"read": 1, "operate": 2, "admin": 3}
OPEN = {("GET", "/health")}
NEEDS = {
    ("GET", "/"): "read",
    ("GET", "/openapi.json"): "read",
    ("GET", "/v1/models"): "read",
    ("GET", "/v1/models/{model}"): "read",
    ("GET", "/api/v1/models"): "read",
    ("GET", "/api/v1/models/{model}"): "read",
    ("GET", "/api/v1/models/{model}/status"): "read",
    ("GET", "/api/v1/nodes"): "read",
    ("GET", "/metrics"): "read",
    ("GET", "/api/v1/models/{model}/performance"): "read",
    ("GET", "/api/v1/workers/{worker}/logs"): "operate",
    ("POST", "/v1/chat/completions"): "operate",
    ("POST", "/api/v1/chat/completions"): "operate",
    ("POST", "/api/v1/models/{model}/load"): "operate",
    ("POST", "/api/v1/models/{model}/unload"): "operate",
    ("GET", "/api/v1/models/{model}/archive"): "operate",
    ("DELETE", "/api/v1/models/{model}"): "admin",
    ("GET", "/api/v1/api-tokens"): "admin",
    ("POST", "/api/v1/api-tokens"): "admin",
    ("DELETE", "/api/v1/api-tokens/{token_id}"): "admin",
    ("POST", "/api/v1/join-tokens"): "admin",
    ("GET", "/api/v1/join-tokens"): "admin",
    ("DELETE", "/api/v1/join-tokens/{token_id}"): "admin",
    ("DELETE", "/api/v1/nodes/{name}"): "admin",
}
BODIES: dict[str, Any] = {
    CHAT: {"model": "replay-1", "messages": [{"role": "user", "content": "hi"}]},
    "/api/v1/api-tokens": {"label": "made here", "scopes": ["read"]},
}
BODIES["/api" + CHAT] = BODIES[CHAT]


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def call(guarded: Any, method: str, path: str, headers: dict[str, str]) -> Any:
    path = path.replace("{model}", "replay-1").replace("{token_id}", "absent").replace("{name}", "den")
    body = {"json": BODIES.get(path, {})} if method == "POST" else {}
    return await guarded.gateway.client.request(method, path, headers=headers, **body)


def test_the_list_of_routes_is_complete(tmp_path: Any) -> None:
    """A route that is new must be put into NEEDS or OPEN here: that is, somebody decided who may call it."""
    store = TokenStore(tmp_path / "tokens.json", required=True)
    schema = create_app(ReplayBackend(), credentials=Credentials(store, LOCAL_SECRET)).openapi()
    found = {(method.upper(), path) for path, methods in schema["paths"].items() for method in methods}
    assert found | {("GET", "/openapi.json")} == set(NEEDS) | OPEN


@pytest.mark.parametrize(("method", "path"), sorted(NEEDS))
@pytest.mark.parametrize("guarded", [True], indirect=True)
async def test_every_route_needs_its_scope(guarded: Any, method: str, path: str) -> None:
    needed = NEEDS[method, path]
    expired = await guarded.token("admin", expires_in_s=10)
    record, revoked = await guarded.store.issue("revoked", max_scope(), None)
    await guarded.store.revoke(record.id)
    guarded.clock.now += 10
    for headers in ({}, bearer(expired), bearer(revoked), bearer("sk-swarm-" + "A" * 43), {"x-api-key": "nonsense"}):
        reply = await call(guarded, method, path, headers)
        assert reply.status_code == 401
        assert reply.headers["www-authenticate"].startswith("Bearer ")
        error = reply.json()["error"]
        assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
        assert needed in error["message"]
    for scope, rank in RANK.items():
        reply = await call(guarded, method, path, bearer(await guarded.token(scope)))
        if rank >= RANK[needed]:
            assert reply.status_code in (200, 201, 202) or reply.json()["error"]["code"] in (
                "token_not_found",
                "peer_not_found",
                "conflict",
            )
        else:
            assert reply.status_code == 403
            error = reply.json()["error"]
            assert (error["code"], error["type"]) == ("insufficient_scope", "permission_error")
            assert needed in error["message"]
            assert f'scope="{needed}"' in reply.headers["www-authenticate"]
    assert (await call(guarded, method, path, bearer(LOCAL_SECRET))).status_code in (200, 201, 202, 404, 409)


def max_scope() -> Any:
    from swarmnode.cluster.token_book import Scope

    return Scope.ADMIN


@pytest.mark.parametrize("guarded", [True], indirect=True)
async def test_the_fixed_list_is_open(guarded: Any) -> None:
    for method, path in OPEN:
        assert (await call(guarded, method, path, {})).status_code == 200
        assert (await call(guarded, method, path, bearer("nonsense"))).status_code == 200
    for _, path in NEEDS:
        reply = await guarded.gateway.client.options(path)
        assert (reply.status_code, reply.content) == (204, b"")


@pytest.mark.parametrize("guarded", [True], indirect=True)
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "POST", "DELETE", "PATCH"])
async def test_unknown_paths_and_methods_show_nothing(guarded: Any, method: str) -> None:
    for path in ("/v1", "/api", "/metrics/x", "/docs", "/redoc", "/v1/nothing", "/health/x", "/openapi"):
        assert (await guarded.gateway.client.request(method, path)).status_code == 404


async def test_open_mode_lets_everybody_chat_with_any_key(guarded: Any) -> None:
    """The source's first-run mode; clients that insist on a key may send any."""
    for headers in ({}, bearer("none"), {"x-api-key": "none"}):
        assert (await call(guarded, "POST", CHAT, headers)).status_code == 200
        assert (await call(guarded, "GET", "/v1/models", headers)).status_code == 200


async def test_open_mode_does_not_make_everybody_an_admin(guarded: Any) -> None:
    """Whoever makes the first token decides who gets in: that is the machine's own command line."""
    for headers in ({}, bearer("none")):
        reply = await call(guarded, "POST", "/api/v1/api-tokens", headers)
        assert reply.status_code == 401
    assert guarded.store.records() == ()
    assert (await call(guarded, "POST", "/api/v1/api-tokens", bearer(LOCAL_SECRET))).status_code == 201


async def test_a_token_switches_enforcement_on_and_revoking_all_switches_it_off(guarded: Any) -> None:
    made = (await call(guarded, "POST", "/api/v1/api-tokens", bearer(LOCAL_SECRET))).json()
    assert re.fullmatch(r"sk-swarm-[A-Za-z0-9_-]{43}", made["token"])
    assert (await call(guarded, "GET", "/v1/models", {})).status_code == 401
    assert (await call(guarded, "GET", "/v1/models", bearer(made["token"]))).status_code == 200
    gone = await guarded.gateway.client.delete(f"/api/v1/api-tokens/{made['id']}", headers=bearer(LOCAL_SECRET))
    assert (gone.status_code, gone.json()["revoked"]) == (200, True)
    assert (await call(guarded, "GET", "/v1/models", {})).status_code == 200


async def test_an_expired_token_keeps_enforcing_for_31_days(guarded: Any) -> None:
    await guarded.token("read", expires_in_s=60)
    guarded.clock.now += 60 + 31 * 86_400 - 1
    assert (await call(guarded, "GET", "/v1/models", {})).status_code == 401
    guarded.clock.now += 1
    assert (await call(guarded, "GET", "/v1/models", {})).status_code == 200


@pytest.mark.parametrize("guarded", [True], indirect=True)
async def test_required_tokens_rule_open_mode_out(guarded: Any) -> None:
    """SWARM_REQUIRE_API_TOKEN=1."""
    assert guarded.store.records() == ()
    assert (await call(guarded, "POST", CHAT, {})).status_code == 401


async def test_a_token_is_shown_once(guarded: Any) -> None:
    made = await call(guarded, "POST", "/api/v1/api-tokens", bearer(LOCAL_SECRET))
    assert made.headers["cache-control"] == "no-store"
    token = made.json()["token"]
    listed = await call(guarded, "GET", "/api/v1/api-tokens", bearer(LOCAL_SECRET))
    assert token not in listed.text
    assert listed.json()["enforced"] is True
    [shown] = listed.json()["tokens"]
    assert shown == {key: value for key, value in made.json().items() if key != "token"}
    assert (shown["label"], shown["scopes"], shown["expires"]) == ("made here", ["read"], None)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"scopes": ["read"]}, "label"),
        ({"label": "x"}, "scopes"),
        ({"label": "x", "scopes": []}, "scopes"),
        ({"label": "x", "scopes": ["root"]}, "scopes"),
        ({"label": "x", "scopes": "read"}, "scopes"),
        ({"label": "", "scopes": ["read"]}, "label"),
        ({"label": "a\nb", "scopes": ["read"]}, "label"),
        ({"label": "x", "scopes": ["read"], "expires_in_s": 0}, "expires_in_s"),
        ({"label": "x", "scopes": ["read"], "expires_in_s": "1h"}, "expires_in_s"),
        ({"label": "x", "scopes": ["read"], "expires_in": 60}, "expires_in"),
    ],
)
async def test_bad_token_requests_are_named(guarded: Any, body: Any, param: str) -> None:
    """A misspelt expiry too: it must not make a token that lives for ever."""
    reply = await guarded.gateway.client.post("/api/v1/api-tokens", json=body, headers=bearer(LOCAL_SECRET))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert guarded.store.records() == ()


@pytest.mark.parametrize("guarded", [True], indirect=True)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer  "])
async def test_schemes(guarded: Any, scheme: str) -> None:
    token = await guarded.token("read")
    headers = {"authorization": f"{scheme} {token}"}
    assert (await call(guarded, "GET", "/v1/models", headers)).status_code == 200
    assert (await call(guarded, "GET", "/v1/models", {"x-api-key": token})).status_code == 200
    for wrong in (f"Basic {token}", token, f"Bearer{token}", f"Bearer {token} x", f"Bearer {token}x", "Bearer"):
        assert (await call(guarded, "GET", "/v1/models", {"authorization": wrong})).status_code == 401


@pytest.mark.parametrize("guarded", [True], indirect=True)
async def test_two_tokens_that_differ_are_refused(guarded: Any) -> None:
    """A proxy in front may have looked at the other one."""
    good, other = await guarded.token("admin"), await guarded.token("read")
    client = guarded.gateway.client
    same = [("authorization", f"Bearer {good}"), ("x-api-key", good)]
    assert (await client.get("/v1/models", headers=same)).status_code == 200
    for second in (("authorization", f"Bearer {other}"), ("x-api-key", other), ("x-api-key", "")):
        reply = await client.get("/v1/models", headers=[("authorization", f"Bearer {good}"), second])
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("guarded", [True], indirect=True)
async def test_a_refused_body_is_not_read(guarded: Any, until: Any) -> None:
    raw = await guarded.gateway.raw()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n"
    await raw.send(head.encode() + b"{")
    assert (await raw.reply()).status == 401
    assert guarded.gateway.backend.requests == []


PATH_TRICKS = [
    "/%76%31/models",
    "/v1%2fmodels",
    "//v1//models",
    "/v1/./models",
    "/health/../v1/models",
    "/health/..%2f..%2fv1/models",
    "/health;/v1/models",
    "/v1/models;x=/health",
    "/v1/models/",
    "/v1/models?/health",
    "/v1/models%3f/health",
    "/v1/models%23/health",
    "/v1\\models",
    "/V1/models",
    "http://localhost/v1/models",
    "http://127.0.0.1/health@x/v1/models",
    "/health%00/../v1/models",
    "/v1/models%00",
    "/v1/models%20",
    "/%2e/v1/models",
    "/%2e%2e/v1/models",
]


@pytest.mark.parametrize("guarded", [True], indirect=True)
@pytest.mark.parametrize("target", PATH_TRICKS)
async def test_no_path_reaches_a_route_without_its_token(guarded: Any, target: str) -> None:
    """The check looks at the route that runs: whatever the path says, nothing of the list of models comes out."""
    raw = await guarded.gateway.raw()
    await raw.send(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    reply = await raw.reply()
    assert reply.status in (400, 401, 404)
    assert b"replay-1" not in reply.body


@pytest.mark.parametrize("guarded", [True], indirect=True)
@pytest.mark.parametrize(
    "host", ["localhost/health?", "localhost/health#", "localhost/health;", "x@localhost", "localhost:1/health"]
)
async def test_no_host_changes_the_route_that_is_checked(guarded: Any, host: str) -> None:
    """BadHost: frameworks that build a URL from Host see another path than the router."""
    raw = await guarded.gateway.raw()
    await raw.send(f"GET /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    reply = await raw.reply()
    assert reply.status in (400, 403)
    assert b"replay-1" not in reply.body


@pytest.mark.parametrize("guarded", [True], indirect=True)
async def test_who_may_not_speak_hears_that_first(guarded: Any) -> None:
    """Not how large a body may be, or of which type."""
    for headers in ({}, {"content-type": "text/plain"}):
        reply = await guarded.gateway.client.post(CHAT, content=b"x" * (128 << 10), headers=headers)
        assert reply.status_code == 401
    token = await guarded.token("operate")
    reply = await guarded.gateway.client.post(CHAT, content=b"x" * (128 << 10), headers=bearer(token))
    assert reply.status_code == 413
