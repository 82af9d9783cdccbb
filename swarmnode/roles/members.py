"""The coordinator's view of the connected peers: who they are, what they offer, how to reach them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swarmnode.cluster.placement import PeerResources
from swarmnode.roles.outbox import Outbox
from swarmnode.wire.routes import DIRECT

if TYPE_CHECKING:
    import trio

    from swarmnode.ids import BootId, NodeId
    from swarmnode.roles.reports import Beat
    from swarmnode.wire.link import Identity


@dataclass(slots=True)
class Member:
    """A peer with both its connections up or coming up. `beat` is its last one; before the first it is not usable."""

    identity: Identity
    scope: trio.CancelScope
    """Cancelling it closes the peer's requests connection, which makes it dial again."""
    route: str = DIRECT
    """How its connections reach the coordinator."""
    outbox: Outbox = field(default_factory=Outbox)
    beat: Beat | None = None
    heard_s: float = -math.inf
    """When a frame of it last counted as a sign of life."""
    refused: BootId | None = None
    """The last process that came under the same identity and was sent away."""

    @property
    def node(self) -> NodeId:
        return self.identity.node

    @property
    def boot(self) -> BootId:
        return self.identity.boot

    @property
    def usable(self) -> bool:
        """It has said what it offers."""
        return self.beat is not None

    def keeps(self, model: str) -> bool:
        """Whether it has files of the model that it can share."""
        return self.beat is not None and model in self.beat.models

    def resources(self, busy_with: str | None) -> PeerResources:
        return PeerResources(
            node=self.node,
            name=self.identity.name,
            memory_bytes=self.beat.memory_bytes if self.beat is not None else 0,
            busy_with=busy_with,
            capabilities=frozenset(self.identity.capabilities),
        )
