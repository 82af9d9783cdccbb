"""What a ring's links cost by route and distance: direct, through the relay, and in requests to the API port.

`python -m benchmarks.links --json`. Two stages of the demo model in real processes; every way between two machines goes
through a proxy that delays each direction by half the round trip. A token crosses two links one way. A direct link is
one leg, a relayed or polled one two legs (to the coordinator, and on from it), so the road is

    direct: one round trip a token       relayed, polled: two

    overhead = inter-token latency at the client − Σ stage compute − road

Per route and distance: the same chat (inter-token latency, TTFT), the same long prompt (TTFT), and the coordinator's
CPU time per token of the chat, of which a direct ring's row shows how much is the gateway's. Then what one core relays.
With `--vs-llama-cpp`, the same chat and prompt on two nodes of llama.cpp's RPC behind the same proxy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.llama_yardstick import add_option, measure_rpc, require_llama, rows_table
from benchmarks.relay_rate import cpu_s, measure_relay, sentence
from benchmarks.ring_latency import PROMPT, Proxy
from swarmnode.catalog.source_wheel import DEMO_SOURCE, unpack_demo_gguf
from swarmnode.cli.chat_stream import ChatResult, run_chat
from swarmnode.cli.client import ApiClient
from swarmnode.cli.demo import demo_model
from swarmnode.cli.local_swarm import LocalSwarm
from swarmnode.cli.output import console
from swarmnode.config import read_settings
from swarmnode.wire.routes import DIRECT, POLLED, RELAYED, ROUTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.llama_yardstick import LlamaRow

NOWHERE = "127.0.0.1:9"
"""What a peer advertises that nobody can dial."""
LEGS = {DIRECT: 1, RELAYED: 2, POLLED: 2}
AIM_MS: Mapping[str, float | None] = {DIRECT: None, RELAYED: 3.0, POLLED: 10.0}
"""Of a token's overhead over its compute and its legs' round trips."""
WORD = " lighthouse"
"""One token of the demo model."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What every row measures alike."""

    replies: int
    tokens: int
    prompt_words: int
    dtype: str
    threads: int


@dataclass(frozen=True, slots=True)
class Row:
    """Medians, in milliseconds; `route` is what the ring said it took, `link_rtt_ms` what its own links measured."""

    route: str
    asked_rtt_ms: float
    rtt_ms: float
    itl_ms: float
    compute_ms: float
    road_ms: float
    overhead_ms: float
    ttft_ms: float
    prompt_tokens: int
    prompt_ttft_ms: float
    coordinator_cpu_ms_per_token: float
    link_rtt_ms: float | None


class Swarm:
    """Coordinator and two peers, of which each reaches the others by one route only, over proxies of one delay."""

    def __init__(self, stack: ExitStack, route: str, rtt_ms: float, asked: Asked) -> None:
        self._proxies: list[Proxy] = []
        self._delay_ms = rtt_ms / 2
        self._stack = stack
        root = read_settings().models_root
        self.model = demo_model(root, quiet=True)
        environment = {"SWARM_LINK_ROUTES": "relayed,polled"} if route == POLLED else {}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.local = stack.enter_context(LocalSwarm(folder, root, environment))
        self._start_coordinator(route)
        for name in ("one", "two"):
            self.local.start_peers(name, threads=asked.threads, extra=self._peer_arguments(route))
        self.client = stack.enter_context(closing(ApiClient(self.local.api, data_dir=folder / "coordinator")))
        load = {"peers": ["one", "two"], "dtype": asked.dtype, "wait": True}
        self.client.post(f"/api/v1/models/{self.model}/load", load)

    @property
    def rtt_ms(self) -> float:
        return statistics.mean(proxy.rtt_ms for proxy in self._proxies)

    def coordinator_cpu_s(self) -> float:
        assert self.local.coordinator is not None
        return cpu_s(self.local.coordinator.process.pid)

    def link_rtt_ms(self) -> float | None:
        """The mean of what its lanes measured."""
        stages = self.client.get(f"/api/v1/models/{self.model}/status")["stages"]
        trips = [link["round_trip_ms"] for stage in stages for link in stage["links"] if link["round_trip_ms"]]
        return round(statistics.mean(trips), 2) if trips else None

    def ask(self, prompt: str, tokens: int) -> ChatResult:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}], "temperature": 0}
        return run_chat(self.client, {"model": self.model, **body, "max_tokens": tokens}, lambda _: None)

    def _proxy(self) -> Proxy:
        self._proxies.append(self._stack.enter_context(closing(Proxy(self._delay_ms))))
        return self._proxies[-1]

    def _start_coordinator(self, route: str) -> None:
        """The client's own calls go straight to the API port."""
        if route == RELAYED:
            proxy = self._proxy()
            extra = ("--advertise", proxy.address)
            self.local.start_coordinator(swarm_listen=proxy.target, extra=extra)
        elif route == POLLED:
            proxy = self._proxy()
            extra = ("--advertise-api", f"http://{proxy.address}")
            self.local.start_coordinator(api_listen=proxy.target, extra=extra)
        else:
            self.local.start_coordinator()

    def _peer_arguments(self, route: str) -> tuple[str, ...]:
        if route != DIRECT:
            return ("--advertise", NOWHERE)
        proxy = self._proxy()
        return ("--swarm-listen", proxy.target, "--advertise", proxy.address)


