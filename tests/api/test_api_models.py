"""The model lists and the administration routes."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import trio

from swarmnode.api.backend import LoadOptions
from swarmnode.errors import LoadRefused

MODEL = {
    "id": "replay-1",
    "object": "model",
    "created": 1_700_000_000,
    "owned_by": "swarmnode",
    "context_length": 2048,
    "max_model_len": 2048,
    "state": "ready",
}


async def test_openai_list(gateway: Any) -> None:
    """Row 54."""
    reply = await gateway.client.get("/v1/models")
    assert reply.json() == {"object": "list", "data": [MODEL]}
    assert (await gateway.client.get("/v1/models/replay-1")).json() == MODEL


@pytest.mark.parametrize("path", ["", "/status", "/archive"])
@pytest.mark.parametrize("name", ["nope", "REPLAY-1", "..%2Freplay-1"])
async def test_unknown_models(gateway: Any, path: str, name: str) -> None:
    reply = await gateway.client.get(f"/api/v1/models/{name}{path}")
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] in {"model_not_found", "unknown_url"}


async def test_administration_reads(gateway: Any) -> None:
    card = {"layers": 0, "stages": [], "id": "replay-1", "created": 1_700_000_000, "state": "ready"}
    card["context_tokens"] = 2048
    get = gateway.client.get
    assert (await get("/api/v1/models")).json() == {"models": [card]}
    assert (await get("/api/v1/models/replay-1")).json() == card
    assert (await get("/api/v1/models/replay-1/status")).json()["state"] == "ready"
    assert (await get("/api/v1/nodes")).json() == {"nodes": [], "rings": [], "sessions": 0}


@pytest.mark.parametrize(
    ("body", "status", "options"),
    [
        (None, 202, LoadOptions()),
        ({}, 202, LoadOptions()),
        ({"wait": True, "num_stages": 3}, 200, LoadOptions(num_stages=3, wait=True)),
        ({"peers": ["a", "b"], "dtype": "float32"}, 202, LoadOptions(peers=("a", "b"), dtype="float32")),
        ({"peer": "a"}, 202, LoadOptions(num_stages=1, peers=("a",))),
        ({"num_stages": None, "quantization": None, "unknown": 1}, 202, LoadOptions()),
        ({"quantization": {"method": "int8"}}, 202, LoadOptions(quantization="int8")),
        ({"quantization": {"bits": 4}}, 202, LoadOptions(quantization="nf4")),
        ({"quantization": {"bits": 8}}, 202, LoadOptions(quantization="bnb-int8")),
        ({"quantization": {"backend": "torchao"}}, 202, LoadOptions(quantization="int4-fast")),
        ({"quantization": {"method": "none"}}, 202, LoadOptions(quantization="none")),
    ],
)
async def test_load(gateway: Any, body: Any, status: int, options: LoadOptions) -> None:
    reply = await gateway.client.post("/api/v1/models/replay-1/load", json=body) if body is not None else (
        await gateway.client.post("/api/v1/models/replay-1/load")
    )  # fmt: skip
    assert (reply.status_code, reply.json()["state"]) == (status, "ready")
    assert gateway.backend.loads == [("replay-1", options)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"num_stages": 0}, "num_stages"),
        ({"num_stages": "2"}, "num_stages"),
        ({"peers": "a"}, "peers"),
        ({"peers": [""]}, "peers[0]"),
        ({"peer": "a", "peers": ["b"]}, "peer"),
        ({"dtype": "int3"}, "dtype"),
        ({"quantization": {"bits": 2}}, "quantization"),
        ({"quantization": {"method": "gptq"}}, "quantization"),
        ({"quantization": "int8"}, "quantization"),
        ({"wait": "yes"}, "wait"),
    ],
)
async def test_load_refuses_what_it_cannot_mean(gateway: Any, body: Any, param: str) -> None:
    reply = await gateway.client.post("/api/v1/models/replay-1/load", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert gateway.backend.loads == []


async def test_l5_a_plan_loads_nothing(gateway: Any) -> None:
    reply = await gateway.client.post("/api/v1/models/replay-1/load", json={"plan": True, "num_stages": 2})
    assert (reply.status_code, reply.json()["state"]) == (200, "planned")
    assert gateway.backend.loads == []


async def test_a_refused_load_keeps_its_numbers(gateway: Any, monkeypatch: Any) -> None:
    async def refuse(model: str, options: LoadOptions) -> Any:
        raise LoadRefused("5 stages, the model has 4 layers", param="num_stages")

    monkeypatch.setattr(gateway.backend, "load", refuse)
    reply = await gateway.client.post("/api/v1/models/replay-1/load", json={"num_stages": 5})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "load_refused")
    assert "4 layers" in reply.json()["error"]["message"]


async def test_unload(gateway: Any) -> None:
    gateway.backend.open = 1
    busy = await gateway.client.post("/api/v1/models/replay-1/unload")
    assert (busy.status_code, busy.json()["error"]["code"]) == (409, "conflict")
    forced = await gateway.client.post("/api/v1/models/replay-1/unload", json={"force": True})
    assert forced.json()["state"] == "available"
    gateway.backend.open = 0


async def test_remove(gateway: Any) -> None:
    refused = await gateway.client.delete("/api/v1/models/replay-1")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    wrong = await gateway.client.request("DELETE", "/api/v1/models/replay-1", json={"force": "yes"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "force")
    gone = await gateway.client.request("DELETE", "/api/v1/models/replay-1", json={"force": True})
    assert gone.json() == {"id": "replay-1", "removed": True}
    assert (await gateway.client.delete("/api/v1/models/replay-1")).status_code == 404


async def test_archive(gateway: Any) -> None:
    reply = await gateway.client.get("/api/v1/models/replay-1/archive")
    assert (reply.content, reply.headers["content-type"]) == (b"tarball", "application/x-tar")
    assert reply.headers["content-disposition"] == 'attachment; filename="replay-1.tar"'


async def test_a_slow_download_is_not_a_stalled_one(gateway: Any) -> None:
    """Every piece has the write deadline for itself, so a part larger than a slow link's deadline gets through."""
    gateway.backend.archive_parts = (bytes(12 << 20),)
    raw = await gateway.raw()
    raw.stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    await raw.send(b"GET /api/v1/models/replay-1/archive HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    received = 0
    with trio.fail_after(10):
        while data := await raw.stream.receive_some(128 << 10):
            received += len(data)
            await trio.sleep(0.02 * len(data) / (128 << 10))
    assert received > 12 << 20


async def test_a_bug_in_a_listing_is_a_json_500(gateway: Any, monkeypatch: Any, caplog: Any) -> None:
    def broken() -> Any:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(gateway.backend, "models", broken)
    reply = await gateway.client.get("/v1/models", headers={"x-request-id": "abc", "origin": "http://page.example"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "internal_error")
    assert "abc" in reply.json()["error"]["message"]
    assert "secret" not in reply.text
    assert (reply.headers["x-request-id"], reply.headers["access-control-allow-origin"]) == ("abc", "*")
    assert "secret detail" in caplog.text


async def test_an_archive_that_breaks_off_is_cut(gateway: Any, monkeypatch: Any, caplog: Any) -> None:
    async def parts() -> Any:
        yield b"tar"
        raise OSError("disk gone")

    monkeypatch.setattr(gateway.backend, "_parts", parts)
    raw = await gateway.raw()
    await raw.send(b"GET /api/v1/models/replay-1/archive HTTP/1.1\r\nHost: x\r\n\r\n")
    reply = await raw.reply()
    assert (reply.status, reply.body, reply.complete) == (200, b"tar", False)
    assert "disk gone" in caplog.text
