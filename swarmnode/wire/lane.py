"""Order on a lane: `seq` counts frames per (ring, lane, link epoch), so nothing is lost, doubled or stale unseen."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from swarmnode.errors import LinkBroken, ProtocolError

if TYPE_CHECKING:
    from swarmnode.ids import RingId
    from swarmnode.ring.messages import Epoch
    from swarmnode.wire.frames import Frame


@dataclass(slots=True)
class LaneSender:
    """Stamps frames. Call `stamp` in the same step that queues the frame, or the order is lost."""

    ring: RingId
    lane: str
    epoch: Epoch
    next_seq: int = field(default=0, init=False)

    def stamp(self, frame: Frame) -> Frame:
        """The frame with ring, epoch, lane and seq in its header; the body is not touched."""
        route = {"ring": self.ring, "epoch": list(self.epoch), "lane": self.lane, "seq": self.next_seq}
        self.next_seq += 1
        return replace(frame, header={**frame.header, **route})

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

    def _in_order(self, frame: Frame, seq: int) -> Frame | None:
        if seq < self.next_seq:
            self.duplicates += 1
            return None
        if seq > self.next_seq:
            raise LinkBroken(f"lane {self.lane!r} of ring {self.ring!r} lost frames {self.next_seq} to {seq - 1}")
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
