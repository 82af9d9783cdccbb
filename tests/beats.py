"""A member's beat as its coordinator reads it, for tests that play the member."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from swarmnode.cluster.member_table import NOTHING
from swarmnode.wire.bodies import pack_body
from swarmnode.wire.frames import Frame

if TYPE_CHECKING:
    from swarmnode.cluster.member_table import Mark
    from swarmnode.wire.link import Identity

OFFER: dict[str, Any] = {"memory_bytes": 1 << 30, "device": "cpu", "threads": 1, "stages": []}


def beat_of(identity: Identity, *, incarnation: int = 1, table: Mark = NOTHING, **said: Any) -> Frame:
    """`table`: the mark of the member's copy; `said`: what it says besides OFFER, or instead of it."""
    header = {"node": identity.node, "boot": identity.boot, "incarnation": incarnation, "seq": 0, "table": list(table)}
    return Frame("beat", header, pack_body(OFFER | said))
