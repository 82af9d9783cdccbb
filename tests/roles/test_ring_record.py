"""A ring's record comes back as it was, through JSON; anything else is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_specs import LOAD

from swarmnode.cluster.placement import PeerResources, Plan, StagePlan
from swarmnode.cluster.pricing import StageBytes
from swarmnode.roles.planning import PlannedRing
from swarmnode.roles.ring_record import from_record, to_record

PRICE = StageBytes(embed=1, layers=2, head=3, kv_token=4, states=5, worker=6, workspace=7)


def planned() -> PlannedRing:
    stages = tuple(
        StagePlan(PeerResources(node, f"peer-{node}", 1 << 30), 10 * index, 10 * index + 10, PRICE)
        for index, node in enumerate(LOAD.nodes)
    )
    specs = tuple(_spec(index) for index in range(len(LOAD.nodes)))
    return PlannedRing(Plan(stages, 4096, 65_536, 8), specs, "bfloat16", "int8", "int8", "a notice")


def _spec(stage: int) -> Any:
    return type(LOAD).read({**LOAD.header(), "stage": stage}, LOAD.body())


def test_a_ring_comes_back_from_json_as_it_was() -> None:
    assert from_record(json.loads(json.dumps(to_record(planned())))) == planned()


@pytest.mark.parametrize("path", [("stages",), ("kv_tokens",), ("stages", 0, "spec"), ("stages", 1, "price")])
def test_what_is_missing_is_refused(path: tuple[Any, ...]) -> None:
    record: Any = json.loads(json.dumps(to_record(planned())))
    place = record
    for step in path[:-1]:
        place = place[step]
    del place[path[-1]]
    with pytest.raises(ValueError, match="does not fit"):
        from_record(record)


def test_a_ring_without_all_its_stages_is_refused() -> None:
    record = to_record(planned())
    del record["stages"][1]
    with pytest.raises(ValueError, match="one stage a node"):
        from_record(record)
