"""Many users at once against a real ring of the demo model behind delaying proxies: what throughput studies share."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.ring_latency import Proxy
from swarmnode.cli.chat_stream import ChatResult, run_chat
from swarmnode.cli.demo import demo_model
from swarmnode.cli.local_swarm import LocalSwarm
from swarmnode.config import read_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

PROMPTS = ("a lighthouse keeper", "two rivals", "a long winter", "an old clock", "a train", "bees", "a map", "the sea")
MEASURED_ROWS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class RingUnderTest:
    """How the ring is built."""

    stages: int
    rtt_ms: float
    dtype: str = "float32"
    threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


class Ring:
    """A loaded ring: ask it, many at once."""

    def __init__(self, swarm: LocalSwarm, model: str, rtt_ms: float, stages: int) -> None:
        self.rtt_ms = rtt_ms
        """Measured through the proxies."""
        self.stages = stages
        self._swarm = swarm
        self._model = model

    def run(self, users: int, tokens: int) -> Crowd:
        """`users` ask for a story of `tokens` tokens each, all at once; returns when all are answered."""
        crowd = Crowd([[] for _ in range(users)], [None] * users)
        threads = [threading.Thread(target=self._ask, args=(crowd, index, tokens)) for index in range(users)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return crowd

    def chat(
        self, messages: Sequence[Mapping[str, str]], tokens: int, show: Callable[[str], None] = lambda _: None
    ) -> ChatResult:
        """One greedy reply of at most `tokens` tokens."""
        body = {"model": self._model, "messages": list(messages), "temperature": 0, "max_tokens": tokens}
        with closing(self._swarm.client()) as client:
            return run_chat(client, body, show)

    def _ask(self, crowd: Crowd, index: int, tokens: int) -> None:
        story = f"Write a very long story about {PROMPTS[index % len(PROMPTS)]}, number {index}, with many details."
        times = crowd.times_s[index]
        messages = [{"role": "user", "content": story}]
        crowd.results[index] = self.chat(messages, tokens, lambda _: times.append(time.monotonic()))


@dataclass(slots=True)
class Crowd:
    """Replies of users who asked at once, and when each piece of their text came."""

    times_s: list[list[float]]
    results: list[ChatResult | None]

    @property
    def done(self) -> list[ChatResult]:
        return [result for result in self.results if result is not None]

    @property
    def tokens_per_s(self) -> float:
        """While every user was being answered: from the last one's first text to the first one's last."""
        if len(self.done) < len(self.results):
            raise RuntimeError(f"{len(self.results) - len(self.done)} of {len(self.results)} requests failed")
        begin_s, end_s = max(times[0] for times in self.times_s), min(times[-1] for times in self.times_s)
        return sum(self._rate(i, begin_s, end_s) for i in range(len(self.results)))

    def _rate(self, index: int, begin_s: float, end_s: float) -> float:
        """Tokens per second of one user; a piece of text may be more than one token, by its reply's average."""
        times, result = self.times_s[index], self.results[index]
        inside = [at for at in times if begin_s <= at <= end_s]
        if result is None or len(inside) < 2:
            return 0.0
        return (len(inside) - 1) / (inside[-1] - inside[0]) * result.completion_tokens / len(times)

    def stage_ms(self, stage: int) -> float:
        """A stage's mean compute per decode step, over all replies."""
        return statistics.mean(result.timing[f"stage{stage}_ms"] for result in self.done)


@contextmanager
def running_ring(about: RingUnderTest) -> Iterator[Ring]:
    """Start the swarm, load the demo model over its peers, warm it up; everything ends with the block."""
    root = read_settings().models_root
    model = demo_model(root, quiet=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        proxies = [stack.enter_context(closing(Proxy(about.rtt_ms / 2))) for _ in range(about.stages)]
        swarm = stack.enter_context(LocalSwarm(folder, root, environment=about.environment))
        swarm.start_coordinator()
        names = [f"peer-{index}" for index in range(about.stages)]
        for name, proxy in zip(names, proxies, strict=True):
            extra = ("--swarm-listen", proxy.target, "--advertise", proxy.address)
            swarm.start_peers(name, threads=about.threads, extra=extra)
        with closing(swarm.client()) as client:
            client.post(f"/api/v1/models/{model}/load", {"peers": names, "dtype": about.dtype, "wait": True})
        ring = Ring(swarm, model, statistics.mean(proxy.rtt_ms for proxy in proxies), about.stages)
        ring.run(2, 8)
        yield ring


def step_costs(about: RingUnderTest, tokens: int) -> list[dict[int, float]]:
    """Each stage's milliseconds by rows, with all stages busy: as many groups of that size as there are stages.

    The groups are held to their size by SWARM_SERVE_MAX_BATCH and the source's rules, on a ring of its own.
    """
    costs: list[dict[int, float]] = [{} for _ in range(about.stages)]
    for rows in MEASURED_ROWS:
        users = rows * about.stages
        fixed = {
            "SWARM_SERVE_SCHEDULE": "source",
            "SWARM_SERVE_MAX_BATCH": str(rows),
            "SWARM_SERVE_IN_FLIGHT": str(users),
        }
        alone = RingUnderTest(about.stages, 0.0, about.dtype, about.threads, {**about.environment, **fixed})
        with running_ring(alone) as ring:
            crowd = ring.run(users, tokens)
        for stage in range(about.stages):
            costs[stage][rows] = round(crowd.stage_ms(stage), 2)
    return costs
