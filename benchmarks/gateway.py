"""SSE tokens per second through the gateway, for one stream and for many.

The gateway runs in its own process over a backend that replays text as fast as it is taken, so the figure is the
gateway's ceiling: validation, SSE encoding, hypercorn and the loopback socket. The client is this process; it reads
bare sockets and only counts, so that it is not what is measured. One round before the measured ones is thrown away;
the figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import trio
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TOKEN_MARK = b'"delta":{"content":'
END_MARK = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Target:
    """A running gateway: where it listens and which model answers."""

    host: str
    port: int
    model: str


@dataclass(frozen=True, slots=True)
class StreamResult:
    tokens: int
    first_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report: medians over the rounds."""

    streams: int
    tokens_per_stream: int
    tokens_per_s: float
    tokens_per_s_per_stream: float
    ttft_ms: float


@contextmanager
def replay_gateway(tokens: int, token_ms: float) -> Iterator[Target]:
    """A gateway over `ReplayBackend` in a process of its own; a scripted swarm would be another such function."""
    command = [sys.executable, "-m", "benchmarks.gateway", "--serve", f"--tokens={tokens}", f"--token-ms={token_ms}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        try:
            yield Target(**json.loads(process.stdout.readline()))
        finally:
            process.terminate()


async def serve_replay(tokens: int, token_ms: float) -> None:
    """The gateway's process: prints one JSON line with its address, and serves until terminated."""
    from swarmnode.api.app import create_app
    from swarmnode.api.replay import Replay, ReplayBackend
    from swarmnode.api.server import open_api_listeners, serve_api

    backend = ReplayBackend(Replay(texts=(" token",) * tokens, token_s=token_ms / 1000))
    async with trio.open_nursery() as nursery:
        listeners = await open_api_listeners("127.0.0.1", 0)
        [(host, port)] = await nursery.start(serve_api, create_app(backend), listeners)
        print(json.dumps({"host": host, "port": port, "model": "replay-1"}), flush=True)


async def read_stream(target: Target) -> StreamResult:
    """One streamed chat over a bare socket: counts content chunks until [DONE]."""
    fields = {"model": target.model, "messages": [{"role": "user", "content": "Count."}], "stream": True}
    body = json.dumps(fields).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {target.host}\r\nContent-Length: {len(body)}\r\n\r\n"
    async with await trio.open_tcp_stream(target.host, target.port) as stream:
        start = trio.current_time()
        await stream.send_all(head.encode() + body)
        tokens, first_s, tail = 0, 0.0, b""
        while END_MARK not in tail:
            data = await stream.receive_some(1 << 16)
            if not data:
                raise RuntimeError("the stream ended without [DONE]")
            text = tail + data
            # marks that lie wholly in the tail were counted before
            tokens += text.count(TOKEN_MARK) - tail.count(TOKEN_MARK)
            tail = text[-64:]
            if tokens > 1 and not first_s:  # the role chunk is the first
                first_s = trio.current_time() - start
        return StreamResult(tokens, first_s, trio.current_time() - start)


async def run_round(target: Target, streams: int) -> tuple[float, float]:
    """Tokens/s of all streams together, and the median time to the first token in seconds."""
    results: list[StreamResult] = []

    async def one() -> None:
        results.append(await read_stream(target))

    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(streams):
            nursery.start_soon(one)
    elapsed = trio.current_time() - start
    return sum(r.tokens for r in results) / elapsed, statistics.median(r.first_s for r in results)


async def measure(target: Target, streams: int, tokens: int, rounds: int) -> Row:
    await run_round(target, streams)  # warm-up: imports, caches, the first connections
    figures = [await run_round(target, streams) for _ in range(rounds)]
    rate = statistics.median(rate for rate, _ in figures)
    first_s = statistics.median(first for _, first in figures)
    return Row(streams, tokens, round(rate, 1), round(rate / streams, 1), round(first_s * 1000, 2))


def table(rows: Sequence[Row]) -> Table:
    shown = Table(title="SSE through the gateway (replaying backend)")
    for column in ("streams", "tokens/stream", "tokens/s", "tokens/s per stream", "TTFT ms"):
        shown.add_column(column, justify="right")
    for row in rows:
        shown.add_row(
            str(row.streams),
            str(row.tokens_per_stream),
            f"{row.tokens_per_s:,.0f}",
            f"{row.tokens_per_s_per_stream:,.0f}",
            f"{row.ttft_ms:.2f}",
        )
    return shown


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--streams", default="1,32", help="comma-separated counts (default 1,32)")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens of each stream (default 2000)")
    parser.add_argument("--token-ms", type=float, default=0.0, help="pause before each token (default 0: flat out)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    if options.serve:
        trio.run(serve_replay, options.tokens, options.token_ms)
        return
    counts = [int(part) for part in options.streams.split(",")]
    with replay_gateway(options.tokens, options.token_ms) as target:
        rows = [trio.run(measure, target, count, options.tokens, options.rounds) for count in counts]
    Console(stderr=options.json).print(table(rows))
    if options.json:
        report = {"backend": "replay", "token_ms": options.token_ms, "rounds": options.rounds}
        print(json.dumps({**report, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
