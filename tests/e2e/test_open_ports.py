"""A port scan of `swarmnode up`: every socket it listens on, and what each says to whoever has no credentials."""

from __future__ import annotations

import os
import re
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

import h2.config
import h2.connection
import h2.events
import httpx
import pytest
from local_swarms import Swarm, descendants

from swarmnode.cli.local_swarm import LocalSwarm
from swarmnode.wire.address import API_LISTEN, SWARM_LISTEN
from swarmnode.wire.link import CHANNEL_KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.e2e
ANSWER_S = 8.0
"""Longer than the deadlines of a handshake and of HELLO (5 s each): silence to the end counts as no answer."""
LISTEN_STATE = "0A"
ALERT = 0x15
OPEN_PATHS = {"/health"}
PATHS = (
    "/",
    "/v1/models",
    "/api/v1/models",
    "/api/v1/nodes",
    "/api/v1/api-tokens",
    "/openapi.json",
    "/metrics",
    "/docs",
)
REQUEST = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
SHOUTS = {
    "HTTP/1.1": REQUEST,
    "HTTP/2 with prior knowledge": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
    "upgrade to HTTP/2": REQUEST.replace(b"\r\n\r\n", b"\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\n"),
    "garbage": bytes(range(1, 255)) * 4,
    "zeros": bytes(2000),
    "SSH": b"SSH-2.0-scan\r\n",
}

Socket = tuple[str, int]


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory, models_root: Path) -> Iterator[Swarm]:
    """As `up` starts them but for the port numbers; a model is loaded, so that workers and lanes are there, too."""
    local = LocalSwarm(tmp_path_factory.mktemp("ports"), models_root, {"SWARM_REQUIRE_API_TOKEN": "1"})
    with local:
        local.start_coordinator()
        local.start_peers("attic", "den")
        admin = local.client()
        admin.post("/api/v1/models/scripted/load", {"wait": True})
        admin.close()
        swarm = Swarm(local)
        yield swarm
        swarm.close()


def listening(pid: int) -> set[Socket]:
    """What a process and its children listen on, by the inodes of their descriptors."""
    inodes = set()
    for process in (pid, *descendants(pid)):
        for link in Path(f"/proc/{process}/fd").iterdir():
            try:
                found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
            except OSError:
                continue  # closed meanwhile
            inodes |= {found[1]} if found else set()
    found_sockets = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN_STATE and fields[9] in inodes:
                host, port = fields[1].split(":")
                found_sockets.add((_host(host), int(port, 16)))
    return found_sockets


def _host(text: str) -> str:
    """/proc writes addresses as words of the machine's byte order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words))


def bound(text: str) -> Socket:
    host, port = text.removeprefix("http://").rsplit(":", 1)
    return host, int(port)


def swarm_ports(swarm: Swarm) -> dict[str, Socket]:
    nodes = {"coordinator": swarm.local.coordinator, **swarm.local.peers}
    return {name: bound(str(node.seen[_ready(node)]["swarm"])) for name, node in nodes.items() if node is not None}


def _ready(node: Any) -> int:
    return next(index for index, event in enumerate(node.seen) if event["event"] == "ready")


def test_nothing_listens_but_what_was_asked_for(swarm: Swarm) -> None:
    """On loopback unless somebody says otherwise: other machines find no port at all."""
    ports = swarm_ports(swarm)
    assert swarm.local.coordinator is not None
    assert listening(swarm.local.coordinator.process.pid) == {ports["coordinator"], bound(swarm.local.api)}
    for name, node in swarm.local.peers.items():
        assert listening(node.process.pid) == {ports[name]}
        assert descendants(node.process.pid), "the stage's worker was looked at, too"
    assert {host for host, _ in ports.values()} == {"127.0.0.1"}
    assert bound(API_LISTEN)[0] == bound(SWARM_LISTEN)[0] == "127.0.0.1"
    assert udp_sockets(swarm.local.coordinator.process.pid) == 0


def udp_sockets(pid: int) -> int:
    links = (os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink())
    inodes = {found[1] for link in links if (found := re.fullmatch(r"socket:\[(\d+)\]", link))}
    lines = Path(f"/proc/{pid}/net/udp").read_text().splitlines()[1:]
    return sum(line.split()[9] in inodes for line in lines)


def answer(where: Socket, data: bytes) -> bytes:
    """All that comes back, until the other side hangs up or says nothing for ANSWER_S."""
    got = b""
    with socket.create_connection(where, timeout=ANSWER_S) as stream:
        try:
            stream.sendall(data)
            while more := stream.recv(4096):
                got += more
        except OSError:
            pass
    return got


@pytest.mark.parametrize("data", SHOUTS.values(), ids=SHOUTS)
@pytest.mark.parametrize("node", ["coordinator", "attic"])
def test_a_swarm_port_says_nothing_but_a_tls_alert(swarm: Swarm, node: str, data: bytes) -> None:
    got = answer(swarm_ports(swarm)[node], data)
    assert got == b"" or (got[0] == ALERT and len(got) < 20)


@pytest.mark.parametrize("data", [SHOUTS["garbage"], SHOUTS["zeros"], SHOUTS["SSH"]])
def test_the_api_port_answers_garbage_with_400(swarm: Swarm, data: bytes) -> None:
    got = answer(bound(swarm.local.api), data)
    assert re.match(rb"HTTP/1.1 400 |$", got)
    assert b"swarmnode" not in got.lower(), "no banner"


def test_the_api_port_speaks_no_http_2_and_no_tls(swarm: Swarm) -> None:
    where = bound(swarm.local.api)
    assert answer(where, SHOUTS["HTTP/2 with prior knowledge"]).startswith(b"HTTP/1.1 505 ")
    upgraded = SHOUTS["upgrade to HTTP/2"].replace(b"Connection: Upgrade", b"Connection: Upgrade, close")
    assert answer(where, upgraded).startswith(b"HTTP/1.1 401 ")
    with socket.create_connection(where, timeout=ANSWER_S) as raw, pytest.raises(OSError):
        anybody().wrap_socket(raw)


def test_the_api_port_answers_the_fixed_list_only(swarm: Swarm) -> None:
    with httpx.Client(base_url=swarm.local.api, timeout=ANSWER_S, trust_env=False) as client:
        for path in (*PATHS, *OPEN_PATHS):
            assert client.options(path).status_code == 204
            assert client.options(path).content == b""
            for method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
                reply = client.request(method, path)
                if path in OPEN_PATHS and method == "GET":
                    assert (reply.status_code, reply.json()) == (200, {"status": "ok"})
                else:
                    assert reply.status_code in (401, 404, 405), (method, path)
                    assert set(reply.json()) == {"error"}
                assert "server" not in reply.headers


def anybody() -> ssl.SSLContext:
    """A client without a certificate that takes any."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["swarmnode/1"])
    return context


