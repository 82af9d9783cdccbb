"""Tables of the CLI as pure functions: the API's JSON in, something rich can print out.

Every text from the API is shown literally (no markup), and what an older or newer coordinator leaves out is a dash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from swarmnode.ui import quantities
from swarmnode.ui.fitted_table import FittedTable
from swarmnode.ui.sentences import sentence

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

STATE_STYLES = {
    "ready": "green",
    "alive": "green",
    "available": "",
    "loading": "yellow",
    "unloading": "yellow",
    "relinking": "yellow",
    "restoring": "yellow",
    "suspect": "yellow",
    "away": "yellow",
    "awaited": "yellow",
    "left": "yellow",
    "lost": "red",
    "failed": "red",
    "dead": "red",
}
NO_MODELS = "no models yet; import one with `swarmnode model-import SOURCE`"
NO_RINGS = "no model is loaded; load one with `swarmnode model-load ID`"


def models_table(answer: Mapping[str, Any]) -> RenderableType:
    """`GET /api/v1/models`."""
    models = answer.get("models") or []
    if not models:
        return Text(NO_MODELS)
    table = FittedTable("MODEL", "STATE", "PARAMETERS", ">SIZE", "DTYPE?", ">CONTEXT?", ">LAYERS?", ">SHARDS?")
    for model in sorted(models, key=lambda model: str(model.get("id"))):
        table.add_row(
            literal(model.get("id")),
            state_text(model.get("state")),
            quantities.parameters(model.get("parameters")),
            quantities.size(model.get("size_bytes")),
            literal(model.get("dtype")),
            quantities.count(model.get("context_tokens")),
            quantities.count(model.get("layers")),
            quantities.count(model.get("num_stages")),
        )
    return table


def ps_view(answer: Mapping[str, Any]) -> RenderableType:
    """`GET /api/v1/nodes`: the nodes, then every ring with its stages, or why it is gone."""
    rings = [*(answer.get("rings") or []), *(answer.get("lost") or [])]
    absent = absence(answer)
    parts: list[RenderableType] = [*([Text(absent, style="yellow"), Text()] if absent else []), _nodes_table(answer)]
    voters = answer.get("voters") or []
    if len(voters) > 1:
        parts += [Text(), Text(sentence("voters_changed", {"voters": voters}))]
    for ring in rings:
        parts += [Text(), status_view(ring)]
    if not rings and not absent:
        parts += [Text(), Text(NO_RINGS)]
    return Group(*parts)


def absence(answer: Mapping[str, Any]) -> str:
    """What a node says that is without a coordinator, and shows what it knew last; empty with one."""
    if answer.get("age_s") is None:
        return ""
    by = literal(answer.get("last_coordinator") or "the last one").plain
    told = f"its members as {by} told them {answer['age_s']:.0f} s ago"
    return f"this node is without a coordinator; {told}"


def node_state(node: Mapping[str, Any]) -> Text:
    """With what there is to say against it: slower steps than others, a loop that runs late (1 to 7)."""
    text = state_text(node.get("state"))
    text.append(" slow" if node.get("straggles") else "", style="yellow")
    return text.append(f" late {node['health']}" if node.get("health") else "", style="yellow")


def status_view(status: Mapping[str, Any]) -> RenderableType:
    """`GET /api/v1/models/{id}/status`, or one ring of `ps`: a head line, the stages, which layers are missing."""
    parts: list[RenderableType] = [_headline(status)]
    stages = status.get("stages") or []
    if stages:
        parts.append(_stages_table(stages))
        if status.get("state") != "ready":
            parts.append(_coverage(stages))
        if any(stage.get("links") for stage in stages):
            parts.append(_links_table(stages))
    if status.get("notice"):
        parts.append(Text(str(status["notice"]), style="yellow"))
    error = status.get("error")
    if error:
        parts.append(Text(f"{error.get('code')}: {error.get('message')}", style="red"))
    if status.get("restoring"):
        parts.append(literal(restoring_text(status["restoring"]), style="yellow"))
    return Group(*parts)


def restoring_text(restoring: Mapping[str, Any]) -> str:
    """How far a lost model is from being loaded again."""
    next_try_s = restoring.get("next_try_s")
    failed = restoring.get("failures")
    return quantities.listed(
        [
            f"lost: stage {restoring['stage']}" if restoring.get("stage") is not None else "",
            f"waits for: {restoring['waits_for']}" if restoring.get("waits_for") else "is being loaded again",
            f"next try in {next_try_s:.0f} s" if next_try_s is not None else "",
            f"{quantities.plural(failed, 'try', 'tries')} failed" if failed else "",
        ]
    )


def _nodes_table(answer: Mapping[str, Any]) -> FittedTable:
    coordinator = answer.get("coordinator")
    peers = answer.get("peers") or []
    card = [">VRAM FREE?"] if any(peer.get("vram_bytes") is not None for peer in peers) else []
    table = FittedTable(
        "NODE", "STATE", "ROLES", ">MEMORY", ">STAGES", "ADDRESS?", "DEVICE?", ">SILENT?", ">THREADS?", "ROUTE?", *card
    )
    alone = coordinator and all(peer.get("node") != coordinator.get("node") for peer in peers)
    for node in [*([coordinator] if alone else []), *peers, *_other_voters(answer)]:
        stages = node.get("stages")
        silence_s = node.get("silence_s")
        table.add_row(
            literal(node.get("name") or node.get("node")),
            node_state(node),
            literal(_roles(node, answer)),
            quantities.size(node.get("memory_bytes")),
            "-" if stages is None else str(len(stages)),
            literal(node.get("address")),
            literal(node.get("device")),
            "-" if silence_s is None else f"{silence_s:.1f} s",
            "auto" if node.get("threads") == 0 else quantities.count(node.get("threads")),
            literal(node.get("route")),
            *([_card(node)] if card else []),
        )
    return table


def _card(node: Mapping[str, Any]) -> str:
    """What is free of its card's memory."""
    total, free = quantities.size(node.get("vram_bytes")), quantities.size(node.get("vram_free_bytes"))
    return "-" if node.get("vram_bytes") is None else f"{free} of {total}"


