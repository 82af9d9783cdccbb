"""What a node may have sent that nobody could read yet: frames that are not whole, and bytes that wait for a reader.

A frame is longest where its channel has use for that, and all the channels of one node share a bound: else whoever
holds a certificate could begin a long frame on every channel of every connection, and end none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from swarmnode.cluster.entry_parts import PART_BYTES
from swarmnode.wire import limits
from swarmnode.wire.link import JOIN_KIND

if TYPE_CHECKING:
    from collections.abc import Mapping

LONGEST_FRAME_BYTES: Mapping[str, int] = {
    "control": limits.MAX_CONTROL_FRAME_BYTES,
    "requests": limits.MAX_HEADER_BYTES + limits.MAX_MAP_BODY_BYTES,
    "files": limits.MAX_HEADER_BYTES + limits.MAX_CHUNK_BYTES,
    "shares": limits.MAX_HEADER_BYTES + limits.MAX_CHUNK_BYTES,
    "votes": limits.MAX_HEADER_BYTES + PART_BYTES,
    "api": limits.MAX_HEADER_BYTES + limits.MAX_HTTP_BYTES,
    "relay": limits.MAX_HEADER_BYTES + limits.MAX_CHUNK_BYTES,
    "steps": limits.MAX_FRAME_BYTES,
    "prompts": limits.MAX_FRAME_BYTES,
    JOIN_KIND: limits.MAX_JOIN_FRAME_BYTES,
}
"""By channel kind."""
CARRYING_KINDS = frozenset({"relay", "steps", "prompts"})
"""They carry activations, which wait in line where a link is slow. The others carry what is read at once, so less of
it may wait, and lanes that are full never keep a beat out."""


class Unread:
    """The bytes of one node that wait, on however many channels."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0

    def add(self, size: int) -> bool:
        """Count bytes that came; False (and nothing counted) where those are too many."""
        if self.held_bytes + size > self.most_bytes:
            return False
        self.held_bytes += size
        return True

    def remove(self, size: int) -> None:
        """They were read, or dropped."""
        self.held_bytes -= size


class Share:
    """What one channel has of an account."""

    def __init__(self, account: Unread) -> None:
        self.account = account
        self._held = 0

    def add(self, size: int) -> bool:
        """See `Unread.add`."""
        fits = self.account.add(size)
        self._held += size if fits else 0
        return fits

    def remove(self, size: int) -> None:
        self._held -= size
        self.account.remove(size)

    def end(self) -> None:
        """The channel holds nothing any more."""
        self.remove(self._held)


class NodeUnread:
    """Both accounts of one node."""

    def __init__(
        self, most_bytes: int = limits.MAX_UNREAD_BYTES, carried_bytes: int = limits.MAX_CARRIED_BYTES
    ) -> None:
        self._told = Unread(most_bytes)
        self._carried = Unread(carried_bytes)

    def of(self, kind: str) -> Unread:
        """The account of a channel's kind."""
        return self._carried if kind in CARRYING_KINDS else self._told

    @property
    def held_bytes(self) -> int:
        return self._told.held_bytes + self._carried.held_bytes
