"""A reverse proxy as nginx is by default: it passes on only what is whole, and cuts a request that stays idle.

One request a connection, HTTP/1.1. `run` it in a test's own trio, or use `buffering_proxy` beside real processes.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import httpx
import trio

if TYPE_CHECKING:
    from collections.abc import Iterator

UP_S = 5.0
IDLE_S = 60.0
"""nginx's proxy_read_timeout."""


class BufferingProxy:
    """`whole` counts the requests that were passed on with their answers, `cut` those that took too long."""

    def __init__(self, target: str, idle_s: float = IDLE_S) -> None:
        self.url = ""
        self.whole = self.cut = 0
        self._target = target
        self._idle_s = idle_s

    async def run(self, *, task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED) -> None:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=self._target, trust_env=False, timeout=self._idle_s) as self._client:
            task_status.started(self.url)
            await trio.serve_listeners(self._serve, listeners)

    async def _serve(self, stream: trio.SocketStream) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError, httpx.HTTPError):
            async with stream:
                await stream.send_all(await self._answer(stream))

    async def _answer(self, stream: trio.SocketStream) -> bytes:
        head, _, body = (await _read_head(stream)).partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        headers = [tuple(line.split(": ", 1)) for line in lines[1:] if not line.lower().startswith("host")]
        length = int({name.lower(): value for name, value in headers}.get("content-length", 0))
        while len(body) < length:
            body += await stream.receive_some()
        method, path, _ = lines[0].split(" ")
        try:
            answer = await self._client.request(method, path, content=body, headers=headers)  # type: ignore[arg-type]
        except httpx.TimeoutException:
            self.cut += 1
            return _response(504, b"")
        self.whole += 1
        return _response(answer.status_code, answer.content)


def _response(status: int, content: bytes) -> bytes:
    head = f"HTTP/1.1 {status} X\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
    return head.encode() + content


async def _read_head(stream: trio.SocketStream) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        part = await stream.receive_some()
        if not part:
            raise trio.BrokenResourceError
        data += part
    return data


@contextmanager
def buffering_proxy(target: str) -> Iterator[BufferingProxy]:
    """In a thread of its own."""
    proxy, up, scope = BufferingProxy(target), threading.Event(), trio.CancelScope()
    tokens: list[trio.lowlevel.TrioToken] = []

    async def run() -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                await nursery.start(proxy.run)
                tokens.append(trio.lowlevel.current_trio_token())
                up.set()

    thread = threading.Thread(target=trio.run, args=(run,), daemon=True)
    thread.start()
    try:
        assert up.wait(UP_S), "the proxy did not come up"
        yield proxy
    finally:
        tokens[0].run_sync_soon(scope.cancel)
        thread.join(UP_S)
