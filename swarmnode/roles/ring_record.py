"""A ring as the coordinator's document keeps it: enough to take it over again after a restart, without a load."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from swarmnode.cluster.placement import PeerResources, Plan, StagePlan
from swarmnode.cluster.pricing import StageBytes
from swarmnode.errors import ProtocolError
from swarmnode.ids import NodeId
from swarmnode.roles.load_spec import LoadSpec
from swarmnode.roles.planning import PlannedRing

if TYPE_CHECKING:
    from collections.abc import Mapping

_TEXTS = ("dtype", "quantization", "asked_quantization", "notice")


def to_record(planned: PlannedRing) -> dict[str, Any]:
    """As JSON values."""
    plan = planned.plan
    return {
        "stages": [
            {"spec": {**spec.header(), **spec.body()}, **_stage_record(stage)}
            for spec, stage in zip(planned.specs, plan.stages, strict=True)
        ],
        "context_tokens": plan.context_tokens,
        "kv_tokens": plan.kv_tokens,
        "max_in_flight": plan.max_in_flight,
        **{name: getattr(planned, name) for name in _TEXTS},
    }


def model_of(record: Mapping[str, Any]) -> str | None:
    """The model of a ring that `to_record` wrote; None for another record."""
    stages = record.get("stages")
    return str(stages[0]["spec"].get("model")) if stages else None


def from_record(record: Mapping[str, Any]) -> PlannedRing:
    """Raises ValueError for what `to_record` did not write."""
    try:
        stages = record["stages"]
        specs = tuple(LoadSpec.read(stage["spec"], stage["spec"]) for stage in stages)
        plan = Plan(
            stages=tuple(_stage_plan(stage) for stage in stages),
            context_tokens=int(record["context_tokens"]),
            kv_tokens=int(record["kv_tokens"]),
            max_in_flight=int(record["max_in_flight"]),
        )
        if not specs or any(len(spec.nodes) != len(specs) for spec in specs):
            raise ValueError("a ring has one stage a node")
        return PlannedRing(plan, specs, **{name: str(record[name]) for name in _TEXTS})
    except (KeyError, TypeError, ProtocolError) as error:
        raise ValueError(f"a ring's record does not fit: {error!r:.200}") from error


def _stage_record(stage: StagePlan) -> dict[str, Any]:
    peer = stage.peer
    return {
        "node": peer.node,
        "name": peer.name,
        "memory_bytes": peer.memory_bytes,
        "capabilities": sorted(peer.capabilities),
        "first_layer": stage.first_layer,
        "end_layer": stage.end_layer,
        "price": asdict(stage.price),
    }


def _stage_plan(stage: Mapping[str, Any]) -> StagePlan:
    peer = PeerResources(
        node=NodeId(str(stage["node"])),
        name=str(stage["name"]),
        memory_bytes=int(stage["memory_bytes"]),
        capabilities=frozenset(map(str, stage["capabilities"])),
    )
    price = StageBytes(**{name: int(value) for name, value in stage["price"].items()})
    return StagePlan(peer, int(stage["first_layer"]), int(stage["end_layer"]), price)
