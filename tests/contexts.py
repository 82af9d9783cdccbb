"""What the roles of a node share, for tests that run one of them: links are direct, over whatever transport."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from swarmnode.roles.context import NodeContext
from swarmnode.roles.roads import Roads
from swarmnode.wire.certificates import new_key
from swarmnode.wire.routes import DIRECT
from swarmnode.wire.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from swarmnode.config import Settings
    from swarmnode.errors import NodeRemoved
    from swarmnode.wire.address import Place
    from swarmnode.wire.link import Identity, Transport


def node_context(
    identity: Identity, transport: Transport, settings: Settings | None = None, places: Sequence[Place] = ()
) -> NodeContext:
    """`places`: where its coordinator answers. Events are dropped."""
    carried: Any = transport
    return NodeContext(
        identity=identity,
        settings=cast("Settings", settings),
        transport=transport,
        traffic=Traffic(),
        emit=lambda *_: None,
        roads=Roads(carried, identity, new_key(), (DIRECT,), places),
    )


def never_removed(error: NodeRemoved) -> None:
    """For a voter that no other one refuses."""
    raise AssertionError(error)
