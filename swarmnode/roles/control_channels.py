"""The coordinator's end of control channels: of connected peers, and of a `doctor` that asks as one of them."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import trio

from swarmnode.errors import LinkBroken
from swarmnode.roles.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import Iterator

    from swarmnode.ids import BootId, NodeId
    from swarmnode.wire.frames import Frame

    Whose = tuple[NodeId, BootId]


class ControlChannels:
    """`open` one for as long as it lives; frames are posted without waiting."""

    def __init__(self) -> None:
        self._outboxes: dict[Whose, Outbox] = {}
        self._scopes: set[trio.CancelScope] = set()

    @contextmanager
    def open(self, whose: Whose) -> Iterator[Outbox]:
        """What is to be sent on a channel, which `end_all` cancels. Of two of one node the newer one is posted to."""
        outbox = self._outboxes[whose] = Outbox()
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                yield outbox
            finally:
                self._scopes.discard(scope)
                if self._outboxes.get(whose) is outbox:  # else it came back on a newer one
                    del self._outboxes[whose]

    def tell(self, whose: Whose, frame: Frame) -> bool:
        """Post to one; False: there is none, or it is not read."""
        outbox = self._outboxes.get(whose)
        return outbox is not None and _post(outbox, frame)

    def tell_all(self, frame: Frame) -> None:
        for outbox in self._outboxes.values():
            _post(outbox, frame)

    def end_all(self) -> None:
        for scope in self._scopes:
            scope.cancel()


def _post(outbox: Outbox, frame: Frame) -> bool:
    with suppress(LinkBroken):  # a control channel that stopped reading is about to break
        outbox.post(frame)
        return True
    return False
