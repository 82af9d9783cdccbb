"""Users who ask one swarm at once, a thread and a connection each, and what they saw: the measuring side of `bench`."""

from __future__ import annotations

import math
import statistics
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from swarmnode.cli.chat_stream import ChatResult, run_chat
from swarmnode.errors import SwarmError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from swarmnode.cli.client import ApiClient

POLL_S = 0.2
"""How often the main thread looks for Ctrl-C while users wait."""


@dataclass(slots=True)
class Reply:
    """One answered request. `times_s`: the clock at each piece of its text."""

    result: ChatResult
    times_s: list[float]

    @property
    def gaps_ms(self) -> list[float]:
        return [(b - a) * 1e3 for a, b in pairwise(self.times_s)]

    @property
    def tokens_per_s(self) -> float:
        """After the first token. Pieces of text are tokens, but for those that share a character."""
        if len(self.times_s) < 2 or self.times_s[-1] == self.times_s[0]:
            return 0.0
        return (self.result.completion_tokens - 1) / (self.times_s[-1] - self.times_s[0])


class _Left(Exception):
    """Another user's request failed, so this one is given up."""


@dataclass(slots=True)
class Crowd:
    """`users` at once, each of whom sends the requests of `bodies()` one after the other; a failing one ends all."""

    connect: Callable[[], ApiClient]
    bodies: Callable[[], Sequence[Mapping[str, Any]]]
    users: int
    answered: Callable[[], None] = lambda: None
    replies: list[Reply] = field(default_factory=list)
    _failed: list[SwarmError] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> float:
        """All of them to their end; returns the seconds it took. Raises the first error of a request."""
        with ExitStack() as stack:
            clients = [stack.enter_context(closing(self.connect())) for _ in range(self.users)]
            for client in clients:
                client.get("/health")  # opens the connection: handshakes are no part of a TTFT
            begun_s = time.monotonic()
            try:
                self._run([threading.Thread(target=self._use, args=(client,), daemon=True) for client in clients])
            finally:
                self._stop.set()
            if self._failed:
                raise self._failed[0]
            return time.monotonic() - begun_s

    def _run(self, threads: Sequence[threading.Thread]) -> None:
        """Waits in short turns, so that Ctrl-C is seen; after a failure nobody's first token is waited for."""
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive() and not self._failed:
                thread.join(POLL_S)

    def _use(self, client: ApiClient) -> None:
        try:
            for body in self.bodies():
                self._ask(client, body)
        except _Left:
            pass
        except SwarmError as error:
            self._failed.append(error)
            self._stop.set()

    def _ask(self, client: ApiClient, body: Mapping[str, Any]) -> None:
        times_s: list[float] = []

        def show(_: str) -> None:
            times_s.append(time.monotonic())
            if self._stop.is_set():
                raise _Left

        result = run_chat(client, body, show)
        self.replies.append(Reply(result, times_s))
        self.answered()


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed; 0 of nothing."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def summary(users: int, replies: Sequence[Reply], took_s: float) -> dict[str, Any]:
    """One line of a report: what `users` saw, and where a token's time went."""
    results = [reply.result for reply in replies]
    stages = {name for r in results for name in r.timing if name.startswith("stage") and name.endswith("_ms")}
    return {
        "users": users,
        "replies": len(replies),
        "prompt_tokens": round(statistics.median(r.prompt_tokens for r in results)),
        "cached_tokens": round(statistics.median(r.cached_tokens for r in results)),
        "output_tokens": round(statistics.median(r.completion_tokens for r in results)),
        "ttft_ms": _spread([r.ttft_s * 1e3 for r in results]),
        "itl_ms": _spread([gap for reply in replies for gap in reply.gaps_ms]),
        "tokens_per_s_per_user": round(statistics.median(reply.tokens_per_s for reply in replies), 2),
        "tokens_per_s": round(sum(r.completion_tokens for r in results) / took_s, 2),
        "stage_ms": {name.removesuffix("_ms"): _mean(results, name) for name in sorted(stages, key=_stage)},
        "link_ms": _mean(results, "link_ms"),
        "queue_ms": _mean(results, "queue_ms"),
        "route": ", ".join(sorted({str(r.timing["route"]) for r in results if "route" in r.timing})),
    }


def _stage(name: str) -> int:
    return int(name.removeprefix("stage").removesuffix("_ms"))


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"p50": round(percentile(values, 0.5), 2), "p99": round(percentile(values, 0.99), 2)}


def _mean(results: Sequence[ChatResult], name: str) -> float:
    known = [float(r.timing[name]) for r in results if name in r.timing]
    return round(statistics.mean(known), 2) if known else 0.0
