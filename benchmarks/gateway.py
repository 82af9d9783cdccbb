"""SSE tokens per second through the gateway, for one stream and for many.

Over two backends. `scripted`: a coordinator and two peers as processes, whose stages replay tokens without computing
(`ScriptedEngine`), so the figure is what everything but the compute allows. `replay`: the gateway alone, in one
process, over a backend that replays text as fast as it is taken: validation, SSE encoding, hypercorn and the loopback
socket. The client is this process; it reads bare sockets and only counts, so that it is not what is measured. One
round before the measured ones is thrown away; the figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import trio
from rich.table import Table

from swarmnode.cli.output import console

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

CONTENT_MARK = b'"delta":{"content":'
END_MARK = b"data: [DONE]\n\n"
COMPLETION_TOKENS = re.compile(rb'"completion_tokens":(\d+)')
CHAT_TOKENS = 256
"""Room for the prompt beside the reply."""
TAIL_BYTES = 1024
"""Holds the usage chunk and the end mark."""


@dataclass(frozen=True, slots=True)
class Target:
    """A running gateway: what is behind it, where it listens and which model answers."""

    backend: str
    host: str
    port: int
    model: str


@dataclass(frozen=True, slots=True)
class StreamResult:
    tokens: int
    chunks: int
    first_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report: medians over the rounds."""

    backend: str
    streams: int
    tokens_per_stream: int
    chunks_per_stream: float
    tokens_per_s: float
    tokens_per_s_per_stream: float
    ttft_ms: float


@contextmanager
def replay_gateway(tokens: int, token_ms: float) -> Iterator[Target]:
    """A gateway over `ReplayBackend` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gateway", "--serve", f"--tokens={tokens}", f"--token-ms={token_ms}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        try:
            yield Target(**json.loads(process.stdout.readline()))
        finally:
            process.terminate()


@contextmanager
def scripted_gateway(tokens: int, token_ms: float, streams: int) -> Iterator[Target]:
    """A coordinator and two peers as processes, a scripted model over both, room for all `streams` at once."""
    from swarmnode.cli.client import ApiClient
    from swarmnode.cli.local_swarm import LocalSwarm
    from swarmnode.compute.scripted_servable import write_scripted_servable

    environment = {"OMP_NUM_THREADS": "1", "SWARM_SERVE_IN_FLIGHT": str(streams)}
    script = {"default": [ord("x")], "then": "repeat", "decode_ms": token_ms}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "models"
        write_scripted_servable(root, "scripted", script, stages=2, context_tokens=tokens + CHAT_TOKENS)
        with LocalSwarm(Path(folder), root, environment) as swarm:
            swarm.start_coordinator()
            swarm.start_peers("pc-0", "pc-1")
            with closing(ApiClient(swarm.api)) as client:
                client.post("/api/v1/models/scripted/load", {"wait": True})
            address = urlsplit(swarm.api)
            assert address.hostname is not None
            assert address.port is not None
            yield Target("scripted", address.hostname, address.port, "scripted")


async def serve_replay(tokens: int, token_ms: float) -> None:
    """The gateway's process: prints one JSON line with its address, and serves until terminated."""
    from swarmnode.api.app import create_app
    from swarmnode.api.replay import Replay, ReplayBackend
    from swarmnode.api.server import open_api_listeners, serve_api

    backend = ReplayBackend(Replay(texts=(" token",) * tokens, token_s=token_ms / 1000))
    async with trio.open_nursery() as nursery:
        listeners = await open_api_listeners("127.0.0.1", 0)
        [(host, port)] = await nursery.start(serve_api, create_app(backend), listeners)
        print(json.dumps({"backend": "replay", "host": host, "port": port, "model": "replay-1"}), flush=True)


async def read_stream(target: Target, tokens: int) -> StreamResult:
    """One streamed chat over a bare socket, read to its [DONE]; the tokens are those of its usage chunk."""
    fields = {"model": target.model, "messages": [{"role": "user", "content": "Count."}], "max_tokens": tokens}
    body = json.dumps({**fields, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {target.host}\r\nContent-Length: {len(body)}\r\n\r\n"
    async with await trio.open_tcp_stream(target.host, target.port) as stream:
        start = trio.current_time()
        await stream.send_all(head.encode() + body)
        chunks, first_s, tail = 0, 0.0, b""
        while END_MARK not in tail:
            data = await stream.receive_some(1 << 16)
            if not data:
                raise RuntimeError(f"the stream ended without [DONE]: {tail[-300:]!r}")
            text = tail + data
            chunks += text.count(CONTENT_MARK) - tail.count(CONTENT_MARK)  # the tail's own were counted before
            tail = text[-TAIL_BYTES:]
            if chunks and not first_s:
                first_s = trio.current_time() - start
        usage = COMPLETION_TOKENS.search(tail)
        assert usage is not None
        return StreamResult(int(usage[1]), chunks, first_s, trio.current_time() - start)


async def run_round(target: Target, streams: int, tokens: int) -> tuple[float, float, float]:
    """Tokens/s of all streams together, median time to the first token in seconds, mean chunks of a stream."""
    results: list[StreamResult] = []

    async def one() -> None:
        results.append(await read_stream(target, tokens))

    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(streams):
            nursery.start_soon(one)
    elapsed = trio.current_time() - start
    rate = sum(result.tokens for result in results) / elapsed
    first_s = statistics.median(result.first_s for result in results)
    return rate, first_s, statistics.fmean(result.chunks for result in results)


async def measure(target: Target, streams: int, tokens: int, rounds: int) -> Row:
    await run_round(target, streams, tokens)  # warm-up: imports, caches, the first connections
    figures = [await run_round(target, streams, tokens) for _ in range(rounds)]
    rate, first_s, chunks = (statistics.median(column) for column in zip(*figures, strict=True))
    per_stream = round(rate / streams, 1)
    return Row(target.backend, streams, tokens, round(chunks, 1), round(rate, 1), per_stream, round(first_s * 1e3, 2))


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="SSE through the gateway")
    for column in ("backend", "streams", "tokens", "chunks", "tokens/s", "per stream", "TTFT ms"):
        shown.add_column(column, justify="right")
    for row in rows:
        shown.add_row(
            row.backend,
            str(row.streams),
            str(row.tokens_per_stream),
            f"{row.chunks_per_stream:.0f}",
            f"{row.tokens_per_s:,.0f}",
            f"{row.tokens_per_s_per_stream:,.0f}",
            f"{row.ttft_ms:.2f}",
        )
    return shown


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--streams", default="1,32", help="comma-separated counts (default 1,32)")
    parser.add_argument("--backend", choices=["scripted", "replay", "both"], default="both")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of each stream (default 1000)")
    parser.add_argument("--token-ms", type=float, default=0.0, help="pause before each token (default 0: flat out)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _gateways(options: argparse.Namespace, streams: int) -> Iterator[AbstractContextManager[Target]]:
    if options.backend != "replay":
        yield scripted_gateway(options.tokens, options.token_ms, streams)
    if options.backend != "scripted":
        yield replay_gateway(options.tokens, options.token_ms)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    if options.serve:
        trio.run(serve_replay, options.tokens, options.token_ms)
        return
    counts = [int(part) for part in options.streams.split(",")]
    rows: list[Row] = []
    for gateway in _gateways(options, max(counts)):
        with gateway as target:
            rows += [trio.run(measure, target, count, options.tokens, options.rounds) for count in counts]
    console(stderr=options.json).print(table(rows))
    if options.json:
        report = {"token_ms": options.token_ms, "rounds": options.rounds}
        print(json.dumps({**report, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
