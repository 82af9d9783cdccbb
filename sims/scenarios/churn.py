"""Machines that join, leave, die and return: how soon everybody knows, who is wronged, and what it costs.

Frames are encoded by the wire itself. Not counted: HTTP/2, TLS and TCP around them, and handshakes.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sims.member_frames import Answered, Beat, Sent, Weather
from sims.members import MembersWorld
from sims.report import percentile
from swarmnode.cluster.membership import NodeState, StateChanged
from swarmnode.ids import NodeId
from swarmnode.roles.member_codec import members_frame
from swarmnode.wire.bodies import pack_body
from swarmnode.wire.frames import Frame, encode_bytes

if TYPE_CHECKING:
    from sims.member_hosts import Host
    from swarmnode.cluster.member_table import Mark

JOIN_S = 30.0
"""Within this all have started; what follows is measured."""
UP_S, AWAY_S = 1200.0, 120.0
"""A machine's mean time in the swarm, and out of it: a house where laptops are closed every twenty minutes."""
WEATHER = Weather(loss=0.0, double=0.0, late=0.01, late_s=8.0)
"""TCP loses and doubles nothing; a busy uplink holds one frame in a hundred up, for as long as 8 s."""
LINK = {"lane": "act", "route": "direct", "round_trip_ms": 21.4, "mbit_per_s": 93.1, "compressed": False}
GAUGES = {"sessions": 2, "running": 2, "waiting": 0, "kv_tokens": 1834, "kv_bytes": 105_910_272}
STAGE = {"ring": "smollm2-135m-1f0c2d3e", "model": "smollm2-135m", "stage": 1, "phase": "ready", "pid": 41_233}
BODY = {
    "memory_bytes": 8 << 30,
    "device": "cuda:0",
    "threads": 4,
    "stages": [{**STAGE, "gauges": GAUGES, "links": [{**LINK, "frames": 90_233, "bytes": 123_456_789}] * 2}],
    "models": ["smollm2-135m"],
    "health": 0,
}
"""Of a peer that holds a stage."""


def run(nodes: int = 50, seconds: float = 600.0, seed: int = 0) -> dict[str, Any]:
    """Figures of `seconds` of churn; raises Violation where a promise of membership is broken."""
    churn = _Churn(MembersWorld(nodes, seed, WEATHER))
    churn.run(seconds)
    return {"nodes": nodes, "seconds": seconds, **churn.report(seconds)}


class _Churn:
    def __init__(self, world: MembersWorld) -> None:
        self.world = world
        self.bytes: Counter[str] = Counter()
        self.happened: Counter[str] = Counter()
        self.noticed_s: dict[str, list[float]] = {"killed": [], "without_power": []}
        self.known_s: list[float] = []
        """From the coordinator's belief to the last running member that holds it."""
        self._went: dict[NodeId, tuple[str, float]] = {}
        self._unknown: list[tuple[float, Mark, set[NodeId]]] = []
        """Changes that somebody has not heard of: since when, the mark to reach, and who."""

    def run(self, seconds: float) -> None:
        world = self.world
        for node in world.hosts:
            world.at(world.random.random() * JOIN_S, lambda node=node: world.start(node))  # type: ignore[misc]
        world.run_until(2 * JOIN_S)
        world.on_sent, world.on_change, world.on_table = self._count, self._changed, self._learned
        every_s = (UP_S + AWAY_S) / len(world.hosts)
        at_s = world.now_s
        while (at_s := at_s + world.random.expovariate(1 / every_s)) < 2 * JOIN_S + seconds:
            world.at(at_s, self._somebody_goes)
        world.run_until(2 * JOIN_S + seconds)

    def _somebody_goes(self) -> None:
        world = self.world
        node = world.random.choice(list(world.hosts))
        if not world.hosts[node].running:
            return
        how = world.random.choice(list(self.noticed_s))
        self.happened[how] += 1
        self._went[node] = (how, world.now_s)
        (world.kill if how == "killed" else world.lose_power)(node)
        for _, _, lacking in self._unknown:
            lacking.discard(node)
        world.at(world.now_s + world.random.expovariate(1 / AWAY_S), lambda: self._returns(node))

    def _returns(self, node: NodeId) -> None:
        self.happened["returned"] += 1
        self._went.pop(node, None)
        self.world.start(node)

    def _changed(self, event: StateChanged) -> None:
        world, went = self.world, self._went.get(event.node)
        wronged = world.hosts[event.node].running and event.boot == world.hosts[event.node].boot
        if wronged and event.state is not NodeState.ALIVE:
            self.happened[f"wrongly_{event.state.value}"] += 1
        if event.state is NodeState.DEAD and went is not None:
            self.noticed_s[went[0]].append(world.now_s - went[1])
            del self._went[event.node]
        running = {node for node, host in world.hosts.items() if host.running and host.link}
        self._unknown.append((world.now_s, world.roll.table.mark, running))

    def _learned(self, host: Host) -> None:
        left = []
        for since_s, mark, lacking in self._unknown:
            if host.known.mark >= mark:
                lacking.discard(host.node)
            if lacking:
                left.append((since_s, mark, lacking))
            else:
                self.known_s.append(self.world.now_s - since_s)
        self._unknown = left

    def _count(self, sent: Sent, to_host: bool) -> None:
        for kind, frame in _frames(sent):
            size = len(encode_bytes(frame))
            self.bytes[kind] += size
            self.bytes["down" if to_host else "up"] += size

    def report(self, seconds: float) -> dict[str, Any]:
        up, down = self.bytes["up"] / seconds, self.bytes["down"] / seconds
        nodes = len(self.world.hosts)
        return {
            **{name: self.happened[name] for name in ("killed", "without_power", "returned")},
            "wrongly_suspected": self.happened["wrongly_suspect"],
            "wrongly_dead": self.happened["wrongly_dead"],
            "known_to_all": _figures(self.known_s),
            **{f"noticed_{how}": _figures(took_s) for how, took_s in self.noticed_s.items()},
            "bytes_per_s": {
                "node_up": round(up / nodes),
                "node_down": round(down / nodes),
                "coordinator_up": round(down),
                "coordinator_down": round(up),
                "coordinator_up_for_tables": round(self.bytes["members"] / seconds),
            },
        }


def _figures(seconds: list[float]) -> dict[str, float]:
    return {"p50_s": round(percentile(seconds, 0.5), 2), "p99_s": round(percentile(seconds, 0.99), 2)}


def _frames(sent: Sent) -> list[tuple[str, Frame]]:
    """What goes over the wire: ids are as long as those of real nodes."""
    match sent.message:
        case Beat(_, who, held):
            boot = _hex(who.boot)[:32]
            header = {"node": _hex(who.node), "boot": boot, "incarnation": who.incarnation, "seq": int(sent.at_s)}
            return [("beat", Frame("beat", {**header, "table": list(held)}, pack_body(BODY)))]
        case Answered(_, _, answer):
            above = {} if answer.above is None else {"above": answer.above}
            frames = [("heard", Frame("heard", {"seq": int(sent.at_s), **above}))]
            if answer.update is not None:
                rows = tuple(replace(row, node=NodeId(_hex(row.node))) for row in answer.update.rows)
                frames.append(("members", members_frame(replace(answer.update, rows=rows))))
            return frames
        case _:
            return []


def _hex(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()
