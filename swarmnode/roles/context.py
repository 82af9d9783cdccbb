"""What every role of a node shares: who it is, how it dials, what it counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swarmnode.cluster.member_table import KnownMembers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from swarmnode.config import Settings
    from swarmnode.roles.roads import Roads
    from swarmnode.wire.link import Identity, Transport
    from swarmnode.wire.traffic import Traffic


@dataclass(frozen=True, slots=True)
class PeerResources:
    """What a peer offers: bytes a stage may take, torch device and threads for its workers."""

    memory_bytes: int
    device: str
    threads: int


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
