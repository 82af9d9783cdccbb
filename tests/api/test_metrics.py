"""`/metrics` as Prometheus reads it: names, labels and numbers from counters and from what `ps` shows."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from swarmnode.api.metrics import exposition
from swarmnode.cluster.performance import Performance
from swarmnode.ids import ModelId, RequestId

MODEL = ModelId("m")
NODES = {
    "peers": [
        {"node": "n1", "name": "den", "state": "alive", "route": "direct", "vram_bytes": 8000, "vram_free_bytes": 5000},
        {"node": "n2", "name": 'at"tic\n', "state": "suspect", "route": "relayed", "vram_bytes": None},
        {"node": "n3", "name": "loft", "state": "awaited", "address": None},
    ],
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
            "kv_tokens": 1000,
            "kv_reserved_tokens": 250,
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
            performance.finished(request, reason, 8 if number else 0, {}, 11.2)
        else:
            performance.aborted(request, "stage_lost", 11.2)
    performance.opened(RequestId("long"), MODEL, 11.2)
    performance.aborted(RequestId("long"), "context_too_long", 11.3)
    return performance


def test_requests_are_counted_under_vllms_names() -> None:
    found = Samples(exposition(counted().counts(), NODES))
    assert found("swarmnode_prompt_tokens_total", "m") == 60
    assert found("swarmnode_generation_tokens_total", "m") == 12
    assert found("swarmnode_request_success_total", "m", "stop") == 1
    assert found("swarmnode_request_success_total", "m", "length") == 1
    assert found("swarmnode_request_aborted_total", "m", "stage_lost") == 1
    assert found("swarmnode_request_too_long_total", "m") == 1
    assert ("swarmnode_request_aborted_total", frozenset({"m", "context_too_long"})) not in found
    assert found("swarmnode_prefix_cache_queries_total", "m") == 2
    assert found("swarmnode_prefix_cache_hits_total", "m") == 1
    assert found("swarmnode_time_to_first_token_seconds_bucket", "m", "0.5") == 3
    assert found("swarmnode_time_to_first_token_seconds_bucket", "m", "0.2") == 0
    assert found("swarmnode_inter_token_latency_seconds_count", "m") == 9, "three tokens came together, thrice"
    assert found("swarmnode_inter_token_latency_seconds_sum", "m") == pytest.approx(1.8)
    assert found("swarmnode_request_generation_tokens_sum", "m") == 8


def test_rings_stages_lanes_links_and_peers() -> None:
    found = Samples(exposition([], NODES))
    assert found("swarmnode_num_requests_running", "m") == 2
    assert found("swarmnode_kv_cache_usage_perc", "m") == 0.25
    assert found("swarmnode_layer_coverage_ratio", "m") == 0.75
    assert found("swarmnode_stages", "m", "loading") == 1
    assert found("swarmnode_lanes", "m", "relayed") == 1
    assert found("swarmnode_link_round_trip_seconds", "m", "0", "act0") == 0.012
    assert found("swarmnode_lane_bytes_total", "m", "0", "act0") == 99
    assert found("swarmnode_peers", "suspect") == 1
    assert found("swarmnode_links", "relayed") == 1
    assert found("swarmnode_relay_tunnels") == 3
    assert found("swarmnode_link_bytes_total", "den", "requests", "out") == 7
    assert not [labels for name, labels in found if labels & {"gone"} or ("bytes" in name and labels & {"relayed"})]


def test_models_that_are_being_loaded_again() -> None:
    found = Samples(exposition([], NODES))
    restoring = {model: found("swarmnode_model_restoring", model) for model in ("lost", "failed", "m")}
    assert restoring == {"lost": 1, "failed": 0, "m": 0}
    assert found("swarmnode_model_restoring_failures", "lost") == 2


def test_a_swarm_without_anything_has_its_names_all_the_same() -> None:
    found = Samples(exposition([], {}))
    names = ["swarmnode_build_info", "swarmnode_voters", "swarmnode_election_term", "swarmnode_relay_tunnels"]
    assert [name for name, _ in found] == names


async def test_over_http(gateway: Any) -> None:
    reply = await gateway.client.get("/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain; version=")
    assert Samples(reply.content)
    performance = (await gateway.client.get("/api/v1/models/replay-1/performance")).json()
    assert (performance["id"], performance["window_s"], performance["requests"]) == ("replay-1", 900, 0)
    assert (await gateway.client.get("/api/v1/models/none/performance")).status_code == 404
    assert (await gateway.client.get("/api/v1/workers/den/logs")).status_code == 404


def test_c1_a_cards_memory_is_there_for_who_has_one() -> None:
    found = Samples(exposition([], NODES))
    cards = {key: value for key, value in found.items() if "vram" in key[0]}
    assert cards == {
        ("swarmnode_peer_vram_bytes", frozenset({"den"})): 8000,
        ("swarmnode_peer_vram_free_bytes", frozenset({"den"})): 5000,
        ("swarmnode_stage_vram_bytes", frozenset({"m", "0"})): 1000,
    }
    assert {key[1] for key in found if key[0] == "swarmnode_links"} == {frozenset({"direct"}), frozenset({"relayed"})}
