"""What can be measured of a swarm: `/metrics` for Prometheus, a model's last fifteen minutes, and workers' logs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from starlette.responses import JSONResponse, Response

import swarmnode
from swarmnode.api.auth import needs
from swarmnode.cluster.token_book import Scope

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from prometheus_client import Metric

    from swarmnode.api.backend import Backend
    from swarmnode.cluster.performance import ModelCounts

HELP = {
    "time_to_first_token_seconds": "From a request's arrival to its first token.",
    "inter_token_latency_seconds": "Between two tokens of a reply.",
    "e2e_request_latency_seconds": "From a request's arrival to its end.",
    "request_queue_time_seconds": "Until its prompt was begun.",
    "request_prefill_time_seconds": "From there to the first token.",
    "request_decode_time_seconds": "From the first token to the end.",
    "stage_network_seconds": "Of a token: between stages, all links together; a reply's mean, once for each token.",
    "request_prompt_tokens": "Tokens of prompts.",
    "request_generation_tokens": "Tokens of replies.",
}
_OF_PEERS = (
    ("peer_vram_bytes", "vram_bytes", 1, "What a peer's card has."),
    ("peer_vram_free_bytes", "vram_free_bytes", 1, "What of it is free."),
    ("peer_rtt_seconds", "round_trip_ms", 1e3, "The round trip of a peer's beats, as it measured them."),
)
"""Name, the key in a peer's row, how many of its units are one of the metric's, help."""


def metrics_router(backend: Backend) -> APIRouter:
    """`GET /metrics`, `/api/v1/models/{id}/performance` and `/api/v1/workers/{id}/logs`."""
    router = APIRouter()

    @router.get("/metrics", response_model=None)
    @needs(Scope.READ)
    async def metrics() -> Response:
        return Response(exposition(backend.counts(), backend.nodes()), headers={"content-type": CONTENT_TYPE_LATEST})

    @router.get("/api/v1/models/{model}/performance", response_model=None)
    @needs(Scope.READ)
    async def performance(model: str) -> Response:
        return JSONResponse(dict(backend.performance(backend.model(model).id)))

    @router.get("/api/v1/workers/{worker}/logs", response_model=None)
    @needs(Scope.OPERATE)
    async def logs(worker: str) -> Response:
        return JSONResponse(dict(await backend.logs(worker)), headers={"cache-control": "no-store"})

    return router


def exposition(counts: Sequence[ModelCounts], nodes: Mapping[str, Any]) -> bytes:
    """Prometheus' text format. Labels are models, peers, stages, lanes and codes: nothing that a client can invent."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Swarm(counts, nodes))
    return generate_latest(registry)


class _Swarm(Collector):
    def __init__(self, counts: Sequence[ModelCounts], nodes: Mapping[str, Any]) -> None:
        self._counts = counts
        self._nodes = nodes

    def collect(self) -> Iterable[Metric]:
        build = GaugeMetricFamily("swarmnode_build_info", "The coordinator's version.", labels=["version"])
        build.add_metric([swarmnode.__version__], 1)
        yield build
        yield from _request_metrics(self._counts)
        yield from _ring_metrics(self._nodes.get("rings") or [])
        yield from _stage_metrics(self._nodes.get("rings") or [])
        yield from _restoring_metrics([*(self._nodes.get("rings") or ()), *(self._nodes.get("lost") or ())])
        yield from _node_metrics(self._nodes)


