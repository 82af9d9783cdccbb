"""What a ring adds to a token beyond compute and the road: the demo model, links through a delaying proxy.

`python -m benchmarks.ring_latency --stages 2 --rtt-ms 20 --json`. Real processes; every lane between stages goes
through a proxy that delays each direction by half the round trip. A token of a ring of N stages crosses N links one
way, so its road is N / 2 round trips: one for two stages, because the last stage answers stage 0 directly.

    overhead = inter-token latency at the client − Σ stage compute − N / 2 × measured round trip

Per reply the latency is the time between its first and last token over the tokens between, and compute is the mean of
`swarm.timing`; the figures are medians over the replies, after one that is thrown away.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from swarmnode.cli.chat_stream import ChatResult, run_chat
from swarmnode.cli.client import ApiClient
from swarmnode.cli.demo import demo_model
from swarmnode.cli.local_swarm import LocalSwarm
from swarmnode.cli.output import console
from swarmnode.config import read_settings

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPT = "Write a short story about a lighthouse keeper and a storm."


@dataclass(frozen=True, slots=True)
class Report:
    """Milliseconds; `road_ms` is the links' share by measurement, `overhead_ms` what is left."""

    stages: int
    asked_rtt_ms: float
    rtt_ms: float
    itl_ms: float
    compute_ms: float
    road_ms: float
    overhead_ms: float
    queue_ms: float
    ttft_ms: float
    replies: int
    tokens_per_reply: int
    threads_per_stage: int
    dtype: str


class Proxy:
    """A `benchmarks.proxy` process in front of one peer's swarm port."""

    def __init__(self, delay_ms: float) -> None:
        self.target = f"127.0.0.1:{_free_port()}"
        command = [sys.executable, "-m", "benchmarks.proxy", self.target, "--delay-ms", str(delay_ms)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        about = json.loads(self._process.stdout.readline())
        self.address: str = about["address"]
        self.rtt_ms: float = about["measured_rtt_ms"]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def measure(stages: int, rtt_ms: float, replies: int, tokens: int, dtype: str, threads: int) -> Report:
    """Start the swarm, ask, and take it down."""
    root = read_settings().models_root
    model = demo_model(root, quiet=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        proxies = [stack.enter_context(closing(Proxy(rtt_ms / 2))) for _ in range(stages)]
        swarm = stack.enter_context(LocalSwarm(folder, root))
        swarm.start_coordinator()
        names = [f"peer-{index}" for index in range(stages)]
        for name, proxy in zip(names, proxies, strict=True):
            extra = ("--swarm-listen", proxy.target, "--advertise", proxy.address)
            swarm.start_peers(name, threads=threads, extra=extra)
        client = stack.enter_context(closing(ApiClient(swarm.api)))
        client.post(f"/api/v1/models/{model}/load", {"peers": names, "dtype": dtype, "wait": True})
        results = [_ask(client, model, tokens) for _ in range(replies + 1)][1:]
    return _report(results, [proxy.rtt_ms for proxy in proxies], stages, rtt_ms, dtype, threads)


def _ask(client: ApiClient, model: str, tokens: int) -> ChatResult:
    body = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": tokens}
    return run_chat(client, body, lambda _: None)


def _report(
    results: Sequence[ChatResult], rtts_ms: Sequence[float], stages: int, asked_ms: float, dtype: str, threads: int
) -> Report:
    measured_ms = statistics.mean(rtts_ms)
    road_ms = measured_ms * stages / 2 if stages > 1 else 0.0
    itl = [1e3 / result.tokens_per_s for result in results]
    compute = [sum(result.timing[f"stage{i}_ms"] for i in range(stages)) for result in results]
    over = [a - b - road_ms for a, b in zip(itl, compute, strict=True)]
    return Report(
        stages=stages,
        asked_rtt_ms=asked_ms,
        rtt_ms=round(measured_ms, 3),
        itl_ms=round(statistics.median(itl), 3),
        compute_ms=round(statistics.median(compute), 3),
        road_ms=round(road_ms, 3),
        overhead_ms=round(statistics.median(over), 3),
        queue_ms=round(statistics.median(result.timing["queue_ms"] for result in results), 3),
        ttft_ms=round(statistics.median(result.ttft_s for result in results) * 1e3, 1),
        replies=len(results),
        tokens_per_reply=min(result.completion_tokens for result in results),
        threads_per_stage=threads,
        dtype=dtype,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Latency a ring adds to a token, at a given round trip time.")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--rtt-ms", type=float, default=0.0, help="round trip between neighbours (half each way)")
    parser.add_argument("--replies", type=int, default=5, help="measured replies, after one for warm-up")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each reply")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="per stage")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    chosen = parser.parse_args(arguments)
    report = measure(chosen.stages, chosen.rtt_ms, chosen.replies, chosen.tokens, chosen.dtype, chosen.threads)
    _show(report)
    if chosen.json:
        print(json.dumps(asdict(report)))


def _show(report: Report) -> None:
    table = Table(title=f"{report.stages} stages, {report.replies} replies of {report.tokens_per_reply} tokens")
    for name in ("rtt", "itl", "compute", "road", "overhead", "queue", "ttft"):
        table.add_column(f"{name} ms", justify="right")
    values = asdict(report)
    shown = ("rtt_ms", "itl_ms", "compute_ms", "road_ms", "overhead_ms", "queue_ms", "ttft_ms")
    table.add_row(*(f"{values[name]:.2f}" for name in shown))
    console().print(table)


if __name__ == "__main__":
    main()