def _roles(node: Mapping[str, Any], answer: Mapping[str, Any]) -> str | None:
    """What a node was started as, and whether it coordinates where another one could."""
    coordinator, roles = answer.get("coordinator") or {}, list(map(str, node.get("roles") or []))
    several = len(answer.get("voters") or []) > 1 or "coordinator" not in roles
    if several and coordinator and node.get("node") == coordinator.get("node"):
        roles.append("coordinates")
    return "+".join(roles) or None


def _other_voters(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Voters that are no peers: all that is known of them is whether their link is up."""
    there = {peer.get("node") for peer in answer.get("peers") or []}
    others = [link for link in answer.get("voter_links") or [] if link.get("node") not in there]
    return [{**link, "state": "alive" if link.get("up") else "away", "roles": ["voter"]} for link in others]


def _headline(status: Mapping[str, Any]) -> Text:
    line = Text(str(status.get("id", "-")), style="bold")
    line.append(" ")
    line.append_text(state_text(status.get("state")))
    facts = quantities.listed(
        [
            str(status.get("dtype") or ""),
            "" if status.get("quantization") in (None, "none") else str(status["quantization"]),
            quantities.plural(status["requests"], "request") if "requests" in status else "",
            f"{status['running']} running, {status['waiting']} waiting" if {"running", "waiting"} <= {*status} else "",
            f"{status['paused']} paused" if status.get("paused") else "",
            _kv(status),
            f"context {quantities.count(status['context_tokens'])}" if status.get("context_tokens") else "",
        ]
    )
    return line.append(f"  {facts}" if facts else "", style="not bold")


def _kv(status: Mapping[str, Any]) -> str:
    """Tokens reserved by conversations that run, of the measured budget; what was planned where that is more; and
    what conversations that are over still hold."""
    budget, planned = status.get("kv_tokens"), status.get("kv_tokens_planned")
    if budget is None:
        return ""
    text = f"KV {quantities.count(status.get('kv_reserved_tokens') or 0)} of {quantities.count(budget)} tokens reserved"
    if planned and planned > budget:
        text += f" ({quantities.count(planned)} planned)"
    if status.get("parked"):
        kept = quantities.count(status.get("kv_parked_tokens") or 0)
        text += f", {kept} parked in {quantities.plural(status['parked'], 'conversation')}"
    return text


def _stages_table(stages: Sequence[Mapping[str, Any]]) -> FittedTable:
    columns = [
        ">STAGE",
        "PEER",
        "LAYERS",
        "PHASE",
        ">SESSIONS",
        ">WEIGHTS?",
        ">KV TOKENS?",
        ">KV?",
        "DEVICE?",
        ">THREADS?",
    ]
    kernels = ["KERNELS?"] if any(stage.get("kernels") for stage in stages) else []
    table = FittedTable(*columns, *kernels)
    for stage in stages:
        table.add_row(
            quantities.count(stage.get("stage")),
            literal(stage.get("peer") or stage.get("node")),
            quantities.layers(stage.get("layers")),
            stage_phase(stage),
            quantities.count(stage.get("sessions")),
            quantities.size(stage.get("weight_bytes")),
            quantities.count(stage.get("kv_tokens")),
            quantities.size(stage.get("kv_bytes")),
            literal(stage.get("device")),
            quantities.count(stage.get("threads")),
            *([literal(stage.get("kernels"))] if kernels else []),
        )
    return table


def _links_table(stages: Sequence[Mapping[str, Any]]) -> FittedTable:
    """What each stage sends on: how it travels, what was measured, what it carried, and of that through the relay (both
    ways, as ciphertext)."""
    table = FittedTable(
        ">STAGE",
        "LANE",
        "ROUTE",
        ">ROUND TRIP",
        ">BANDWIDTH",
        ">FRAMES?",
        ">SENT?",
        "ZSTD?",
        ">RELAYED?",
        ">IN FRAMES?",
    )
    for stage in stages:
        for link in stage.get("links") or []:
            table.add_row(
                quantities.count(stage.get("stage")),
                literal(link.get("lane")),
                literal(link.get("route") or None),
                quantities.measured(link.get("round_trip_ms"), "ms"),
                quantities.measured(link.get("mbit_per_s"), "Mbit/s"),
                quantities.count(link.get("frames")),
                quantities.size(link.get("bytes")),
                "yes" if link.get("compressed") else "no",
                quantities.size(link.get("relayed_bytes")),
                quantities.count(link.get("relayed_frames")),
            )
    return table


def stage_phase(stage: Mapping[str, Any]) -> Text:
    """With how far it is, while it loads."""
    phase, done, total = stage.get("phase"), stage.get("done") or 0, stage.get("total") or 0
    text = state_text(phase)
    if phase != "ready" and total:
        text.append(f" {100 * min(done, total) // total}%")
    return text


def _coverage(stages: Sequence[Mapping[str, Any]]) -> Text:
    """One mark a layer: why a model that is not whole cannot answer."""
    line = Text("layers ")
    for stage in stages:
        first, last = (stage.get("layers") or [0, -1])[:2]
        ready = stage.get("phase") == "ready"
        line.append(("#" if ready else ".") * (last - first + 1), style="green" if ready else "red")
    return line


def state_text(state: object) -> Text:
    """A state in its colour."""
    return Text("-" if state is None else str(state), style=STATE_STYLES.get(str(state), ""))


def literal(value: object, style: str = "") -> Text:
    """Literal: a node may call itself `[red]`, and control characters must not reach the terminal."""
    shown = "-" if value is None else str(value)
    return Text("".join(char if char.isprintable() else "?" for char in shown), style=style)
