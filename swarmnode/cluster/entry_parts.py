"""An entry on its way to one node, in parts that are beats each: what a line takes long for must not silence a voter.

Each part waits for the answer to the one before. So a beat never stands behind more than one of them, every answer is
a sign of life, and a document of any size costs a coordinator no quorum, however slow the line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarmnode.cluster.election_messages import NOTHING, Entry, Part

if TYPE_CHECKING:
    from swarmnode.cluster.election_messages import Appended, Mark

PART_BYTES = 128 << 10
"""Of the document in one beat: four voters behind an uplink of 1 Mbit/s hear theirs within 4.2 s, and QUORUM_S is 5;
and 10 Mbit/s are full at 0.1 s there and back."""


class Outbound:
    """A coordinator's entry on its way to one node."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self._start = 0
        """Where the part begins that was sent last."""
        self._number: int | None = None
        """Of the beat that carried it; None: there was none yet."""

    @property
    def was_sent(self) -> bool:
        return self._number is not None

    @property
    def has_begun(self) -> bool:
        """Some of it is known to have arrived: a later entry waits until the rest has, or there might be no end."""
        return self._start > 0

    def send(self, number: int, start: int, most_bytes: int) -> Part:
        """The part from `start` on, for the beat of this number."""
        self._start, self._number = start, number
        return part_of(self.entry, start, most_bytes)

    def next_start(self, answer: Appended) -> int | None:
        """Where to go on after this answer; None: not now. An answer to a later beat that tells of no more than was
        there before means that the part was lost, or what came before it."""
        if self._number is None:
            return 0
        if answer.number < self._number or (answer.number == self._number and answer.have_bytes == self._start):
            return None
        return answer.have_bytes


class Inbound:
    """What a voter has of an entry that is not whole yet; on no disk, so it begins anew after a restart."""

    def __init__(self) -> None:
        self._mark: Mark = NOTHING
        self._have: list[bytes] = []

    def take(self, mark: Mark, part: Part) -> Entry | None:
        """The entry, with its last part. A part of a later entry ends an earlier one; one that does not begin where
        the last ended came twice, or too early."""
        if mark > self._mark:
            self._mark, self._have = mark, []
        have_bytes = self.have_bytes(mark)
        if mark != self._mark or part.start != have_bytes or have_bytes + len(part.data) > part.size:
            return None
        self._have.append(part.data)
        if have_bytes + len(part.data) < part.size:
            return None
        document = b"".join(self._have)
        self.forget()
        return Entry(*mark, part.voters, document)

    def have_bytes(self, mark: Mark) -> int:
        """Of this entry's document."""
        return sum(map(len, self._have)) if mark == self._mark else 0

    def forget(self) -> None:
        self._mark, self._have = NOTHING, []


def part_of(entry: Entry, start: int = 0, most_bytes: int = PART_BYTES) -> Part:
    return Part(entry.voters, start, len(entry.document), entry.document[start : start + most_bytes])
