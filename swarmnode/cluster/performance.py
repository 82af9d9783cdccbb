"""What the requests of a coordinator's models cost and gave: totals since it started, and the last fifteen minutes.

A pure class that the gateway feeds with a request's events. All it keeps is bounded: models are those that are known,
reasons are codes, windows have a fixed number of bins. It never sees a prompt or a reply, only their lengths.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swarmnode.cluster.histogram import Histogram
from swarmnode.errors import ContextTooLong, StreamClosed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from swarmnode.ids import ModelId, RequestId

BIN_S = 5.0
BINS = 180
WINDOW_S = BIN_S * BINS
RATE_BINS = 3
"""Throughput now: of this bin, which has just begun, and the two before it."""
SAMPLES = 1024
"""First tokens remembered for the window's percentiles."""
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = tuple(float(2**power) for power in range(0, 21, 2))
TIMES_KEPT = 64
"""Keys of `swarm.timing` that are averaged: one for each stage and a handful more."""
LINK_TIME = "link_ms"
_STAGE_TIME = re.compile("stage([0-9]{1,3})_ms")


@dataclass(slots=True)
class Running:
    """One request on its way; the times are its stations."""

    request: RequestId
    model: ModelId
    opened_s: float
    prompt_tokens: int = 0
    tokens: int = 0
    started_s: float | None = None
    first_s: float | None = None
    last_s: float | None = None

    @property
    def phase(self) -> str:
        if self.first_s is not None:
            return "decode"
        return "queued" if self.started_s is None else "prefill"

    def tokens_per_s(self, now: float) -> float:
        """While it decodes; the first token's own time was its prompt's."""
        if self.first_s is None or self.tokens < 2:
            return 0.0
        return (self.tokens - 1) / max(1e-3, now - self.first_s)


@dataclass(slots=True)
class Bin:
    """Some seconds of one model."""

    index: int
    requests: int = 0
    too_long: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    tokens: int = 0


@dataclass(slots=True)
class ModelCounts:
    """One model's totals since the coordinator started."""

    model: ModelId
    prompt_tokens: int = 0
    generated_tokens: int = 0
    looked_up_tokens: int = 0
    """Of the prompts of replies that came to their end."""
    cached_tokens: int = 0
    """Of those, what was continued from memory."""
    succeeded: Counter[str] = field(default_factory=Counter)
    """By finish reason."""
    too_long: int = 0
    """Refused because they can never fit; no failure of the swarm's (K2)."""
    aborted: Counter[str] = field(default_factory=Counter)
    """By error code; `client_left` among them."""
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram(b) for name, b in BUCKETS.items()}
    )
    stage_compute: dict[int, Histogram] = field(default_factory=dict)
    """By stage, seconds that a token took of it; each reply counts with its mean, once for each of its tokens."""
    bins: deque[Bin] = field(default_factory=lambda: deque(maxlen=BINS))
    first_tokens: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    """(when, seconds to the first token)"""
    times: deque[tuple[float, int, Mapping[str, float]]] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    """(when, tokens, where a reply's time went)"""

    def took(self, times_ms: Mapping[str, float], tokens: int) -> None:
        """Where the time of a reply's tokens went, by the keys of `swarm.timing`."""
        for key, ms in times_ms.items():
            if key == LINK_TIME:
                self.histograms["stage_network_seconds"].observe(ms / 1e3, tokens)
            elif (stage := stage_timed(key)) is not None:
                self.stage_compute.setdefault(stage, Histogram(SECONDS)).observe(ms / 1e3, tokens)


BUCKETS: Mapping[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": SECONDS,
    "inter_token_latency_seconds": SECONDS,
    "e2e_request_latency_seconds": SECONDS,
    "request_queue_time_seconds": SECONDS,
    "request_prefill_time_seconds": SECONDS,
    "request_decode_time_seconds": SECONDS,
    "stage_network_seconds": SECONDS,
    "request_prompt_tokens": TOKENS,
    "request_generation_tokens": TOKENS,
}


