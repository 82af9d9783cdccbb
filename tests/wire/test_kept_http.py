"""A kept HTTP connection against servers that say what a test wants: kept, closed, cut, too long, refused."""

from __future__ import annotations

import ssl
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest
import trio
from credentials import Swarm

from swarmnode.errors import LinkBroken
from swarmnode.wire import kept_http
from swarmnode.wire.kept_http import Answer, KeptConnection, kept_connection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

LATE_S = 5.0
MAX_ANSWER_BYTES = 1000
HELLO = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"


class Server:
    """Gives the n'th request `answers[n]`, or the last of them; `closing`: and hangs up then."""

    def __init__(self, *answers: bytes, closing: bool = False, reads_body: bool = True) -> None:
        self.answers = answers
        self.closing = closing
        self.reads_body = reads_body
        self.requests: list[bytes] = []
        self.connections = 0
        self.hung_up = trio.Event()
        self.tls: ssl.SSLContext | None = None
        self.trusting: ssl.SSLContext | None = None
        self.port = 0

    @asynccontextmanager
    async def running(self, prefix: str = "") -> AsyncIterator[KeptConnection]:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.port = listeners[0].socket.getsockname()[1]
        scheme = "http" if self.tls is None else "https"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, self._serve, listeners)
            with trio.fail_after(LATE_S):
                url = f"{scheme}://127.0.0.1:{self.port}{prefix}"
                async with kept_connection(url, self.trusting, MAX_ANSWER_BYTES) as kept:
                    yield kept
            nursery.cancel_scope.cancel()

    def secure(self, folder: Path, *, trusted: bool) -> None:
        """HTTPS, with a certificate of a CA that the client trusts or not."""
        files = Swarm(folder).node("127.0.0.1").files
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(files.certificate, files.key)
        self.trusting = ssl.create_default_context(cafile=str(files.ca)) if trusted else ssl.create_default_context()
        self.trusting.check_hostname = False  # a node's certificate names the node

    async def _serve(self, plain: trio.SocketStream) -> None:
        self.connections += 1
        stream = plain if self.tls is None else trio.SSLStream(plain, self.tls, server_side=True, https_compatible=True)
        with suppress(trio.BrokenResourceError):
            async with stream:
                while request := await self._read(stream):
                    self.requests.append(request)
                    await stream.send_all(self.answers[min(len(self.requests), len(self.answers)) - 1])
                    if self.closing:
                        break
        self.hung_up.set()

    async def _read(self, stream: trio.abc.Stream) -> bytes:
        data = b""
        while b"\r\n\r\n" not in data and (part := await stream.receive_some()):
            data += part
        head, _, body = data.partition(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
        while self.reads_body and len(body) < length:
            body += await stream.receive_some()
        return head and head + b"\r\n\r\n" + body


async def asked(kept: KeptConnection, body: bytes = b"x") -> Answer:
    await kept.ask("POST", "/there?n=1", {"x-mark": "m"}, body)
    return await kept.answer()


async def ended(kept: KeptConnection) -> None:
    """Until the server's FIN is here."""
    while kept._stream is not None and not kept._ended():  # noqa: ASYNC110 - nobody reads the socket, which would tell
        await trio.sleep(0.001)


async def test_many_requests_go_over_one_connection() -> None:
    server = Server(HELLO, b"HTTP/1.1 204 No Content\r\n\r\n")
    async with server.running() as kept:
        assert [await asked(kept) for _ in range(3)] == [Answer(200, b"hello"), Answer(204, b""), Answer(204, b"")]
    assert server.connections == 1


async def test_what_a_request_looks_like() -> None:
    server = Server(HELLO)
    async with server.running(prefix="/home/") as kept:
        await asked(kept, b"body")
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert (lines[0], lines[1]) == (b"POST /home/there?n=1 HTTP/1.1", b"host: 127.0.0.1:%d" % server.port)
    assert {b"x-mark: m", b"content-length: 4", b"accept-encoding: identity"} <= set(lines)
    assert body == b"body"


@pytest.mark.parametrize("announced", [True, False])
async def test_a_connection_that_the_server_ended_between_requests_is_made_again(announced: bool) -> None:
    head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok" if announced else HELLO
    server = Server(head, closing=True)
    async with server.running() as kept:
        for connections in (1, 2):
            server.hung_up = trio.Event()
            assert (await asked(kept)).status == 200
            await server.hung_up.wait()
            await ended(kept)
            assert server.connections == connections


async def test_an_answer_in_chunks_after_news_of_it_is_put_together() -> None:
    server = Server(
        b"HTTP/1.1 103 Early Hints\r\n\r\n"
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
    )
    async with server.running() as kept:
        assert await asked(kept) == await asked(kept) == Answer(200, b"hello")
    assert server.connections == 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", "hung up before"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhello", "broke off"),
        (b"no http at all\r\n\r\n", "broke off"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * (1 << 17) + b"\r\n\r\n", "broke off"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1001\r\n\r\n" + b"x" * 1001, "more than 1000 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1001, "more than 1000 bytes"),
    ],
    ids=["none", "half", "nonsense", "headers without end", "too long", "too long, undeclared"],
)
async def test_an_answer_that_is_none_breaks_it(answer: bytes, said: str) -> None:
    async with Server(answer, closing=True).running() as kept:
        with pytest.raises(LinkBroken, match=said):
            await asked(kept)


async def test_an_answer_that_nobody_asked_for_is_not_the_next_ones() -> None:
    server = Server(HELLO + b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nbad", HELLO)
    async with server.running() as kept:
        assert await asked(kept) == await asked(kept) == Answer(200, b"hello")
    assert server.connections == 2


async def test_a_refusal_before_the_body_was_read_is_heard() -> None:
    refusal = b"HTTP/1.1 413 Too Large\r\nconnection: close\r\ncontent-length: 3\r\n\r\nbig"
    async with Server(refusal, reads_body=False).running() as kept:
        assert await asked(kept, b"x" * 4_000_000) == Answer(413, b"big")


@pytest.mark.parametrize("trusted", [True, False])
async def test_https_is_for_servers_whose_certificate_is_trusted(tmp_path: Path, trusted: bool) -> None:
    server = Server(HELLO)
    server.secure(tmp_path, trusted=trusted)
    async with server.running() as kept:
        if trusted:
            assert await asked(kept) == await asked(kept) == Answer(200, b"hello")
        else:
            with pytest.raises(LinkBroken, match=r"no connection to https://127\.0\.0\.1.*CERTIFICATE_VERIFY_FAILED"):
                await asked(kept)
    assert server.connections == 1


async def test_the_public_webs_certificates_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every polled link makes two connections, and the loop stands still meanwhile."""
    server = Server(HELLO)
    server.secure(tmp_path, trusted=True)
    trusting, server.trusting = server.trusting, None
    made = [trusting]
    monkeypatch.setattr(kept_http.httpx, "create_ssl_context", lambda **_: made.pop())
    kept_http._public_tls.cache_clear()
    try:
        for _ in range(2):
            async with server.running() as kept:
                assert await asked(kept) == Answer(200, b"hello")
    finally:
        kept_http._public_tls.cache_clear()
    assert (server.connections, made) == (2, [])


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:9", r"no connection to http://127\.0\.0\.1:9: all attempts"),
        ("http://no such host", "no connection to http://no"),
        ("http://127.0.0.1:port", "is no URL"),
    ],
)
async def test_nobody_there(url: str, said: str) -> None:
    with pytest.raises(LinkBroken, match=said):
        async with kept_connection(url, None, MAX_ANSWER_BYTES) as kept:
            await asked(kept)
