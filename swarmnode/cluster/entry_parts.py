"""An entry on its way to one node, in parts that are beats each: what a line takes long for must not silence a voter.

Each part waits for the answer to the one before, and to all receivers together only a few are under way. So a beat
never stands behind more than those, every answer is a sign of life, and a document of any size, to any number of nodes,
costs a coordinator no quorum on a line of 1 Mbit/s.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

from swarmnode.cluster.election_messages import NOTHING, Entry, Part

if TYPE_CHECKING:
    from swarmnode.cluster.election_messages import Appended, Mark

PART_BYTES = 128 << 10
"""Of the document in one beat: one at a time fills 10 Mbit/s at 0.1 s there and back."""
MAX_UNDER_WAY = 3
"""Parts, to all receivers: an uplink of 1 Mbit/s has sent them after 3.2 s, and a beat that was due a second before and
stands behind them is heard within QUORUM_S."""
LEFT_AFTER_S = 5.0
"""A part without an answer for so long has left the uplink: who it was for is gone, or has a slow line of its own."""


class Outbound:
    """A coordinator's entry on its way to one node."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self._due: int | None = 0
        """Where the part begins that is to be sent next; None while its turn is not before an answer."""
        self._start = 0
        """Where the part begins that was sent last."""
        self._number = 0
        """Of the beat that carried it."""
        self._sent_s = -math.inf
        self._sent_of = entry.mark
        """The entry that it was of."""

    @property
    def is_due(self) -> bool:
        return self._due is not None

    @property
    def has_begun(self) -> bool:
        """Some of it is known to have arrived: a later entry waits until the rest has, or there might be no end."""
        return self._start > 0 or bool(self._due)

    def is_under_way(self, now: float) -> bool:
        """A part of it, or of the entry before it, may still be on the line."""
        return self._due is None and now - self._sent_s < LEFT_AFTER_S

    def replace(self, entry: Entry) -> None:
        """A later one goes in its place, after the answer to what is under way."""
        self.entry, self._start = entry, 0
        if self._due is not None:
            self._due = 0

    def send(self, number: int, most_bytes: int, now: float) -> Part:
        """The part that is due, for the beat of this number."""
        self._start, self._number, self._due = self._due or 0, number, None
        self._sent_s, self._sent_of = now, self.entry.mark
        return part_of(self.entry, self._start, most_bytes)

    def answered(self, answer: Appended) -> None:
        """Go on where it says. An answer to a later beat that tells of no more than was there before means that the
        part was lost, or what came before it."""
        if answer.number < self._number:
            return
        if self._sent_of != self.entry.mark:
            self._due = 0
        elif answer.number > self._number or answer.have_bytes != self._start:
            self._due = answer.have_bytes


class Inbound:
    """What a voter has of an entry that is not whole yet; on no disk, so it begins anew after a restart."""

    def __init__(self) -> None:
        self.forget()

    def __deepcopy__(self, _: object) -> Inbound:
        """As it is now, without a copy of up to MAX_DOCUMENT_BYTES for every message: bytes are only added, and of the
        two only one is given more."""
        return copy.copy(self)

    def take(self, mark: Mark, part: Part) -> Entry | None:
        """The entry, with its last part. A part of a later entry ends an earlier one; one that does not begin where
        the last ended came twice, or too early, and an empty one belongs to no document but an empty one."""
        if mark > self._mark:
            self._begin(mark)
        have_bytes = self.have_bytes(mark)
        if mark != self._mark or part.start != have_bytes or have_bytes + len(part.data) > part.size:
            return None
        if part.size and not part.data:
            return None
        self._have[have_bytes:] = part.data
        self._have_bytes += len(part.data)
        if self._have_bytes < part.size:
            return None
        document = bytes(self._have)
        self.forget()
        return Entry(*mark, part.voters, document)

    def have_bytes(self, mark: Mark) -> int:
        """Of this entry's document."""
        return self._have_bytes if mark == self._mark else 0

    def forget(self) -> None:
        self._begin(NOTHING)

    def _begin(self, mark: Mark) -> None:
        self._mark = mark
        self._have = bytearray()
        self._have_bytes = 0
        """Of `_have`; what is beyond was taken by a copy that was given up."""


def part_of(entry: Entry, start: int = 0, most_bytes: int = PART_BYTES) -> Part:
    return Part(entry.voters, start, len(entry.document), entry.document[start : start + most_bytes])
