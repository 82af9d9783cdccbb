"""What every role of a node shares: who it is, how it dials, what it counts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from swarmnode.available_memory import CARD_SHARE
from swarmnode.cluster.member_table import KnownMembers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from swarmnode.config import Settings
    from swarmnode.errors import NodeRemoved
    from swarmnode.roles.roads import Roads
    from swarmnode.wire.link import Identity, Transport
    from swarmnode.wire.traffic import Traffic


@dataclass(frozen=True, slots=True)
class CardMemory:
    """Of the card that a peer's stages compute on: what it has, and what was free before there were any."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class PeerResources:
    """What a peer offers: bytes a stage may take of the device's memory, torch device and threads for its workers."""

    memory_bytes: int
    device: str
    threads: int
    bounded: bool = False
    """Somebody said how much a stage may take; else it is what the device has."""
    card: CardMemory | None = None

    def on_card(self, card: CardMemory) -> PeerResources:
        """Its stages compute on a card: they take its memory, not the machine's."""
        offered = int(card.free_bytes * CARD_SHARE)
        return replace(self, memory_bytes=min(offered, self.memory_bytes) if self.bounded else offered, card=card)


@dataclass(frozen=True, slots=True)
class NodeContext:
    """`emit` reports an event of this node (a name and JSON values) to whoever watches: the log or `--json`."""

    identity: Identity
    settings: Settings
    transport: Transport
    traffic: Traffic
    emit: Callable[[str, Mapping[str, object]], None]
    roads: Roads
    known: KnownMembers = field(default_factory=KnownMembers)
    """The members, as this node's coordinator told them last."""

    def say_removed(self, why: NodeRemoved) -> None:
        """No node of the swarm takes this one any more: people hear of it once, and of what helps."""
        if not self.roads.removed:
            self.roads.removed = True
            self.emit("removed", {"reason": why.message})
