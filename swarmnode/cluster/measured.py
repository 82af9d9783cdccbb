"""What was measured of a swarm as placement reads it: each node's pace over some weights, and the ways between nodes.

Where something was not measured, it is estimated from what was: a node's pace as the median of the others', a way by
the best that was seen of either end.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from swarmnode.ids import NodeId

    Ways = Mapping[tuple[NodeId, NodeId], "LinkSeen"]


@dataclass(frozen=True, slots=True)
class LinkSeen:
    """Of one way, as its dialler's lanes measured it; None where they did not."""

    round_trip_ms: float | None = None
    mbit_per_s: float | None = None


@dataclass(frozen=True)
class Measured:
    """`paces`: milliseconds that a step of one row takes for each GiB of weights that it reads."""

    paces: Mapping[NodeId, float] = field(default_factory=dict)
    ordinary_ms: float = 0.0
    """The pace of a node of which nothing is known."""
    links: Ways = field(default_factory=dict)
    failed: Mapping[NodeId, str] = field(default_factory=dict)
    """Nodes whose kernels did not run over these weights, and why."""

    @property
    def nothing(self) -> bool:
        return not self.paces and not self.links

    def pace_ms(self, node: NodeId) -> float:
        return self.paces.get(node, self.ordinary_ms)

    def hop_ms(self, sender: NodeId, receiver: NodeId, n_bytes: int) -> float:
        """One way for `n_bytes`. A round trip holds the way there, the bytes' own time with it, and the way back."""
        trip_ms, mbit_per_s = self._round_trip_ms(sender, receiver), self._mbit_per_s(sender, receiver)
        transfer_ms = n_bytes * 8e-3 / mbit_per_s if mbit_per_s else 0.0
        return max(transfer_ms, (trip_ms + transfer_ms) / 2)

    def _round_trip_ms(self, sender: NodeId, receiver: NodeId) -> float:
        """As measured; else the worst of the way back, of the sender's best way to anybody and of anybody's best to
        the receiver: who is far from all is far from this one, too."""
        direct = self._trips.get((sender, receiver))
        if direct is not None:
            return direct
        known = (self._trips.get((receiver, sender)), self._leaving.get(sender), self._arriving.get(receiver))
        return max((trip for trip in known if trip is not None), default=self._usual_trip_ms)

    def _mbit_per_s(self, sender: NodeId, receiver: NodeId) -> float | None:
        """As measured; else what the sender's best way gave: a home's uplink is the same for all that it sends."""
        return self._rates.get((sender, receiver)) or self._uplinks.get(sender)

    @cached_property
    def _trips(self) -> Mapping[tuple[NodeId, NodeId], float]:
        return {way: seen.round_trip_ms for way, seen in self.links.items() if seen.round_trip_ms is not None}

    @cached_property
    def _rates(self) -> Mapping[tuple[NodeId, NodeId], float]:
        return {way: seen.mbit_per_s for way, seen in self.links.items() if seen.mbit_per_s}

    @cached_property
    def _usual_trip_ms(self) -> float:
        return median(self._trips.values()) if self._trips else 0.0

    @cached_property
    def _leaving(self) -> Mapping[NodeId, float]:
        return {node: min(trips) for node, trips in _grouped(self._trips, 0).items()}

    @cached_property
    def _arriving(self) -> Mapping[NodeId, float]:
        return {node: min(trips) for node, trips in _grouped(self._trips, 1).items()}

    @cached_property
    def _uplinks(self) -> Mapping[NodeId, float]:
        return {node: max(rates) for node, rates in _grouped(self._rates, 0).items()}


NOTHING_MEASURED = Measured()


def _grouped(values: Mapping[tuple[NodeId, NodeId], float], end: int) -> dict[NodeId, list[float]]:
    """By the node at one end of the way."""
    found: dict[NodeId, list[float]] = defaultdict(list)
    for way, value in values.items():
        found[way[end]].append(value)
    return found
