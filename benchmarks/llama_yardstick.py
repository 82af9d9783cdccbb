"""llama.cpp as a yardstick: the demo model's own GGUF file in llama-cpp-python, on two nodes over its RPC.

`--vs-llama-cpp [PYTHON]` of `benchmarks.links`, and in one process of `benchmarks.decode`; PYTHON is an interpreter
that has the package. Its RPC goes from node to node through the client, so two nodes cost one round trip a token.
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.llama_part import MODEL, SERVE
from benchmarks.ring_latency import Proxy
from swarmnode.wire.address import parse_address

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence
    from pathlib import Path

UP_S = 10.0
PROBE = "import llama_cpp, sys; sys.exit(0 if llama_cpp.llama_supports_rpc() else 3)"
BUILD = (
    'CMAKE_ARGS="-DGGML_NATIVE=off -DGGML_AVX2=on -DGGML_FMA=on -DGGML_F16C=on -DGGML_BMI2=on -DGGML_RPC=on" '
    "pip install --no-cache-dir llama-cpp-python"
)
"""Without GGML_NATIVE, which has crashed; add what else the CPU has."""


@dataclass(frozen=True, slots=True)
class LlamaRow:
    """Two nodes, half the layers on the second. Medians, in milliseconds; `direct_ms` is a token without the proxy,
    `overhead_ms` what one round trip does not explain of the rest."""

    asked_rtt_ms: float
    rtt_ms: float
    itl_ms: float
    direct_ms: float
    overhead_ms: float
    ttft_ms: float
    prompt_tokens: int
    prompt_ttft_ms: float


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--vs-llama-cpp",
        nargs="?",
        const=sys.executable,
        metavar="PYTHON",
        help="compare with llama.cpp, in an interpreter that has llama-cpp-python built with RPC; default: this one",
    )


def require_llama(python: str) -> None:
    """Raises SystemExit that says what to install where `python` has no llama-cpp-python with RPC."""
    try:
        probe = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, check=False)
    except OSError as error:
        raise SystemExit(f"--vs-llama-cpp: {python} cannot be run ({error})") from None
    if probe.returncode == 0:
        return
    lacks = "is built without RPC" if probe.returncode == 3 else "cannot be imported"
    raise SystemExit(f"--vs-llama-cpp: llama-cpp-python {lacks} in {python}; in an environment of its own: {BUILD}")


class LlamaModel:
    """A child process with the model; see `benchmarks.llama_part`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.layers: int = self._answer()["layers"]

    def read(self, text: str) -> tuple[int, float]:
        """Start anew; the prompt's tokens, and seconds until the first one of the reply."""
        answer = self._ask({"read": text})
        return answer["prompt_tokens"], answer["seconds"]

    def go_on(self, count: int) -> list[float]:
        """Seconds of each of the next tokens."""
        seconds: list[float] = self._ask({"go_on": count})["seconds"]
        return seconds

    def _ask(self, what: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps(what), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("llama.cpp's process has ended; what it said is above")
        answer: dict[str, Any] = json.loads(line)
        return answer


def measure_rpc(
    python: str, gguf: Path, rtt_ms: float, threads: int, asked: tuple[str, str], replies: int, tokens: int
) -> LlamaRow:
    """`asked`: a short prompt for replies of so many tokens, and a long one for its first token alone."""
    with ExitStack() as stack:
        proxy = stack.enter_context(closing(Proxy(rtt_ms / 2)))
        stack.enter_context(_part(python, SERVE, proxy.target, "--threads", str(threads)))
        _wait_for(proxy.target)
        with _split(python, gguf, threads, proxy.target) as direct:
            direct_ms, _ = _chat(direct, asked[0], replies, tokens)
        model = stack.enter_context(_split(python, gguf, threads, proxy.address))
        itl_ms, ttft_ms = _chat(model, asked[0], replies, tokens)
        if itl_ms < proxy.rtt_ms:
            raise SystemExit(f"a token took {itl_ms:.1f} ms, less than the round trip: nothing went to the RPC server")
        long = [model.read(f"{n}:{asked[1]}") for n in range(replies)]
    return LlamaRow(
        asked_rtt_ms=rtt_ms,
        rtt_ms=round(proxy.rtt_ms, 2),
        itl_ms=round(itl_ms, 2),
        direct_ms=round(direct_ms, 2),
        overhead_ms=round(itl_ms - direct_ms - proxy.rtt_ms, 2),
        ttft_ms=round(ttft_ms, 1),
        prompt_tokens=min(count for count, _ in long),
        prompt_ttft_ms=round(statistics.median(seconds for _, seconds in long) * 1e3, 1),
    )


@contextmanager
def whole_model(python: str, gguf: Path, threads: int) -> Iterator[LlamaModel]:
    """All layers in one process."""
    with _part(python, MODEL, str(gguf), "--threads", str(threads)) as process:
        yield LlamaModel(process)


@contextmanager
def _split(python: str, gguf: Path, threads: int, server: str) -> Iterator[LlamaModel]:
    """The last half of the layers on the server, the head among them."""
    with whole_model(python, gguf, threads) as model:
        remote = model.layers // 2
    at = ("--threads", str(threads), "--server", server, "--remote-layers", str(remote))
    with _part(python, MODEL, str(gguf), *at) as process:
        yield LlamaModel(process)


@contextmanager
def _part(python: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [python, "-m", "benchmarks.llama_part", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _chat(model: LlamaModel, prompt: str, replies: int, tokens: int) -> tuple[float, float]:
    """Medians in milliseconds: between tokens, and until the first; one more reply goes before, for warm-up."""
    between, first = [], []
    for number in range(replies + 1):
        _, seconds = model.read(prompt)
        times = model.go_on(tokens - 1)
        if number:
            first.append(seconds)
            between.append(statistics.mean(times))
    return statistics.median(between) * 1e3, statistics.median(first) * 1e3


def _wait_for(endpoint: str) -> None:
    address, until_s = parse_address(endpoint), time.monotonic() + UP_S
    while True:
        try:
            socket.create_connection((address.host, address.port)).close()
            return
        except OSError:
            if time.monotonic() > until_s:
                raise SystemExit(f"llama.cpp's RPC server did not come up at {endpoint}") from None
            time.sleep(0.1)


def rows_table(rows: Sequence[LlamaRow]) -> Any:
    from rich.table import Table

    table = Table(title="llama.cpp's RPC on two nodes, four bits: medians in ms")
    for name in ("RTT", "ITL", "direct", "over", "TTFT", "prompt"):
        table.add_column(name, justify="right")
    for row in rows:
        figures = (row.rtt_ms, row.itl_ms, row.direct_ms, row.overhead_ms, row.ttft_ms, row.prompt_ttft_ms)
        table.add_row(*(f"{figure:.1f}" for figure in figures))
    return table