def _request_metrics(counts: Sequence[ModelCounts]) -> Iterator[Metric]:
    yield _counter("prompt_tokens", "Tokens of prompts taken.", ((c.model, c.prompt_tokens) for c in counts))
    yield _counter("generation_tokens", "Tokens generated.", ((c.model, c.generated_tokens) for c in counts))
    looked_up = ((c.model, c.looked_up_tokens) for c in counts)
    yield _counter("prefix_cache_queries", "Prompt tokens of replies that came to their end.", looked_up)
    yield _counter(
        "prefix_cache_hits", "Of those, what was not read again.", ((c.model, c.cached_tokens) for c in counts)
    )
    yield _counter("request_too_long", "Requests that can never fit, refused.", ((c.model, c.too_long) for c in counts))
    success = CounterMetricFamily(
        "swarmnode_request_success", "Replies by how they ended.", labels=["model_name", "finished_reason"]
    )
    aborted = CounterMetricFamily(
        "swarmnode_request_aborted", "Requests without a clean end.", labels=["model_name", "reason"]
    )
    for one in counts:
        for reason, number in one.succeeded.items():
            success.add_metric([one.model, reason], number)
        for code, number in one.aborted.items():
            aborted.add_metric([one.model, code], number)
    yield success
    yield aborted
    for name, text in HELP.items():
        family = HistogramMetricFamily(f"swarmnode_{name}", text, labels=["model_name"])
        for one in counts:
            histogram = one.histograms[name]
            family.add_metric([one.model], histogram.buckets(), histogram.total)
        yield family
    compute = HistogramMetricFamily(
        "swarmnode_stage_compute_seconds",
        "Of a token: in a stage; a reply's mean, once for each token.",
        labels=["model_name", "stage"],
    )
    for one in counts:
        for stage, histogram in one.stage_compute.items():
            compute.add_metric([one.model, str(stage)], histogram.buckets(), histogram.total)
    yield compute


