"""A node's events as sentences: what `up` prints and `top` lists."""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarmnode.errors import NodeRemoved
from swarmnode.ui.plain_text import plain
from swarmnode.ui.quantities import plural, size

if TYPE_CHECKING:
    from collections.abc import Mapping


def sentence(event: str, values: Mapping[str, object]) -> str:
    """One event for people; one that this version does not know is shown with all its values.

    Names and reasons may come from other machines, so nothing in them reaches a terminal but letters.
    """
    values = {key: plain(value) if isinstance(value, str) else value for key, value in values.items()}
    match event:
        case "ready":
            return _ready(values)
        case "warning":
            return f"warning: {values['text']}"
        case "enrolled":
            return "this machine is a member of the swarm now; later starts need no token"
        case "joined":
            return f"joined the coordinator at {values['coordinator']}"
        case "coordinator_lost":
            return f"not connected to the coordinator: {values['reason']}; trying again"
        case "removed":
            return f"this machine was removed from the swarm; {NodeRemoved.mend}"
        case "peer_joined":
            return f"{values['name']} joined"
        case "copy_refused":
            return (
                f"another machine came with the identity of {values['name']} and was sent away; was that node's data "
                "directory copied?"
            )
        case "peer_left":
            return f"{values['name']} left"
        case "ring_loading":
            over = plural(int(str(values["stages"])), "stage")
            return f"{values['model']} is being loaded over {over}{_without(values.get('left_out'))}"
        case "ring_ready":
            return f"{values['model']} is ready"
        case "ring_idle":
            return f"{values['model']} was idle for {values['idle_s']:g} s and is being unloaded"
        case "ring_evicted":
            return f"{values['model']} is being unloaded to make room for {values['for']}"
        case "straggler":
            return f"{values['name']} is {values['times']} times as slow as the others: loads will avoid it"
        case "straggler_recovered":
            return f"{values['name']} is about as fast as the others again"
        case "fetched":
            return f"{values['model']}: fetched for stage {values['stage']}: {_sources(values['bytes'])}"
        case "ring_over":
            why = f": {values['error']}" if values.get("error") else ""
            return f"{values['model']} is no longer loaded{why}"
        case "ring_restoring":
            return f"{values['model']} is being loaded again: {values['why']}"
        case "ring_waits":
            return f"{values['model']} waits to be loaded again: {values['waits_for']}"
        case "ring_peers_dropped":
            return f"{values['model']}: {values['name']}, which it was to run on, was removed; any peers will do now"
        case "ring_let_go":
            return f"{values['model']} is not to be loaded again any more"
        case "coordinating":
            return f"this node coordinates the swarm now (term {values['term']})"
        case "resigned":
            return "this node does not coordinate the swarm any more"
        case "following":
            return f"{values['name']} coordinates the swarm now, and this node follows it"
        case "seated":
            return f"{values['name']} may coordinate the swarm when it is needed"
        case "seat_refused":
            return f"{values['name']} may not coordinate the swarm: {values['why']}"
        case "voters_changed":
            return f"who coordinates is decided by {_names(values['voters'])}"
        case _:
            return f"{event} " + ", ".join(f"{key}={value}" for key, value in values.items())


def _without(left_out: object) -> str:
    """Peers that got no stage, and why; names and reasons are others' words."""
    whys = left_out.items() if isinstance(left_out, dict) else ()
    return "".join(f"; without {plain(str(name))}: {plain(str(why))}" for name, why in whys)


def _names(voters: object) -> str:
    names = [plain(str(name)) for name in voters] if isinstance(voters, list) else []
    return ", ".join(names) + (" alone" if len(names) == 1 else "")


def _sources(came: object) -> str:
    """How much came from whom; the names are other machines' own."""
    parts = came.items() if isinstance(came, dict) else ()
    return ", ".join(f"{size(n_bytes)} from {plain(str(source))}" for source, n_bytes in parts)


def _ready(values: Mapping[str, object]) -> str:
    lines = [f"{values['name']} is up; swarm port {values['swarm']}"]
    if values.get("api"):
        lines.append(f"OpenAI endpoint {values['api']}/v1")
    if values.get("coordinates"):
        lines.append("add a peer: `swarmnode join-token` here, then `swarmnode up --role peer --join TOKEN` there")
    return "\n".join(lines)