class Performance:
    """`opened`, `accepted`, `started`, `gave` and one end for every request, in the order they happen."""

    def __init__(self) -> None:
        self._models: dict[ModelId, ModelCounts] = {}
        self._running: dict[RequestId, Running] = {}

    # what the gateway says

    def opened(self, request: RequestId, model: ModelId, now: float) -> None:
        self._running[request] = Running(request, model, now)
        self._bin(self._of(model), now).requests += 1

    def accepted(self, request: RequestId, prompt_tokens: int, now: float) -> None:
        running = self._running[request]
        running.prompt_tokens = prompt_tokens
        counts = self._of(running.model)
        counts.prompt_tokens += prompt_tokens
        self._bin(counts, now).prompt_tokens += prompt_tokens

    def started(self, request: RequestId, now: float) -> None:
        self._running[request].started_s = now

    def gave(self, request: RequestId, n: int, now: float) -> None:
        """`n` tokens of the reply came."""
        running = self._running[request]
        if n < 1:
            return
        counts = self._of(running.model)
        if running.first_s is None:
            running.first_s = now
            counts.histograms["time_to_first_token_seconds"].observe(now - running.opened_s)
            counts.first_tokens.append((now, now - running.opened_s))
        elif running.last_s is not None:
            counts.histograms["inter_token_latency_seconds"].observe((now - running.last_s) / n, n)
        running.last_s = now
        running.tokens += n
        counts.generated_tokens += n
        self._bin(counts, now).tokens += n

    def finished(
        self, request: RequestId, reason: str, cached_tokens: int, timing: Mapping[str, Any], now: float
    ) -> None:
        """The clean end."""
        running = self._running.pop(request)
        counts = self._of(running.model)
        counts.succeeded[reason] += 1
        counts.looked_up_tokens += running.prompt_tokens
        counts.cached_tokens += cached_tokens
        for name, value in _durations(running, now).items():
            counts.histograms[name].observe(value)
        times = {key: float(value) for key, value in timing.items() if key.endswith("_ms") and _is_number(value)}
        kept, tokens = dict(list(times.items())[:TIMES_KEPT]), max(1, running.tokens)
        counts.times.append((now, tokens, kept))
        counts.took(kept, tokens)

    def aborted(self, request: RequestId, code: str, now: float) -> None:
        """Any other end; nothing where the request has ended. Only what the swarm is to blame for has failed."""
        running = self._running.pop(request, None)
        if running is None:
            return
        counts = self._of(running.model)
        if code == ContextTooLong.code:
            counts.too_long += 1
            self._bin(counts, now).too_long += 1
            return
        counts.aborted[code] += 1
        self._bin(counts, now).failed += code != StreamClosed.code

    # what can be seen

    def counts(self) -> list[ModelCounts]:
        return list(self._models.values())

    def running(self, now: float) -> list[dict[str, Any]]:
        """Requests under way, the oldest first."""
        return [
            {
                "request": one.request,
                "model": one.model,
                "phase": one.phase,
                "prompt_tokens": one.prompt_tokens,
                "tokens": one.tokens,
                "tokens_per_s": round(one.tokens_per_s(now), 1),
                "age_s": round(now - one.opened_s, 1),
            }
            for one in self._running.values()
        ]

    def tokens_per_s(self, model: ModelId, now: float) -> float:
        """Now, over all its replies."""
        counts = self._models.get(model)
        if counts is None:
            return 0.0
        first = int(now // BIN_S) - RATE_BINS + 1
        return sum(one.tokens for one in counts.bins if one.index >= first) / max(1.0, now - first * BIN_S)

    def window(self, model: ModelId, now: float) -> dict[str, Any]:
        """The last fifteen minutes of one model, as JSON."""
        counts = self._models.get(model) or ModelCounts(model)
        since_s, newest = now - WINDOW_S, int(now // BIN_S)
        bins = [one for one in counts.bins if one.index > newest - BINS]
        firsts = sorted(seconds for when, seconds in counts.first_tokens if when >= since_s)
        busy = [one for one in bins if one.tokens]
        return {
            "window_s": WINDOW_S,
            "requests": sum(one.requests for one in bins),
            "too_long": sum(one.too_long for one in bins),
            "failed": sum(one.failed for one in bins),
            "prompt_tokens": sum(one.prompt_tokens for one in bins),
            "generated_tokens": sum(one.tokens for one in bins),
            "tokens_per_s": round(self.tokens_per_s(model, now), 2),
            "busy_tokens_per_s": round(sum(one.tokens for one in busy) / (BIN_S * len(busy)), 2) if busy else 0.0,
            "time_to_first_token_s": {"p50": _percentile(firsts, 0.5), "p99": _percentile(firsts, 0.99)},
            "time_ms": _mean_times([entry for entry in counts.times if entry[0] >= since_s]),
            "bin_s": BIN_S,
            "tokens_per_bin": list(_series(bins, newest)),
        }

    def _of(self, model: ModelId) -> ModelCounts:
        counts = self._models.get(model)
        if counts is None:
            counts = self._models[model] = ModelCounts(model)
        return counts

    def _bin(self, counts: ModelCounts, now: float) -> Bin:
        index = int(now // BIN_S)
        if not counts.bins or counts.bins[-1].index < index:
            counts.bins.append(Bin(index))
        return counts.bins[-1]


def stage_timed(key: str) -> int | None:
    """The stage whose compute a key of `swarm.timing` is about."""
    found = _STAGE_TIME.fullmatch(key)
    return int(found[1]) if found is not None else None


def _durations(running: Running, now: float) -> dict[str, float]:
    found = {"e2e_request_latency_seconds": now - running.opened_s}
    if running.started_s is not None:
        found["request_queue_time_seconds"] = running.started_s - running.opened_s
        if running.first_s is not None:
            found["request_prefill_time_seconds"] = running.first_s - running.started_s
            found["request_decode_time_seconds"] = now - running.first_s
    found["request_prompt_tokens"] = float(running.prompt_tokens)
    found["request_generation_tokens"] = float(running.tokens)
    return found


def _series(bins: list[Bin], newest: int) -> Iterator[int]:
    """One number a bin, the oldest first, zeroes where nothing happened; it ends with the present one."""
    by_index = {one.index: one.tokens for one in bins}
    first = min(by_index, default=newest)
    return (by_index.get(index, 0) for index in range(first, newest + 1))


def _mean_times(entries: list[tuple[float, int, Mapping[str, float]]]) -> dict[str, float]:
    """Where a token's time went, weighted by tokens; a reply over fewer stages has no say about the others."""
    sums: dict[str, float] = {}
    weights: dict[str, int] = {}
    for _, tokens, times in entries:
        for key, value in times.items():
            sums[key] = sums.get(key, 0.0) + value * tokens
            weights[key] = weights.get(key, 0) + tokens
    return {key: round(sums[key] / weights[key], 3) for key in sorted(sums)}


def _percentile(ordered: list[float], share: float) -> float | None:
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4) if ordered else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