def test_a_peers_swarm_port_hangs_up_on_whoever_has_no_certificate(swarm: Swarm) -> None:
    """With TLS 1.3 the client's own handshake succeeds; the first thing it reads is the refusal."""
    with (
        socket.create_connection(swarm_ports(swarm)["attic"], timeout=ANSWER_S) as raw,
        anybody().wrap_socket(raw) as stream,
        pytest.raises(ssl.SSLError, match="certificate required"),
    ):
        stream.recv(1)


@pytest.mark.parametrize("path", [*(f"/channel/{kind}" for kind in CHANNEL_KINDS), "/v1/models", "/health", "/"])
def test_the_coordinators_swarm_port_offers_strangers_the_join_channel_only(swarm: Swarm, path: str) -> None:
    assert requested(swarm_ports(swarm)["coordinator"], path) in ("403", "404")


def test_the_join_channel_waits_for_hello_and_tells_nothing(swarm: Swarm) -> None:
    assert requested(swarm_ports(swarm)["coordinator"], "/channel/join") == "200"


def requested(where: Socket, path: str) -> str:
    """The status of one request over HTTP/2 in TLS, without a certificate; no data may come with it."""
    with socket.create_connection(where, timeout=ANSWER_S) as raw, anybody().wrap_socket(raw) as stream:
        client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        client.initiate_connection()
        pseudo = [(":method", "POST"), (":scheme", "https"), (":authority", "x"), (":path", path)]
        client.send_headers(1, pseudo)
        stream.sendall(client.data_to_send())
        while data := stream.recv(65_536):
            for event in client.receive_data(data):
                assert not isinstance(event, h2.events.DataReceived)
                if isinstance(event, h2.events.ResponseReceived):
                    return str(dict(event.headers)[":status"])
    return "nothing"


OPEN_MODE = {
    ("GET", "/"),
    ("GET", "/health"),
    ("GET", "/openapi.json"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/x"),
    ("GET", "/api/v1/models"),
    ("GET", "/api/v1/nodes"),
    ("GET", "/api/v1/models/x/status"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/api/v1/models/x/load"),
    ("POST", "/api/v1/models/x/unload"),
}
"""The documented exception: on loopback, as long as there are no tokens, lists, chats, loads and unloads."""
NEVER_OPEN = {
    ("GET", "/api/v1/api-tokens"),
    ("POST", "/api/v1/api-tokens"),
    ("DELETE", "/api/v1/api-tokens/x"),
    ("GET", "/api/v1/join-tokens"),
    ("POST", "/api/v1/join-tokens"),
    ("DELETE", "/api/v1/join-tokens/x"),
    ("DELETE", "/api/v1/nodes/x"),
}


def test_a_default_coordinator_answers_on_loopback_what_open_mode_means_and_no_more(tmp_path: Path) -> None:
    """As `up` starts it when nobody asked for tokens."""
    with LocalSwarm(tmp_path, tmp_path / "models") as local:
        local.start_coordinator()
        assert local.coordinator is not None
        assert {host for host, _ in listening(local.coordinator.process.pid)} == {"127.0.0.1"}
        with httpx.Client(base_url=local.api, timeout=ANSWER_S, trust_env=False) as client:
            answered = {
                (method, path)
                for method, path in OPEN_MODE | NEVER_OPEN
                if client.request(method, path, **({"json": {}} if method == "POST" else {})).status_code != 401
            }
            assert answered == OPEN_MODE
            for headers in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
                assert client.get("/v1/models", headers=headers).status_code == 403
