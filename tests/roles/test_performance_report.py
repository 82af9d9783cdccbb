"""A model's last fifteen minutes beside its stages: whose compute and which links a token's time went to."""

from __future__ import annotations

from typing import Any

from swarmnode.cluster.performance import Performance
from swarmnode.ids import ModelId, RequestId
from swarmnode.roles.performance_report import performance_report

MODEL = ModelId("m")
LINK = {"lane": "act", "route": "relayed", "round_trip_ms": 31.0, "bytes": 9}
STATUS = {
    "id": "m",
    "state": "ready",
    "stages": [
        {"stage": 0, "peer": "den", "node": "n1", "device": "cpu", "threads": 2, "layers": [0, 14], "links": [LINK]},
        {"stage": 1, "peer": "attic", "node": "n2", "device": "cuda:0", "layers": [15, 29], "phase": "ready"},
        {"stage": 2, "peer": "loft", "node": "n3"},
    ],
}


def window(timing: dict[str, float]) -> dict[str, Any]:
    performance, request = Performance(), RequestId("r")
    performance.opened(request, MODEL, 0.0)
    performance.accepted(request, 5, 0.0)
    performance.gave(request, 4, 1.0)
    performance.finished(request, "stop", 0, timing, 2.0)
    return performance.window(MODEL, 3.0)


def test_a_stages_share_is_of_all_stages_and_their_links() -> None:
    timing = {"stage0_ms": 30.0, "stage1_ms": 10.0, "link_ms": 60.0, "queue_ms": 500.0, "prefill_ms": 900.0}
    report = performance_report(STATUS, window(timing))
    assert (report["id"], report["state"], report["requests"], report["generated_tokens"]) == ("m", "ready", 1, 4)
    assert report["time_ms"] == timing, "of these a token's own are the stages' and the links'"
    assert report["link"] == {"ms": 60.0, "share": 0.6}
    den = {"stage": 0, "peer": "den", "node": "n1", "device": "cpu", "threads": 2, "layers": [0, 14]}
    attic = {"stage": 1, "peer": "attic", "node": "n2", "device": "cuda:0", "threads": None, "layers": [15, 29]}
    loft = {"stage": 2, "peer": "loft", "node": "n3", "device": None, "threads": None, "layers": None}
    assert report["stages"] == [
        {**den, "compute_ms": 30.0, "share": 0.3, "links": [LINK]},
        {**attic, "compute_ms": 10.0, "share": 0.1, "links": []},
        {**loft, "compute_ms": None, "share": None, "links": []},
    ]


def test_without_replies_nothing_is_known_and_nothing_divided_by() -> None:
    report = performance_report(STATUS, Performance().window(MODEL, 3.0))
    assert report["link"] == {"ms": None, "share": None}
    assert [(stage["compute_ms"], stage["share"]) for stage in report["stages"]] == [(None, None)] * 3
    still = performance_report(STATUS, window({"stage0_ms": 0.0, "link_ms": 0.0}))
    assert (still["stages"][0]["share"], still["link"]) == (None, {"ms": 0.0, "share": None})
