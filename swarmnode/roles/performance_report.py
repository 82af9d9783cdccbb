"""`GET /api/v1/models/{id}/performance`: a model's last fifteen minutes beside the stages and links that gave them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swarmnode.cluster.performance import LINK_TIME, stage_timed

if TYPE_CHECKING:
    from collections.abc import Mapping


def performance_report(status: Mapping[str, Any], window: Mapping[str, Any]) -> dict[str, Any]:
    """From the model's status and its counts. `share` is a stage's part of what a token takes, its links included."""
    times: Mapping[str, float] = window["time_ms"]
    per_token = {key: value for key, value in times.items() if key == LINK_TIME or stage_timed(key) is not None}
    whole = sum(per_token.values())
    stages = [_stage(stage, per_token, whole) for stage in status["stages"]]
    link = {"ms": per_token.get(LINK_TIME), "share": _share(per_token.get(LINK_TIME), whole)}
    return {"id": status["id"], "state": status["state"], **window, "stages": stages, "link": link}


def _stage(stage: Mapping[str, Any], per_token: Mapping[str, float], whole: float) -> dict[str, Any]:
    compute_ms = per_token.get(f"stage{stage['stage']}_ms")
    return {
        **{key: stage.get(key) for key in ("stage", "peer", "node", "device", "threads", "layers")},
        "compute_ms": compute_ms,
        "share": _share(compute_ms, whole),
        "links": stage.get("links") or [],
    }


def _share(part: float | None, whole: float) -> float | None:
    return round(part / whole, 4) if part is not None and whole else None