def measure(route: str, rtt_ms: float, asked: Asked) -> Row:
    """Start a swarm, ask, and take it down."""
    with ExitStack() as stack:
        swarm = Swarm(stack, route, rtt_ms, asked)
        swarm.ask(PROMPT, asked.tokens)
        before_s = swarm.coordinator_cpu_s()
        replies = [swarm.ask(PROMPT, asked.tokens) for _ in range(asked.replies)]
        used_s = swarm.coordinator_cpu_s() - before_s
        # another beginning each time, so that nothing is continued from a conversation in memory
        long = [swarm.ask(f"{n}:{WORD * asked.prompt_words}", 1) for n in range(asked.replies)]
        return _row(swarm, route, rtt_ms, replies, long, used_s)


def _row(
    swarm: Swarm, route: str, asked_ms: float, replies: Sequence[ChatResult], long: Sequence[ChatResult], used_s: float
) -> Row:
    taken = {str(reply.timing["route"]) for reply in replies}
    if taken != {route}:
        raise SystemExit(f"the ring took {', '.join(sorted(taken))}, not {route}")
    road_ms = LEGS[route] * swarm.rtt_ms
    itl = [1e3 / reply.tokens_per_s for reply in replies]
    compute = [reply.timing["stage0_ms"] + reply.timing["stage1_ms"] for reply in replies]
    over = [a - b - road_ms for a, b in zip(itl, compute, strict=True)]
    return Row(
        route=route,
        asked_rtt_ms=asked_ms,
        rtt_ms=round(swarm.rtt_ms, 2),
        itl_ms=round(statistics.median(itl), 2),
        compute_ms=round(statistics.median(compute), 2),
        road_ms=round(road_ms, 2),
        overhead_ms=round(statistics.median(over), 2),
        ttft_ms=round(statistics.median(reply.ttft_s for reply in replies) * 1e3, 1),
        prompt_tokens=min(reply.prompt_tokens for reply in long),
        prompt_ttft_ms=round(statistics.median(reply.ttft_s for reply in long) * 1e3, 1),
        coordinator_cpu_ms_per_token=round(used_s * 1e3 / sum(reply.completion_tokens for reply in replies), 3),
        link_rtt_ms=swarm.link_rtt_ms(),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What a ring's links cost by route and distance.")
    parser.add_argument("--routes", nargs="+", choices=ROUTES, default=list(ROUTES))
    parser.add_argument("--rtts-ms", nargs="+", type=float, default=[0.0, 20.0, 60.0], help="round trips of each leg")
    parser.add_argument("--replies", type=int, default=3, help="measured replies a row, after one for warm-up")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each reply")
    parser.add_argument("--prompt-words", type=int, default=1460, help="of the long prompt; the template adds some")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="per stage")
    parser.add_argument("--frames", type=int, default=5000, help="through the relay, to see what one core carries")
    add_option(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    chosen = parser.parse_args(arguments)
    if chosen.vs_llama_cpp:
        require_llama(chosen.vs_llama_cpp)
    asked = Asked(chosen.replies, chosen.tokens, chosen.prompt_words, chosen.dtype, chosen.threads)
    rows = [measure(route, rtt_ms, asked) for route in chosen.routes for rtt_ms in chosen.rtts_ms]
    _show(rows)
    rates = [measure_relay(chosen.frames, 16 << 10, together=together) for together in (True, False)]
    for rate in rates:
        print(sentence(rate))
    llama = measure_llama(chosen.vs_llama_cpp, chosen.rtts_ms, asked) if chosen.vs_llama_cpp else []
    if chosen.json:
        parts = {"rows": rows, "relay": rates, "llama_cpp": llama}
        found = {name: [asdict(one) for one in part] for name, part in parts.items()}
        print(json.dumps({"benchmark": "links", **asdict(asked), **found}))


def measure_llama(python: str, rtts_ms: Sequence[float], asked: Asked) -> list[LlamaRow]:
    with tempfile.TemporaryDirectory() as folder:
        gguf = unpack_demo_gguf(DEMO_SOURCE, Path(folder), lambda _: None)
        prompts = (PROMPT, WORD * asked.prompt_words)
        rows = [measure_rpc(python, gguf, rtt, asked.threads, prompts, asked.replies, asked.tokens) for rtt in rtts_ms]
    console().print(rows_table(rows))
    return rows


def _show(rows: Sequence[Row]) -> None:
    table = Table(title="Links by route and distance: medians in ms (CPU: the coordinator's, a token)")
    shown = ("rtt", "itl", "compute", "road", "ttft", "prompt_ttft", "overhead")
    for name in ("route", "RTT", "ITL", "compute", "road", "TTFT", "prompt", "over", "aim", "CPU"):
        table.add_column(name, justify="left" if name == "route" else "right")
    for row in rows:
        values, aim = asdict(row), AIM_MS[row.route]
        figures = [f"{values[f'{name}_ms']:.1f}" for name in shown]
        cpu = f"{row.coordinator_cpu_ms_per_token:.2f}"
        table.add_row(row.route, *figures, "-" if aim is None else f"≤ {aim:g}", cpu)
    console().print(table)


if __name__ == "__main__":
    main()
