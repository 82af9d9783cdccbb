"""Many users at once against a real ring of the demo model behind delaying proxies: what throughput studies share."""

from __future__ import annotations

import itertools
import secrets
import statistics
import tempfile
import threading
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.light_client import light_chat
from benchmarks.ring_latency import Proxy
from swarmnode.cli.chat_stream import ChatResult, run_chat
from swarmnode.cli.demo import demo_model
from swarmnode.cli.local_swarm import LocalSwarm
from swarmnode.config import read_settings
from swarmnode.local_access import read_local_access

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PROMPTS = ("a lighthouse keeper", "two rivals", "a long winter", "an old clock", "a train", "bees", "a map", "the sea")
WARM_UP_TOKENS = 32
"""Of replies that do not count: the ring learns what its groups cost."""


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
        self.model = model
        self._swarm = swarm
        access = read_local_access(swarm.folder / "coordinator", swarm.api)
        assert access is not None
        self._secret = access.secret
        self._numbers = itertools.count()

    @property
    def road_ms(self) -> float:
        """All links once."""
        return self.rtt_ms * self.stages / 2 if self.stages > 1 else 0.0

    @property
    def status(self) -> dict[str, Any]:
        """The model's, as the coordinator tells it."""
        with closing(self._swarm.client()) as client:
            return client.get(f"/api/v1/models/{self.model}/status")

    def run(self, users: int, tokens: int) -> Crowd:
        """`users` ask for a story of `tokens` tokens each, all at once; returns when all are answered."""
        crowd = self.crowd(users)
        self.answer(crowd, tokens)
        return crowd

    def crowd(self, users: int) -> Crowd:
        """So many who have not asked yet."""
        return Crowd([[] for _ in range(users)], [None] * users)

    def answer(self, crowd: Crowd, tokens: int) -> None:
        """As `run`, for a crowd that others watch meanwhile."""
        users = range(len(crowd.results))
        threads = [threading.Thread(target=self._ask, args=(crowd, index, tokens)) for index in users]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def chat(self, messages: Sequence[Mapping[str, str]], tokens: int) -> ChatResult:
        """One greedy reply of at most `tokens` tokens."""
        with closing(self._swarm.client()) as client:
            return run_chat(client, self._body(messages, tokens), lambda _: None)

    def mark(self) -> str:
        """What a prompt begins with so that it begins like no other: nothing of it is continued from memory."""
        return f"{secrets.token_hex(3)} {next(self._numbers)}."

    def _body(self, messages: Sequence[Mapping[str, str]], tokens: int) -> dict[str, Any]:
        return {"model": self.model, "messages": list(messages), "temperature": 0, "max_tokens": tokens}

    def _ask(self, crowd: Crowd, index: int, tokens: int) -> None:
        story = f"{self.mark()} Write a very long story about {PROMPTS[index % len(PROMPTS)]}, with many details."
        body = self._body([{"role": "user", "content": story}], tokens)
        crowd.results[index] = light_chat(self._swarm.api, self._secret, body, crowd.times_s[index])


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

    def timing_ms(self, name: str) -> float:
        """A decode step's mean milliseconds of that name in the replies' timing (`stage0_ms`, `link_ms`, …)."""
        return statistics.mean(float(reply.timing[name]) for reply in self.done)


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
