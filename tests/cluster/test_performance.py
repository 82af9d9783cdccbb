"""Counters of requests: totals, the last fifteen minutes, and that nothing grows without end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.cluster.histogram import Histogram
from swarmnode.cluster.performance import BIN_S, BINS, SAMPLES, Performance
from swarmnode.cluster.recent_events import KEPT, MAX_VALUE_CHARS, RecentEvents
from swarmnode.ids import ModelId, RequestId

MODEL = ModelId("m")


def reply(performance: Performance, at: float, tokens: int = 4, number: str = "r", stage0_ms: float = 2.0) -> None:
    """A request at `at`: half a second to the first token, then a tenth for each."""
    request = RequestId(number)
    performance.opened(request, MODEL, at)
    performance.accepted(request, 10, at)
    performance.started(request, at + 0.2)
    for index in range(tokens):
        performance.gave(request, 1, at + 0.5 + index / 10)
    performance.finished(request, "stop", 0, {"stage0_ms": stage0_ms, "route": "direct"}, at + 0.5 + tokens / 10)


def test_a_request_is_shown_with_its_phase_and_its_speed() -> None:
    performance, request = Performance(), RequestId("r")
    performance.opened(request, MODEL, 0.0)
    assert [(one["phase"], one["age_s"]) for one in performance.running(1.0)] == [("queued", 1.0)]
    performance.accepted(request, 7, 1.0)
    performance.started(request, 2.0)
    assert [(one["phase"], one["prompt_tokens"]) for one in performance.running(2.0)] == [("prefill", 7)]
    performance.gave(request, 0, 2.5)
    assert performance.running(2.5)[0]["phase"] == "prefill", "text that is held back is no token"
    performance.gave(request, 1, 3.0)
    performance.gave(request, 4, 5.0)
    assert [(one["phase"], one["tokens"], one["tokens_per_s"]) for one in performance.running(5.0)] == [
        ("decode", 5, 2.0)
    ]
    performance.finished(request, "stop", 0, {}, 5.0)
    assert performance.running(5.0) == []


def test_only_the_first_end_counts() -> None:
    performance = Performance()
    reply(performance, 0.0)
    performance.aborted(RequestId("r"), "client_left", 2.0)
    [counts] = performance.counts()
    assert (dict(counts.succeeded), dict(counts.aborted)) == ({"stop": 1}, {})


def test_k2_what_never_fits_is_too_long_and_a_client_that_leaves_is_no_failure_either() -> None:
    performance = Performance()
    for number, code in enumerate(("context_too_long", "context_too_long", "client_left", "stage_lost")):
        performance.opened(RequestId(str(number)), MODEL, 1.0)
        performance.aborted(RequestId(str(number)), code, 2.0)
    window = performance.window(MODEL, 3.0)
    assert (window["requests"], window["too_long"], window["failed"]) == (4, 2, 1)
    [counts] = performance.counts()
    assert (counts.too_long, dict(counts.aborted)) == (2, {"client_left": 1, "stage_lost": 1})
    assert performance.window(MODEL, 3000.0)["too_long"] == 0


def test_the_window_is_fifteen_minutes_and_the_totals_are_for_ever() -> None:
    performance = Performance()
    reply(performance, 0.0, tokens=100)
    reply(performance, 1000.0, tokens=10)
    window = performance.window(MODEL, 1005.0)
    assert (window["requests"], window["generated_tokens"], window["prompt_tokens"]) == (1, 10, 10)
    assert window["time_to_first_token_s"] == {"p50": 0.5, "p99": 0.5}
    assert window["tokens_per_bin"] == [10, 0]
    assert window["busy_tokens_per_s"] == 2.0
    assert performance.counts()[0].generated_tokens == 110
    assert performance.window(MODEL, 3000.0)["requests"] == 0
    assert performance.window(ModelId("other"), 0.0)["requests"] == 0
    assert len(performance.counts()) == 1, "asking makes no counters"


def test_throughput_now_is_that_of_the_last_seconds() -> None:
    performance = Performance()
    reply(performance, 100.0, tokens=30)
    assert performance.tokens_per_s(MODEL, 104.0) == pytest.approx(30 / 14)
    assert performance.tokens_per_s(MODEL, 130.0) == 0.0


def test_where_the_time_went_is_weighted_by_tokens() -> None:
    performance = Performance()
    reply(performance, 0.0, tokens=3, stage0_ms=1.0)
    reply(performance, 1.0, tokens=1, stage0_ms=5.0)
    assert performance.window(MODEL, 2.0)["time_ms"] == {"stage0_ms": 2.0}


def test_a_stages_compute_is_counted_by_stage_and_no_other_key_is_one() -> None:
    performance = Performance()
    performance.opened(RequestId("r"), MODEL, 0.0)
    performance.gave(RequestId("r"), 3, 1.0)
    timing = {"stage1_ms": 4.0, "stage12345_ms": 1.0, "stage\u00b2_ms": 1.0, "stage_ms": 1.0, "link_ms": 2.0}
    performance.finished(RequestId("r"), "stop", 0, timing, 2.0)
    [counts] = performance.counts()
    assert {stage: one.total for stage, one in counts.stage_compute.items()} == {1: pytest.approx(0.012)}
    assert counts.histograms["stage_network_seconds"].total == pytest.approx(0.006)


def test_nothing_grows_without_end() -> None:
    performance = Performance()
    for number in range(3000):
        reply(performance, number * BIN_S, tokens=1, number=str(number))
    [counts] = performance.counts()
    assert (len(counts.bins), len(counts.first_tokens), len(counts.times)) == (BINS, SAMPLES, SAMPLES)
    assert len(performance.window(MODEL, 3000 * BIN_S)["tokens_per_bin"]) <= BINS


@given(st.lists(st.floats(0, 400), max_size=50))
def test_buckets_count_all_that_is_at_most_their_bound(values: list[float]) -> None:
    histogram = Histogram((0.5, 2.0, 100.0))
    for value in values:
        histogram.observe(value)
    below = [sum(value <= bound for value in values) for bound in (0.5, 2.0, 100.0)]
    assert histogram.buckets() == list(zip(["0.5", "2.0", "100.0", "+Inf"], [*below, len(values)], strict=True))
    assert histogram.total == pytest.approx(sum(values))


def test_the_newest_events_are_kept_and_long_texts_are_cut() -> None:
    recent = RecentEvents()
    for number in range(KEPT + 3):
        recent.note("peer_left", {"number": number, "why": "x" * 1000}, 1e9 + number)
    kept = recent.newest()
    assert [event["number"] for event in kept] == list(range(3, KEPT + 3))
    assert {len(event["why"]) for event in kept} == {MAX_VALUE_CHARS}
    assert recent.newest(2) == kept[-2:]
    assert recent.newest(0) == []
    assert recent.counts == {"peer_left": KEPT + 3}
