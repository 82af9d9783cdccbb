"""A planned ring as JSON: what each stage would take, before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarmnode.cluster.placement import Plan, StagePlan
    from swarmnode.roles.planning import PlannedRing


def plan_report(planned: PlannedRing) -> dict[str, Any]:
    """The answer to a load with `plan`."""
    plan = planned.plan
    return {
        "id": planned.specs[0].model,
        "state": "planned",
        "dtype": planned.dtype,
        "quantization": planned.quantization,
        "notice": planned.notice,
        "context_tokens": plan.context_tokens,
        "kv_tokens": plan.kv_tokens,
        "max_in_flight": planned.specs[0].max_in_flight,
        "predicted": _pace(plan),
        "left_out": left_out_report(plan),
        "stages": [_stage(index, stage, plan.kv_tokens) for index, stage in enumerate(plan.stages)],
    }


def left_out_report(plan: Plan) -> list[dict[str, str]]:
    """Why each other peer got no stage."""
    return [{"node": left.node, "peer": left.name, "reason": left.reason, "why": left.why} for left in plan.left_out]


def _pace(plan: Plan) -> dict[str, Any] | None:
    """What a token takes by what was measured; None where no step was."""
    if plan.pace is None:
        return None
    return {
        "round_ms": round(plan.pace.round_ms, 2),
        "bottleneck_ms": round(plan.pace.bottleneck_ms, 2),
        "stage_ms": [round(ms, 2) for ms in plan.pace.stage_ms],
        "hop_ms": [round(ms, 2) for ms in plan.pace.hop_ms],
    }


def _stage(index: int, stage: StagePlan, kv_tokens: int) -> dict[str, Any]:
    price = stage.price
    need = int(price.need(kv_tokens))
    kv_bytes = kv_tokens * price.kv_token
    return {
        "stage": index,
        "peer": stage.peer.name,
        "node": stage.peer.node,
        "layers": [stage.first_layer, stage.end_layer - 1],
        "weight_bytes": price.weights,
        "embedding_bytes": price.embed,
        "layer_bytes": price.layers,
        "head_bytes": price.head,
        "kv_bytes": kv_bytes,
        "state_bytes": price.states,
        "worker_bytes": price.worker,
        "workspace_bytes": price.workspace,
        "headroom_bytes": need - price.fixed - kv_bytes,
        "need_bytes": need,
        "offered_bytes": stage.peer.memory_bytes,
    }
