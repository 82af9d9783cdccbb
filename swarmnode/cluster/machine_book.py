"""What was measured of machines and of the ways between them: how fast each steps, how far they are from each other,
and whose kernels failed.

Soft state: it is in memory only, comes with what stages and lanes report, and a coordinator that starts anew learns it
again. A pure class; all it keeps is bounded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from swarmnode.cluster.measured import LinkSeen, Measured
from swarmnode.machine import drain

if TYPE_CHECKING:
    from swarmnode.ids import BootId, NodeId

Key = TypeVar("Key")
Value = TypeVar("Value")
LASTS_S = 6 * 3600.0
"""A machine that was slow while somebody played on it, or behind a relay, is taken for an ordinary one later, and
measured anew when it gets a stage; until then nobody would look."""
MOST_NODES, MOST_KINDS, MOST_LINKS = 1024, 8, 64
"""Nodes remembered; kinds of weights, and neighbours, of each. Beyond that the one heard of longest ago goes."""
STRAGGLES, RECOVERED = 2.0, 1.5
"""So many times as slow as the median of the others that ran the same weights; in between nothing changes, so that a
machine at the border is not told of again and again."""
MOST_WHY_CHARS = 300
"""Of a failure that a peer tells of."""


class Weights(NamedTuple):
    """Steps over the same kind of weights compare; over others the kernels and the sizes of layers differ."""

    model: str
    dtype: str
    quantization: str


@dataclass(frozen=True, slots=True)
class StragglerChanged:
    """A node has become a straggler (`straggles`), or is none any more. `times` is by how much it is slower."""

    node: NodeId
    straggles: bool
    times: float


@dataclass(frozen=True, slots=True)
class _Pace:
    ms: float
    at_s: float


@dataclass(slots=True)
class _Machine:
    boot: BootId | None = None
    paces: dict[Weights, _Pace] = field(default_factory=dict)
    """The newest last."""
    links: dict[NodeId, tuple[LinkSeen, float]] = field(default_factory=dict)
    """By who is at the other end of what this node dialled, and when it was measured; the newest last."""
    failed: dict[Weights, str] = field(default_factory=dict)
    """Why its kernels do not run over these weights; the newest last."""
    straggles: bool = False


class MachineBook:
    """`note_…` what was measured, newest wins; `seen` is what placement reads."""

    def __init__(self) -> None:
        self._machines: dict[NodeId, _Machine] = {}
        self._events: list[StragglerChanged] = []

    def came(self, node: NodeId, boot: BootId) -> None:
        """A process of the node is there. Another one than before may use another device: its steps are unknown, and
        its kernels may run."""
        machine = self._of(node)
        if machine.boot != boot:
            machine.boot = boot
            machine.paces.clear()
            machine.failed.clear()
            machine.straggles = False

    def note_step(self, node: NodeId, weights: Weights, step_ms: float, work: float, now: float) -> None:
        """A step of one row took `step_ms` over `work` (GiB of weights that it reads)."""
        if not (0 < step_ms < math.inf and 0 < work < math.inf):
            return
        _renew(self._of(node).paces, weights, _Pace(step_ms / work, now), MOST_KINDS)
        self._mark_stragglers(weights, now)

    def note_link(
        self, sender: NodeId, receiver: NodeId, round_trip_ms: float | None, mbit_per_s: float | None, now: float
    ) -> None:
        """Of a way that `sender` dialled; None is what was not measured, and what was known of it stays."""
        if sender == receiver or (round_trip_ms is None and mbit_per_s is None):
            return
        links = self._of(sender).links
        known, _ = links.get(receiver, (LinkSeen(), now))
        seen = LinkSeen(
            known.round_trip_ms if round_trip_ms is None else round_trip_ms,
            known.mbit_per_s if mbit_per_s is None else mbit_per_s,
        )
        _renew(links, receiver, (seen, now), MOST_LINKS)

    def note_failed(self, node: NodeId, weights: Weights, why: str) -> None:
        """The kernels that it declares for these weights do not run there; so it stays until it starts anew."""
        _renew(self._of(node).failed, weights, why[:MOST_WHY_CHARS], MOST_KINDS)

    def forget(self, node: NodeId) -> None:
        """It was removed from the swarm."""
        self._machines.pop(node, None)
        for machine in self._machines.values():
            machine.links.pop(node, None)

    def seen(self, weights: Weights, now: float) -> Measured:
        """What is known for steps over these weights.

        A node that never ran them counts as so many times slower or faster than the median as it was over others, which
        at least one more node ran; one of which nothing is known is left to `Measured.ordinary_ms`.
        """
        fresh = self._fresh(now)
        medians = {kind: median(paces.values()) for kind, paces in fresh.items()}
        links = {
            (sender, receiver): seen
            for sender, machine in self._machines.items()
            for receiver, (seen, at_s) in machine.links.items()
            if now - at_s < LASTS_S
        }
        failed = {
            node: machine.failed[weights] for node, machine in self._machines.items() if weights in machine.failed
        }
        if not medians:
            return Measured(links=links, failed=failed)
        usual_ms = medians[weights if weights in medians else self._newest_kind()]
        paces = dict(fresh.get(weights, {}))
        for node, machine in self._machines.items():
            compared = [kind for kind in machine.paces if len(fresh.get(kind, ())) > 1 and node in fresh[kind]]
            if node not in paces and compared:
                paces[node] = usual_ms * fresh[compared[-1]][node] / medians[compared[-1]]
        return Measured(paces, usual_ms, links, failed)

    def straggles(self, node: NodeId) -> bool:
        return node in self._machines and self._machines[node].straggles

    def events(self) -> list[StragglerChanged]:
        return drain(self._events)

    def _of(self, node: NodeId) -> _Machine:
        machine = self._machines.pop(node, None) or _Machine()
        _renew(self._machines, node, machine, MOST_NODES)
        return machine

    def _fresh(self, now: float) -> dict[Weights, dict[NodeId, float]]:
        """Paces that still count, by kind and node."""
        found: dict[Weights, dict[NodeId, float]] = {}
        for node, machine in self._machines.items():
            for kind, pace in machine.paces.items():
                if now - pace.at_s < LASTS_S:
                    found.setdefault(kind, {})[node] = pace.ms
        return found

    def _under(self, kind: Weights, now: float) -> dict[NodeId, float]:
        found = ((node, machine.paces.get(kind)) for node, machine in self._machines.items())
        return {node: pace.ms for node, pace in found if pace is not None and now - pace.at_s < LASTS_S}

    def _newest_kind(self) -> Weights:
        paces = (entry for machine in self._machines.values() for entry in machine.paces.items())
        return max(paces, key=lambda entry: entry[1].at_s)[0]

    def _mark_stragglers(self, weights: Weights, now: float) -> None:
        """Compare those that ran these weights; who has not stepped for long is no straggler any more."""
        paces = sorted(self._under(weights, now).items(), key=lambda entry: entry[1])
        for place, (node, ms) in enumerate(paces if len(paces) > 1 else ()):
            self._mark(node, ms / _median_without(place, paces))
        for node, machine in self._machines.items():
            if machine.straggles and all(now - pace.at_s >= LASTS_S for pace in machine.paces.values()):
                self._mark(node, 1.0)

    def _mark(self, node: NodeId, times: float) -> None:
        machine = self._machines[node]
        if times < RECOVERED if machine.straggles else times >= STRAGGLES:
            machine.straggles = not machine.straggles
            self._events.append(StragglerChanged(node, machine.straggles, times))


def _median_without(place: int, ordered: list[tuple[NodeId, float]]) -> float:
    """Of all but one of at least two entries."""
    lower, upper = ((k + (k >= place)) for k in ((len(ordered) - 2) // 2, (len(ordered) - 1) // 2))
    return (ordered[lower][1] + ordered[upper][1]) / 2


def _renew(table: dict[Key, Value], key: Key, value: Value, most: int) -> None:
    """Put it last, and drop the first beyond `most`."""
    table.pop(key, None)
    table[key] = value
    if len(table) > most:
        del table[next(iter(table))]
