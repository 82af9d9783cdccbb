"""A token revoked while its replies run: they are cut with their reason, and what they held is free."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import trio

from swarmnode.api.replay import Replay

CHAT = "/v1/chat/completions"


async def issue(guarded: Any) -> tuple[str, str]:
    from swarmnode.cluster.token_book import Scope

    record, token = await guarded.store.issue("mine", Scope.OPERATE, None)
    return record.id, token


async def test_a_running_stream_ends_with_token_revoked(guarded: Any, body: Any, until: Any) -> None:
    gateway = guarded.gateway
    gateway.backend.replay = Replay(texts=("x",) * 100_000, token_s=0.001)
    token_id, token = await issue(guarded)
    raw = await gateway.raw()
    await raw.post(CHAT, body(stream=True), f"Authorization: Bearer {token}")
    await raw.until(b'"content":"x"')
    await guarded.store.revoke(token_id)
    with trio.fail_after(2):
        rest = await raw.until(b"never")
    assert b'"code":"token_revoked"' in rest.rsplit(b"data: ", 1)[1]
    assert b"[DONE]" not in rest
    assert not rest.endswith(b"0\r\n\r\n"), "no client may take this for a clean end"
    await until(lambda: gateway.backend.open == 0)
    assert gateway.backend.cancelled == 1


@pytest.mark.parametrize("phase", ["accept_s", "queue_s", "prefill_s", "token_s"])
@pytest.mark.parametrize("stream", [True, False])
async def test_in_every_phase(guarded: Any, body: Any, until: Any, phase: str, stream: bool) -> None:
    gateway = guarded.gateway
    gateway.backend.replay = Replay(**{phase: None})
    token_id, token = await issue(guarded)
    raw = await gateway.raw()
    await raw.post(CHAT, body(stream=stream), f"X-Api-Key: {token}")
    await until(lambda: gateway.backend.phase == {"accept_s": "accept", "token_s": "decode"}.get(phase, phase[:-2]))
    await guarded.store.revoke(token_id)
    with trio.fail_after(2):
        reply = await raw.reply()
    before = not stream or phase == "accept_s"
    assert reply.status == (401 if before else 200)
    assert b'"code":"token_revoked"' in reply.body
    assert reply.complete is before
    assert gateway.backend.open == 0


async def test_other_tokens_go_on(guarded: Any, body: Any, until: Any) -> None:
    gateway = guarded.gateway
    gateway.backend.replay = Replay(texts=("x",) * 30, token_s=0.01)
    token_id, _ = await issue(guarded)
    _, other = await issue(guarded)
    replies: list[Any] = []

    async def stay() -> None:
        headers = {"authorization": f"Bearer {other}"}
        replies.append(await gateway.client.post(CHAT, json=body(stream=True), headers=headers))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stay)
        await until(lambda: gateway.backend.open == 1)
        await guarded.store.revoke(token_id)
    assert replies[0].text.endswith("data: [DONE]\n\n")


async def test_a_revoked_token_opens_nothing_any_more(guarded: Any, body: Any) -> None:
    token_id, token = await issue(guarded)
    await issue(guarded)
    headers = {"authorization": f"Bearer {token}"}
    assert (await guarded.gateway.client.post(CHAT, json=body(), headers=headers)).status_code == 200
    await guarded.store.revoke(token_id)
    assert (await guarded.gateway.client.post(CHAT, json=body(), headers=headers)).status_code == 401


async def test_a_request_whose_body_is_still_coming(guarded: Any, body: Any) -> None:
    """Admitted, then revoked before the chat begins: nothing is opened."""
    import json

    token_id, token = await issue(guarded)
    data = json.dumps(body()).encode()
    raw = await guarded.gateway.raw()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
    await raw.send(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data[:10])
    await trio.sleep(0.05)
    await guarded.store.revoke(token_id)
    await raw.send(data[10:])
    with trio.fail_after(2):
        reply = await raw.reply()
    assert (reply.status, reply.json()["error"]["code"]) == (401, "token_revoked")
    assert guarded.gateway.backend.finished == 0


async def test_a_client_that_does_not_read_holds_no_slot(guarded: Any, body: Any, until: Any) -> None:
    """The ring's slot is free at once, and the connection is closed although its write hangs."""
    gateway = guarded.gateway
    gateway.backend.replay = Replay(texts=("x" * 4096,) * 20_000)
    token_id, token = await issue(guarded)
    raw = await gateway.raw()
    await raw.post(CHAT, body(stream=True), f"Authorization: Bearer {token}")
    await until(lambda: gateway.backend.open == 1)
    await trio.sleep(0.1)
    await guarded.store.revoke(token_id)
    await until(lambda: gateway.backend.open == 0)
    with trio.fail_after(5), suppress(trio.BrokenResourceError):
        rest = await raw.until(b"never")  # what the kernel still holds, and then the end
        assert len(rest) < 20_000 * 4096
