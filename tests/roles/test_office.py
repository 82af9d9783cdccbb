"""A node that may coordinate while another one does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import trio
import trio.testing

from swarmnode.cluster.voter_book import Seated
from swarmnode.ids import NodeId
from swarmnode.roles.office import Office
from swarmnode.roles.swarm_document import SwarmDocument

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DEN, ATTIC = NodeId("1" * 64), NodeId("2" * 64)


class Voter:
    """What an office asks of its voting, where others coordinate by turns."""

    coordinates = False

    def __init__(self, document: bytes) -> None:
        self.entry = SimpleNamespace(document=document)
        self.coordinator: NodeId | None = None
        self._changed = trio.Event()

    async def changed(self) -> None:
        await self._changed.wait()

    def hear(self, coordinator: NodeId | None) -> None:
        self.coordinator, before, self._changed = coordinator, self._changed, trio.Event()
        before.set()


async def test_people_hear_once_whom_a_node_follows(tmp_path: Path) -> None:
    document = SwarmDocument()
    for node, name in ((DEN, "den"), (ATTIC, "attic")):
        document.voters.seat(Seated(node, name, ("127.0.0.1:1",)))
    voter, told = Voter(document.encode()), list[tuple[str, object]]()

    def emit(event: str, values: Mapping[str, object]) -> None:
        told.append((event, values["name"]))

    context = SimpleNamespace(settings=SimpleNamespace(models_root=tmp_path), emit=emit)
    parts = SimpleNamespace(voting=voter, follow=None, context=context)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Office(cast("Any", parts)).run)
        for coordinator in (None, DEN, None, DEN, ATTIC):
            await trio.testing.wait_all_tasks_blocked()
            voter.hear(coordinator)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert told == [("following", "den"), ("following", "attic")]
