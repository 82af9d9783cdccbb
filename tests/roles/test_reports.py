"""Reports of peers are checked as they enter: what does not fit is named, and nothing of it is kept."""

from __future__ import annotations

import math
from typing import Any

import pytest

from swarmnode.cluster.member_table import MAX_MEMBERS, Heading, Row, Update
from swarmnode.cluster.membership import NodeState
from swarmnode.errors import ProtocolError
from swarmnode.ids import NodeId
from swarmnode.roles.member_codec import members_frame, read_members
from swarmnode.roles.reports import MAX_REPORT_BYTES, Beat, ReadyStage, read_gauges, read_report
from swarmnode.wire.bodies import pack_body
from swarmnode.wire.frames import Frame

STAGE = {"ring": "r", "model": "m", "stage": 0, "phase": "ready", "pid": 7, "gauges": {"sessions": 1}}
ACTIVITY = {"requests": 3, "running": 1, "tokens_per_s": 4.5, "last_ttft_s": None, "idle_s": 0.0}
BEAT = {"memory_bytes": 1 << 30, "device": "cpu", "threads": 2, "stages": [STAGE]}
READY = {"address": "127.0.0.1:7000", "kv_tokens": 4096, "pid": 7}


def frame(kind: str, body: dict[str, Any]) -> Frame:
    return Frame(kind, {}, pack_body(body))


def test_a_beat_is_read_and_unknown_keys_are_left_out() -> None:
    beat = read_report(Beat, frame("beat", {**BEAT, "later": 1}))
    assert beat.memory_bytes == 1 << 30
    assert beat.stages[0].gauges == {"sessions": 1}
    assert not hasattr(beat, "later")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"memory_bytes": "6G"}, "memory_bytes"),
        ({"memory_bytes": -1}, "memory_bytes"),
        ({"memory_bytes": 1.5}, "memory_bytes"),
        ({"memory_bytes": 1 << 60}, "memory_bytes"),
        ({"device": b"cpu"}, "device"),
        ({"device": "x" * 200}, "device"),
        ({"stages": [STAGE] * 65}, "stages"),
        ({"stages": [{**STAGE, "gauges": {"kv": math.nan}}]}, "gauges"),
        ({"stages": [{**STAGE, "pid": "7"}]}, "pid"),
        ({"stages": [{**STAGE, "activity": {**ACTIVITY, "idle_s": math.inf}}]}, "idle_s"),
        ({"stages": [{**STAGE, "activity": {**ACTIVITY, "tokens_per_s": -1.0}}]}, "tokens_per_s"),
        ({"health": 8}, "health"),
        ({"health": -1}, "health"),
    ],
)
def test_a_beat_that_does_not_fit_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ProtocolError, match=named):
        read_report(Beat, frame("beat", BEAT | change))


def test_gauges_are_whole_numbers() -> None:
    assert read_gauges(frame("gauges", {"kv_tokens": 3})) == {"kv_tokens": 3}
    for wrong in (b"bytes", 0.5, None, [1], -1):
        with pytest.raises(ProtocolError, match="kv_tokens"):
            read_gauges(frame("gauges", {"kv_tokens": wrong}))


def test_a_ready_stage_names_its_address() -> None:
    assert read_report(ReadyStage, frame("stage_ready", READY)).address == "127.0.0.1:7000"
    with pytest.raises(ProtocolError, match="address"):
        read_report(ReadyStage, frame("stage_ready", {**READY, "address": None}))


COSTS = {"group_ms": {"1": 12.5, "8": 40.0}, "piece_ms": {"256": 900.0}}


def test_a_ready_stage_may_say_what_it_measured() -> None:
    said = {**READY, "device": "cuda:0", "threads": 0, "kernels": "torchao", "costs": COSTS, "kv_tokens_planned": 8192}
    report = read_report(ReadyStage, frame("stage_ready", said))
    assert (report.device, report.threads, report.kernels) == ("cuda:0", 0, "torchao")
    assert report.costs is not None
    assert report.costs.model_dump() == COSTS
    assert read_report(ReadyStage, frame("stage_ready", {**READY, "costs": None})).costs is None


@pytest.mark.parametrize(
    "costs",
    [
        {"group_ms": {}},
        {"group_ms": {"0": 1.0}, "piece_ms": {}},
        {"group_ms": {"one": 1.0}, "piece_ms": {}},
        {"group_ms": {"1": -1.0}, "piece_ms": {}},
        {"group_ms": {"1": math.inf}, "piece_ms": {}},
        {"group_ms": {str(n): 1.0 for n in range(1, 18)}, "piece_ms": {}},
    ],
)
def test_step_costs_that_cannot_be_are_refused(costs: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="costs"):
        read_report(ReadyStage, frame("stage_ready", {**READY, "costs": costs}))


def test_a_huge_report_is_not_walked() -> None:
    with pytest.raises(ProtocolError, match=str(MAX_REPORT_BYTES)):
        read_report(Beat, Frame("beat", {}, b"\x80" * (MAX_REPORT_BYTES + 1)))


def test_a_table_of_members_comes_through_as_it_is() -> None:
    rows = tuple(Row(NodeId(f"{n:064x}"), f"m{n}", "192.0.2.1:7700", NodeState.DEAD) for n in range(MAX_MEMBERS))
    update = Update((3, 9), 0, Heading("desk", ("desk", "pc-1"), True), rows, (NodeId("gone"),))
    assert read_members(members_frame(update)) == update


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rows": [{"node": "n", "name": "n", "address": "", "state": "asleep"}]}, "state"),
        ({"rows": [{"node": "n", "name": "n", "address": "x" * 200, "state": "dead"}]}, "address"),
        ({"rows": [{"node": "n", "name": "n", "address": "", "state": "dead"}] * (MAX_MEMBERS + 1)}, "rows"),
        ({"gone": ["n"] * (MAX_MEMBERS + 1)}, "gone"),
        ({"voters": ["v"] * 100}, "voters"),
        ({"coordinator": None}, "coordinator"),
    ],
)
def test_a_table_that_does_not_fit_is_named(change: dict[str, Any], named: str) -> None:
    body = {"coordinator": "desk", "voters": [], "open": False, "rows": [], "gone": []} | change
    with pytest.raises(ProtocolError, match=named):
        read_members(Frame("members", {"mark": [1, 1], "since": 0}, pack_body(body)))
