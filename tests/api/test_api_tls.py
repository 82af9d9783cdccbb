"""TLS on the API port: HTTP inside it, deadlines around it, ends that tell a cut from a close."""

from __future__ import annotations

import datetime
import json
import ssl
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import trio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from swarmnode.api.replay import Replay
from swarmnode.errors import InvalidRequest
from swarmnode.roles.api_port import ApiOptions, tls_context
from swarmnode.wire.address import Address

if TYPE_CHECKING:
    from pathlib import Path

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for `den` and its key."""
    folder = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "den")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("den")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "cert.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths


@pytest.fixture
def tls(files: tuple[Path, Path]) -> ssl.SSLContext:
    context = tls_context(ApiOptions(Address("127.0.0.1", 0), certificate=files[0], key=files[1]))
    assert context is not None
    return context


async def secure_stream(port: int) -> trio.SSLStream[trio.SocketStream]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    client = trio.SSLStream(await trio.open_tcp_stream("127.0.0.1", port), context, https_compatible=True)
    await client.do_handshake()
    return client


async def test_whole_replies_streams_and_keep_alive(run_gateway: Any, tls: ssl.SSLContext, body: Any) -> None:
    async with run_gateway(tls=tls) as gateway:
        gateway.backend.replay = Replay(texts=("x" * 5000,) * 40)
        for _ in range(2):
            assert (await gateway.chat()).json()["choices"][0]["message"]["content"] == "x" * 200_000
            async with gateway.client.stream("POST", CHAT, json=body(stream=True)) as reply:
                text = await reply.aread()
            assert text.endswith(b"data: [DONE]\n\n")


async def test_the_certificate_is_the_given_one(run_gateway: Any, tls: ssl.SSLContext, files: Any) -> None:
    trust = ssl.create_default_context(cafile=str(files[0]))
    trust.check_hostname = False
    async with run_gateway(tls=tls) as gateway:
        url = f"https://127.0.0.1:{gateway.port}/health"
        async with httpx.AsyncClient(verify=trust, trust_env=False) as client:
            assert (await client.get(url)).status_code == 200
        async with httpx.AsyncClient(verify=ssl.create_default_context(), trust_env=False) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(url)


@pytest.mark.parametrize("politely", [True, False])
async def test_a_client_that_leaves_is_noticed(
    run_gateway: Any, tls: ssl.SSLContext, body: Any, until: Any, politely: bool
) -> None:
    async with run_gateway(tls=tls) as gateway:
        gateway.backend.replay = Replay(texts=("x",) * 1000, token_s=0.01)
        client = await secure_stream(gateway.port)
        data = json.dumps(body(stream=True)).encode()
        await client.send_all(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        assert await client.receive_some()
        if politely:
            await client.aclose()
        else:
            await trio.aclose_forcefully(client)
        await until(lambda: gateway.backend.open == 0)
        assert gateway.backend.cancelled == 1


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\0" * 99])
async def test_no_handshake_no_connection(run_gateway: Any, tls: ssl.SSLContext, sent: bytes) -> None:
    """Silence, half a handshake, plain HTTP and rubbish end within the deadline; others are served meanwhile."""
    async with run_gateway(tls=tls, limits={"handshake_s": 0.5}) as gateway:
        raw = await gateway.raw()
        await raw.send(sent)
        assert (await gateway.client.get("/health")).status_code == 200
        with trio.fail_after(5):
            assert not (await raw.until(b"never")).startswith(b"HTTP")


async def test_versions_and_alpn(run_gateway: Any, tls: ssl.SSLContext) -> None:
    assert tls.minimum_version is ssl.TLSVersion.TLSv1_2
    async with run_gateway(tls=tls) as gateway:
        client = await secure_stream(gateway.port)
        assert client.selected_alpn_protocol() == "http/1.1"
        await trio.aclose_forcefully(client)


async def test_the_server_ends_with_a_stalled_client(run_gateway: Any, tls: ssl.SSLContext, until: Any) -> None:
    async with run_gateway(tls=tls) as gateway:
        gateway.backend.replay = Replay(texts=("x" * 4096,) * 20_000)
        async with gateway.client.stream(
            "POST", CHAT, json={"model": "replay-1", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        ):
            await until(lambda: gateway.backend.open == 1)
            gateway.scope.cancel()
            with trio.fail_after(4):
                await gateway.ended.wait()
    assert gateway.backend.open == 0


def test_certificate_files_that_do_not_fit_are_named(files: tuple[Path, Path], tmp_path: Path) -> None:
    listen = Address("127.0.0.1", 0)
    with pytest.raises(InvalidRequest, match="--api-key"):
        ApiOptions(listen, certificate=files[0])
    for certificate, key in ((files[1], files[1]), (tmp_path / "none", files[1])):
        with pytest.raises(InvalidRequest, match="--api-cert"):
            tls_context(ApiOptions(listen, certificate=certificate, key=key))
