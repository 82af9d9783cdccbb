"""`/metrics` as Prometheus reads it: names, labels and numbers from counters and from what `ps` shows."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import swarmnode
from swarmnode.api.metrics import exposition
from swarmnode.cluster.performance import Performance
from swarmnode.ids import ModelId, RequestId

MODEL = ModelId("m")
NODES = {
    "peers": [
        {"node": "n1", "name": "den", "state": "alive", "route": "direct", "vram_bytes": 8000}
        | {"vram_free_bytes": 5000, "round_trip_ms": 4.5},
        {"node": "n2", "name": 'at"tic\n', "state": "suspect", "route": "relayed", "vram_bytes": None},
        {"node": "n3", "name": "loft", "state": "awaited", "address": None},
    ],
    "voters": ["den", "loft", "attic"],
    "term": 6,
    "event_counts": {"peer_joined": 4, "ring_restoring": 2},
    "carried": {"tunnels": 3, "polled": 0},
    "traffic": [
        {"kind": "requests", "peer": "n1", "ring": "", "lane": "", "bytes_in": 5, "bytes_out": 7},
        {"kind": "relayed", "peer": "n1", "ring": "r", "lane": "act", "bytes_in": 50, "bytes_out": 70},
        {"kind": "requests", "peer": "gone", "ring": "", "lane": "", "bytes_in": 1, "bytes_out": 1},
    ],
    "lost": [
        {"id": "lost", "restoring": {"stage": 1, "waits_for": "free peers", "next_try_s": 3.0, "failures": 2}},
        {"id": "failed", "restoring": None},
    ],
    "rings": [
        {
            "id": "m",
            "restoring": None,
            "running": 2,
            "waiting": 1,
            "paused": 4,
            "parked": 5,
            "kv_tokens": 1000,
            "kv_reserved_tokens": 250,
            "kv_parked_tokens": 100,
            "tokens_per_s": 12.5,
            "stages": [
                {
                    "stage": 0,
                    "layers": [0, 8],
                    "phase": "ready",
                    "vram_bytes": 1000,
                    "links": [{"lane": "act0", "route": "relayed", "round_trip_ms": 12.0, "bytes": 99}],
                },
                {"stage": 1, "layers": [9, 11], "phase": "loading", "links": []},
            ],
        }
    ],
}


class Samples(dict[tuple[str, frozenset[str]], float]):
    """By name and the labels' values: `samples("swarmnode_stages", "m", "ready")`."""

    def __init__(self, text: bytes) -> None:
        families = text_string_to_metric_families(text.decode())
        super().__init__(
            {(one.name, frozenset(one.labels.values())): one.value for family in families for one in family.samples}
        )

    def __call__(self, name: str, *labels: str) -> float:
        return self[name, frozenset(labels)]


def counted() -> Performance:
    performance = Performance()
    for number, reason in enumerate(("stop", "length", "")):
        request = RequestId(str(number))
        performance.opened(request, MODEL, 10.0)
        performance.accepted(request, 20, 10.1)
        performance.started(request, 10.2)
        performance.gave(request, 1, 10.5)
        performance.gave(request, 3, 11.1)
        if reason:
            times = {"stage0_ms": 100.0, "stage1_ms": 300.0, "link_ms": 25.0, "queue_ms": 1.0}
            performance.finished(request, reason, 8 if number else 0, times, 11.2)
        else:
            performance.aborted(request, "stage_lost", 11.2)
    performance.opened(RequestId("long"), MODEL, 11.2)
    performance.aborted(RequestId("long"), "context_too_long", 11.3)
    return performance


