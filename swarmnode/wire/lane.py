"""Order on a lane: `seq` counts frames per (ring, lane, link epoch), so nothing is lost, doubled or stale unseen.

What was sent is kept for a while, so that a link that drops and comes back goes on where the other end says it stopped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swarmnode.errors import LinkBroken, ProtocolError
from swarmnode.wire.frames import Frame

if TYPE_CHECKING:
    from swarmnode.ids import RingId
    from swarmnode.ring.messages import Epoch

KEPT_BYTES = 8 << 20
"""Bodies of frames that were sent and are not acknowledged: a second of a 60 Mbit/s link. Beyond it the oldest go, and
with them the chance to resume."""
ACK_FRAMES = 32
ACK_BYTES = 64 << 10
"""After so many frames, or bytes of body, the receiver says what it has: often enough that little is kept. A step's
frame is answered once in a while only, a prompt piece always, which is what its link is measured by."""


@dataclass(slots=True)
class LaneLog:
    """Frames that were given to a link, in order, until the other end has acknowledged them."""

    _kept: deque[tuple[int, Frame]] = field(default_factory=deque, init=False)
    _bytes: int = field(default=0, init=False)
    _first: int = field(default=0, init=False)
    """The earliest seq that can still be sent again."""

    def sent(self, frame: Frame) -> None:
        seq = frame.header["seq"]
        self._kept.append((seq, frame))
        self._bytes += len(frame.body)
        while self._bytes > KEPT_BYTES and len(self._kept) > 1:
            self._forget_oldest()

    @property
    def empty(self) -> bool:
        """Nothing is under way: all that was sent is acknowledged."""
        return not self._kept

    def acknowledged(self, next_seq: int) -> None:
        """The other end has everything before `next_seq`."""
        while self._kept and self._kept[0][0] < next_seq:
            self._forget_oldest()

    def since(self, next_seq: int) -> list[Frame]:
        """What the other end lacks, in order. Raises LinkBroken where a part of it is not kept any more."""
        self.acknowledged(next_seq)
        if next_seq < self._first:
            raise LinkBroken(f"the other end lacks frames from {next_seq} on; kept are those from {self._first} on")
        return [frame for _, frame in self._kept]

    def _forget_oldest(self) -> None:
        seq, frame = self._kept.popleft()
        self._bytes -= len(frame.body)
        self._first = seq + 1


@dataclass(slots=True)
class LaneAcks:
    """When a receiver owes its sender an acknowledgement."""

    _frames: int = field(default=0, init=False)
    _bytes: int = field(default=0, init=False)

    def took(self, frame: Frame) -> bool:
        """Count a frame; whether it is time to acknowledge."""
        self._frames += 1
        self._bytes += len(frame.body)
        if self._frames < ACK_FRAMES and self._bytes < ACK_BYTES and not frame.header.get("ack"):
            return False
        self._frames = self._bytes = 0
        return True


@dataclass(slots=True)
class LaneSender:
    """Stamps frames. Call `stamp` in the same step that queues the frame, or the order is lost."""

    ring: RingId
    lane: str
    epoch: Epoch
    next_seq: int = field(default=0, init=False)

    def stamp(self, frame: Frame) -> Frame:
        """The frame with ring, epoch, lane and seq in its header, first as in the table; the body is not touched."""
        route: dict[str, object] = {
            "ring": self.ring,
            "epoch": list(self.epoch),
            "lane": self.lane,
            "seq": self.next_seq,
        }
        self.next_seq += 1
        return Frame(frame.kind, {**route, **frame.header, **route}, frame.body, frame.checked)

    def advance(self, epoch: Epoch) -> None:
        """Go on under a later epoch; seq starts again."""
        _refuse_earlier(self.epoch, epoch)
        self.epoch = epoch
        self.next_seq = 0


@dataclass(slots=True)
class LaneReceiver:
    """Checks what arrives on one lane of one ring."""

    ring: RingId
    lane: str
    epoch: Epoch
    next_seq: int = field(default=0, init=False)
    stale: int = field(default=0, init=False)
    """Frames of earlier epochs that were dropped."""
    duplicates: int = field(default=0, init=False)

    def accept(self, frame: Frame) -> Frame | None:
        """The frame, or None for one to drop (an earlier epoch, or seen before).

        Raises ProtocolError for another ring's or lane's frame and for an epoch not reached yet, LinkBroken when
        frames are missing.
        """
        header = frame.header
        if header.get("ring") != self.ring or header.get("lane") != self.lane:
            raise ProtocolError(
                f"a {frame.kind} frame for ring {header.get('ring')!r} lane {header.get('lane')!r} came on "
                f"ring {self.ring!r} lane {self.lane!r}"
            )
        if "epoch" not in header or "seq" not in header:
            raise ProtocolError(f"a {frame.kind} frame came on lane {self.lane!r} without epoch and seq")
        epoch = tuple(header["epoch"])
        if epoch < self.epoch:
            self.stale += 1
            return None
        if epoch > self.epoch:
            raise ProtocolError(f"a {frame.kind} frame has epoch {epoch}; lane {self.lane!r} is at {self.epoch}")
        return self._in_order(frame, header["seq"])

    def check_all_came(self, next_seq: int) -> None:
        """The other end says that it sent all before `next_seq`. Raises LinkBroken where frames are missing."""
        if next_seq > self.next_seq:
            raise LinkBroken(f"lane {self.lane!r} of ring {self.ring!r} lost frames {self.next_seq} to {next_seq - 1}")

    def _in_order(self, frame: Frame, seq: int) -> Frame | None:
        if seq < self.next_seq:
            self.duplicates += 1
            return None
        self.check_all_came(seq)
        self.next_seq += 1
        return frame

    def advance(self, epoch: Epoch) -> None:
        """Expect a later epoch from now on; what still comes of the earlier one is stale."""
        _refuse_earlier(self.epoch, epoch)
        self.epoch = epoch
        self.next_seq = 0


def _refuse_earlier(now: Epoch, then: Epoch) -> None:
    if then <= now:
        raise ValueError(f"epoch {then} does not come after {now}")
