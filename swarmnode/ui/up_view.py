"""The few lines that `up` keeps at the bottom of a terminal: where this node listens, who is there, what is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from swarmnode.ui import quantities
from swarmnode.ui.tables import STATE_STYLES, literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

RING_EVENTS = {
    "ring_loading": "loading",
    "ring_ready": "ready",
    "ring_idle": "unloading",
    "ring_evicted": "unloading",
    "ring_restoring": "restoring",
    "ring_waits": "restoring",
}


class UpView:
    """`apply` every event of the node; it is something rich can print at any time."""

    def __init__(self) -> None:
        self._ready: Mapping[str, object] | None = None
        self._coordinates = False
        self._coordinator = Text("connecting to the coordinator", style="yellow")
        self._peers: dict[str, str] = {}
        self._models: dict[str, str] = {}

    def apply(self, event: str, values: Mapping[str, object]) -> None:
        match event:
            case "ready":
                self._ready, self._coordinates = values, bool(values.get("coordinates")) or self._coordinates
            case "coordinating":
                self._coordinates = True
            case "resigned":
                self._coordinates, self._models = False, {}
                self._coordinator = Text("waiting for the voters to elect who coordinates", style="yellow")
            case "following":
                self._coordinator = Text.assemble("following ", literal(values.get("name")), ", which coordinates")
            case "joined":
                self._coordinator = Text.assemble("connected to ", literal(values.get("coordinator")), style="green")
            case "coordinator_lost":
                self._coordinator = Text("not connected to the coordinator; trying again", style="red")
            case "peer_joined":
                self._peers[str(values.get("node"))] = str(values.get("name"))
            case "peer_left":
                self._peers.pop(str(values.get("node")), None)
            case "ring_over" | "ring_let_go":
                self._models.pop(str(values.get("model")), None)
            case _ if event in RING_EVENTS:
                self._models[str(values.get("model"))] = RING_EVENTS[event]

    def __rich__(self) -> RenderableType:
        if self._ready is None:
            return Text("starting", style="yellow", no_wrap=True)
        lines = [self._where(self._ready)]
        if self._coordinates:
            lines += [self._who(), self._what()]
        else:
            lines.append(self._coordinator)
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        return Group(*lines)

    def _where(self, ready: Mapping[str, object]) -> Text:
        line = Text("", style="bold").append_text(literal(ready.get("name")))
        line.append(f"  swarm port {ready.get('swarm')}", style="not bold")
        return line.append(f"  API {ready['api']}/v1", style="not bold") if ready.get("api") else line

    def _who(self) -> Text:
        names = ", ".join(sorted(self._peers.values()))
        if not names:
            return Text("no peers yet")
        return Text(f"{quantities.plural(len(self._peers), 'peer')}: ").append_text(literal(names))

    def _what(self) -> Text:
        if not self._models:
            return Text("no model is loaded")
        line = Text("models:")
        for number, (model, state) in enumerate(sorted(self._models.items())):
            line.append(", " if number else " ").append_text(literal(model))
            line.append(f" {state}", style=STATE_STYLES.get(state, ""))
        return line