TABLE = {
    ("build_info", swarmnode.__version__): 1,
    # of requests: three replies of four tokens, one of which was cut off, and a prompt that never fits
    ("prompt_tokens_total", "m"): 60,
    ("generation_tokens_total", "m"): 12,
    ("prefix_cache_queries_total", "m"): 40,
    ("prefix_cache_hits_total", "m"): 8,
    ("request_success_total", "m", "stop"): 1,
    ("request_success_total", "m", "length"): 1,
    ("request_aborted_total", "m", "stage_lost"): 1,
    ("request_too_long_total", "m"): 1,
    ("time_to_first_token_seconds_count", "m"): 3,
    ("time_to_first_token_seconds_sum", "m"): 1.5,
    ("inter_token_latency_seconds_count", "m"): 9,  # three tokens came together, thrice
    ("inter_token_latency_seconds_sum", "m"): 1.8,
    ("e2e_request_latency_seconds_count", "m"): 2,
    ("e2e_request_latency_seconds_sum", "m"): 2.4,
    ("request_queue_time_seconds_count", "m"): 2,
    ("request_queue_time_seconds_sum", "m"): 0.4,
    ("request_prefill_time_seconds_count", "m"): 2,
    ("request_prefill_time_seconds_sum", "m"): 0.6,
    ("request_decode_time_seconds_count", "m"): 2,
    ("request_decode_time_seconds_sum", "m"): 1.4,
    ("request_prompt_tokens_count", "m"): 2,
    ("request_prompt_tokens_sum", "m"): 40,
    ("request_generation_tokens_count", "m"): 2,
    ("request_generation_tokens_sum", "m"): 8,
    ("stage_network_seconds_count", "m"): 8,
    ("stage_network_seconds_sum", "m"): 0.2,
    ("stage_compute_seconds_count", "m", "0"): 8,
    ("stage_compute_seconds_sum", "m", "0"): 0.8,
    ("stage_compute_seconds_count", "m", "1"): 8,
    ("stage_compute_seconds_sum", "m", "1"): 2.4,
    # of rings
    ("num_requests_running", "m"): 2,
    ("num_requests_waiting", "m"): 1,
    ("num_requests_paused", "m"): 4,
    ("num_conversations_parked", "m"): 5,
    ("tokens_per_second", "m"): 12.5,
    ("kv_cache_tokens", "m"): 1000,
    ("kv_cache_usage_perc", "m"): 0.25,
    ("kv_cache_parked_perc", "m"): 0.1,
    ("layer_coverage_ratio", "m"): 0.75,
    ("stages", "m", "ready"): 1,
    ("stages", "m", "loading"): 1,
    ("stage_vram_bytes", "m", "0"): 1000,
    ("lanes", "m", "relayed"): 1,
    ("lane_bytes_total", "m", "0", "act0"): 99,
    ("link_round_trip_seconds", "m", "0", "act0"): 0.012,
    ("model_restoring", "m"): 0,
    ("model_restoring", "lost"): 1,
    ("model_restoring", "failed"): 0,
    ("model_restoring_failures", "m"): 0,
    ("model_restoring_failures", "lost"): 2,
    ("model_restoring_failures", "failed"): 0,
    ("stage_failover_total",): 2,
    # of nodes; the bytes of a ring's lanes and of peers that are gone are not there
    ("peers", "alive"): 1,
    ("peers", "suspect"): 1,
    ("peers", "awaited"): 1,
    ("links", "direct"): 1,
    ("links", "relayed"): 1,
    ("peer_vram_bytes", "den"): 8000,
    ("peer_vram_free_bytes", "den"): 5000,
    ("peer_rtt_seconds", "den"): 0.0045,
    ("voters",): 3,
    ("election_term",): 6,
    ("relay_tunnels",): 3,
    ("link_bytes_total", "den", "requests", "in"): 5,
    ("link_bytes_total", "den", "requests", "out"): 7,
}
"""All of `/metrics` but the histograms' buckets: the name without its prefix, the labels' values."""


def test_every_name_with_its_labels_and_its_value() -> None:
    found = Samples(exposition(counted().counts(), NODES))
    buckets = {key: value for key, value in found.items() if key[0].endswith("_bucket")}
    wanted = {(f"swarmnode_{name}", frozenset(labels)): value for (name, *labels), value in TABLE.items()}
    assert {key: value for key, value in found.items() if key not in buckets} == pytest.approx(wanted)
    for (name, labels), value in buckets.items():
        if "+Inf" in labels:
            assert value == found[name.replace("_bucket", "_count"), labels - {"+Inf"}]
    assert found("swarmnode_time_to_first_token_seconds_bucket", "m", "0.5") == 3
    assert found("swarmnode_time_to_first_token_seconds_bucket", "m", "0.2") == 0
    assert found("swarmnode_stage_compute_seconds_bucket", "m", "1", "0.2") == 0
    assert found("swarmnode_stage_compute_seconds_bucket", "m", "1", "0.5") == 8


def test_a_swarm_without_anything_has_its_names_all_the_same() -> None:
    found = Samples(exposition([], {}))
    names = ["build_info", "voters", "election_term", "stage_failover_total", "relay_tunnels"]
    assert [name.removeprefix("swarmnode_") for name, _ in found] == names


async def test_over_http(gateway: Any) -> None:
    reply = await gateway.client.get("/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain; version=")
    assert Samples(reply.content)
    performance = (await gateway.client.get("/api/v1/models/replay-1/performance")).json()
    assert (performance["id"], performance["window_s"], performance["requests"]) == ("replay-1", 900, 0)
    assert (await gateway.client.get("/api/v1/models/none/performance")).status_code == 404
    assert (await gateway.client.get("/api/v1/workers/den/logs")).status_code == 404
