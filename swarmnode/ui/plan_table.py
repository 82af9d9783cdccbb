"""`model-load --plan` on the terminal: what each stage would take, part by part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from swarmnode.ui import quantities
from swarmnode.ui.fitted_table import FittedTable
from swarmnode.ui.tables import literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PARTS = ("embedding_bytes", "layer_bytes", "head_bytes", "kv_bytes", "state_bytes", "worker_bytes", "workspace_bytes")

MOST_SHOWN = 8
"""Peers that got no stage; a swarm may have hundreds."""


def plan_view(plan: Mapping[str, Any]) -> RenderableType:
    """A head line, and a row for every stage; nothing of it is loaded."""
    method = "" if plan.get("quantization") in (None, "none") else str(plan["quantization"])
    pace = plan.get("predicted")
    facts = quantities.listed(
        [
            str(plan.get("dtype") or ""),
            method,
            f"context {quantities.count(plan.get('context_tokens'))}",
            f"KV for {quantities.count(plan.get('kv_tokens'))} tokens",
            f"{quantities.count(plan.get('max_in_flight'))} in flight",
            f"about {quantities.measured(pace['round_ms'], 'ms')} a token" if pace else "",
        ]
    )
    head = Text(str(plan.get("id", "-")), style="bold")
    head.append(f" planned, nothing is loaded  {facts}", style="not bold")
    parts: list[RenderableType] = [head, _stages(plan)]
    parts += left_out_lines(plan.get("left_out") or [])
    if plan.get("evicts"):
        parts.append(Text("it would take the place of ").append_text(literal(", ".join(map(str, plan["evicts"])))))
    if plan.get("notice"):
        parts.append(Text(str(plan["notice"]), style="yellow"))
    return Group(*parts)


def left_out_lines(left_out: Sequence[Mapping[str, str]]) -> list[Text]:
    """Why each other peer got no stage, what says the most first."""
    lines = [Text("without ").append_text(literal(f"{left['peer']}: {left['why']}")) for left in left_out[:MOST_SHOWN]]
    more = len(left_out) - len(lines)
    return lines + ([Text(f"without {more} more; --json lists them")] if more else [])


def _stages(plan: Mapping[str, Any]) -> FittedTable:
    table = FittedTable(
        ">STAGE", "PEER", "LAYERS", ">NEEDS", ">OFFERED", ">EMBEDDING?", ">BLOCKS?", ">HEAD?", ">KV?", ">STATES?",
        ">WORKER?", ">WORKSPACE?", ">HEADROOM?",
    )  # fmt: skip
    for stage in plan.get("stages") or []:
        table.add_row(
            quantities.count(stage.get("stage")),
            literal(stage.get("peer") or stage.get("node")),
            quantities.layers(stage.get("layers")),
            quantities.size(stage.get("need_bytes")),
            quantities.size(stage.get("offered_bytes")),
            *(quantities.size(stage.get(part)) for part in PARTS),
            quantities.size(stage.get("headroom_bytes")),
        )
    return table
