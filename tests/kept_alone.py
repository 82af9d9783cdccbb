"""The swarm's document where one node votes: a ballot on disk, without the election around it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import trio

from swarmnode.errors import Conflict
from swarmnode.ids import NodeId
from swarmnode.roles.ballot import Ballot
from swarmnode.roles.swarm_state import SwarmState

if TYPE_CHECKING:
    from pathlib import Path

    from swarmnode.cluster.election_messages import Entry

ALONE = NodeId("alone")


class KeptAlone:
    """Implements `swarm_state.Replica`."""

    def __init__(self, path: Path) -> None:
        self._ballot = Ballot(path)
        self._stored = self._ballot.read((ALONE,))

    @property
    def entry(self) -> Entry:
        return self._stored.entry

    async def write(self, document: bytes, expected: int, voters: tuple[NodeId, ...] | None = None) -> None:
        entry = self.entry
        if expected != entry.version:
            raise Conflict(f"it is at version {entry.version}")
        changed = replace(entry, version=expected + 1, document=document, voters=voters or entry.voters)
        stored = replace(self._stored, entry=changed)
        await trio.to_thread.run_sync(self._ballot.write, stored)
        self._stored = stored


def state_at(path: Path) -> SwarmState:
    return SwarmState(KeptAlone(path))