def _ring_metrics(rings: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    def of_each(key: str) -> Iterator[tuple[str, float]]:
        return ((ring["id"], ring.get(key) or 0) for ring in rings)

    yield _gauge("num_requests_running", "Sessions that a ring works on.", of_each("running"))
    yield _gauge("num_requests_waiting", "Requests that wait for room.", of_each("waiting"))
    yield _gauge("num_requests_paused", "Sessions put aside for others.", of_each("paused"))
    yield _gauge("num_conversations_parked", "Conversations kept in memory after their end.", of_each("parked"))
    yield _gauge("tokens_per_second", "Tokens generated in the last seconds.", of_each("tokens_per_s"))
    yield _gauge("kv_cache_tokens", "Tokens that all conversations may hold together.", of_each("kv_tokens"))
    usage = ((ring["id"], _share(ring.get("kv_reserved_tokens"), ring.get("kv_tokens"))) for ring in rings)
    yield _gauge("kv_cache_usage_perc", "Reserved share of the KV cache, 0 to 1.", usage)
    parked = ((ring["id"], _share(ring.get("kv_parked_tokens"), ring.get("kv_tokens"))) for ring in rings)
    yield _gauge("kv_cache_parked_perc", "Share that parked conversations hold, 0 to 1.", parked)
    yield _gauge(
        "layer_coverage_ratio", "Share of the layers that is loaded.", ((r["id"], _coverage(r)) for r in rings)
    )


def _stage_metrics(rings: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    stages = GaugeMetricFamily("swarmnode_stages", "Stages by phase.", labels=["model_name", "phase"])
    lanes = GaugeMetricFamily("swarmnode_lanes", "Lanes by the way they take.", labels=["model_name", "route"])
    where = ["model_name", "stage", "lane"]
    trip = GaugeMetricFamily("swarmnode_link_round_trip_seconds", "A lane's round trip.", labels=where)
    held = GaugeMetricFamily("swarmnode_stage_vram_bytes", "What a stage holds of its card.", labels=where[:2])
    sent = CounterMetricFamily("swarmnode_lane_bytes", "Bytes sent on a lane of the loaded ring.", labels=where)
    for ring in rings:
        for phase, number in Counter(str(stage["phase"]) for stage in ring["stages"]).items():
            stages.add_metric([ring["id"], phase], number)
        for one in ring["stages"]:
            if one.get("vram_bytes") is not None:
                held.add_metric([ring["id"], str(one["stage"])], one["vram_bytes"])
        links = [(str(stage["stage"]), link) for stage in ring["stages"] for link in stage.get("links") or ()]
        for route, number in Counter(link["route"] or "down" for _, link in links).items():
            lanes.add_metric([ring["id"], route], number)
        for stage, link in links:
            sent.add_metric([ring["id"], stage, link["lane"]], link.get("bytes") or 0)
            if link.get("round_trip_ms") is not None:
                trip.add_metric([ring["id"], stage, link["lane"]], link["round_trip_ms"] / 1e3)
    yield from (stages, lanes, trip, sent, held)


def _restoring_metrics(models: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    """Of models that are loaded, or that were lost."""
    again = [(model["id"], model.get("restoring")) for model in models]
    restoring = ((model, float(status is not None)) for model, status in again)
    yield _gauge("model_restoring", "1 while a model that was lost is loaded again, or waits for it.", restoring)
    failures = ((model, float((status or {}).get("failures") or 0)) for model, status in again)
    yield _gauge("model_restoring_failures", "How often in a row loading it again has failed.", failures)


def _node_metrics(nodes: Mapping[str, Any]) -> Iterator[Metric]:
    peers = GaugeMetricFamily("swarmnode_peers", "Peers by state; those awaited are not connected.", labels=["state"])
    for state, number in Counter(str(peer.get("state")) for peer in nodes.get("peers") or ()).items():
        peers.add_metric([state], number)
    yield peers
    links = GaugeMetricFamily("swarmnode_links", "Peers by the way they reach the coordinator.", labels=["route"])
    routes = (str(peer["route"]) for peer in nodes.get("peers") or () if peer.get("route"))
    for route, number in Counter(routes).items():
        links.add_metric([route], number)
    yield links
    for name, key, unit, text in _OF_PEERS:
        family = GaugeMetricFamily(f"swarmnode_{name}", text, labels=["peer"])
        for peer in nodes.get("peers") or ():
            if peer.get(key) is not None:
                family.add_metric([str(peer.get("name"))], peer[key] / unit)
        yield family
    voters = GaugeMetricFamily("swarmnode_voters", "Nodes that decide who coordinates.")
    voters.add_metric([], len(nodes.get("voters") or ()))
    yield voters
    term = GaugeMetricFamily("swarmnode_election_term", "Of this coordinator; it grows with every election.")
    term.add_metric([], nodes.get("term") or 0)
    yield term
    lost = CounterMetricFamily("swarmnode_stage_failover", "Rings that served, lost a stage and are loaded again.")
    lost.add_metric([], (nodes.get("event_counts") or {}).get("ring_restoring") or 0)
    yield lost
    tunnels = GaugeMetricFamily("swarmnode_relay_tunnels", "Tunnels through the coordinator's relay.")
    tunnels.add_metric([], (nodes.get("carried") or {}).get("tunnels") or 0)
    yield tunnels
    names = {peer.get("node"): str(peer.get("name")) for peer in nodes.get("peers") or ()}
    traffic = CounterMetricFamily(
        "swarmnode_link_bytes", "Bytes between the coordinator and a peer.", labels=["peer", "kind", "direction"]
    )
    for (peer, kind, direction), number in _by_peer(nodes.get("traffic") or (), names).items():
        traffic.add_metric([peer, kind, direction], number)
    yield traffic


def _by_peer(traffic: Iterable[Mapping[str, Any]], names: Mapping[Any, str]) -> Counter[tuple[str, str, str]]:
    """What belongs to no ring: a ring's own counts end with it, and a counter must not fall."""
    found: Counter[tuple[str, str, str]] = Counter()
    for route in traffic:
        peer = names.get(route["peer"])
        if peer is not None and not route["ring"]:
            found[peer, route["kind"], "in"] += route["bytes_in"]
            found[peer, route["kind"], "out"] += route["bytes_out"]
    return found


def _counter(name: str, text: str, values: Iterable[tuple[str, float]]) -> Metric:
    family = CounterMetricFamily(f"swarmnode_{name}", text, labels=["model_name"])
    for model, value in values:
        family.add_metric([model], value)
    return family


def _gauge(name: str, text: str, values: Iterable[tuple[str, float]]) -> Metric:
    family = GaugeMetricFamily(f"swarmnode_{name}", text, labels=["model_name"])
    for model, value in values:
        family.add_metric([model], value)
    return family


def _share(part: float | None, whole: float | None) -> float:
    return (part or 0) / whole if whole else 0.0


def _coverage(ring: Mapping[str, Any]) -> float:
    spans = [(stage["layers"][1] - stage["layers"][0] + 1, stage["phase"] == "ready") for stage in ring["stages"]]
    return _share(sum(layers for layers, ready in spans if ready), sum(layers for layers, _ in spans))
