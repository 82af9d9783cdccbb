"""What stages of one ring say to each other: frozen messages, one class per frame kind.

`Epoch` is (the document's ring epoch, the head's reset count). Per session: `gen` (a lower one is dropped, a higher
one crops to `pos`), `pos` (where the positions start). `compute_ms` collects each stage's compute in order as the
message travels, `queue_ms` the time it waited behind other work, summed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarmnode.ids import SessionId
    from swarmnode.ring.work import Activation, Continuation, Sampling

Epoch = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """A prompt piece on its way round (lane `pre`): positions pos … pos+len(ids)-1."""

    session: SessionId
    gen: int
    pos: int
    ids: tuple[int, ...]
    last: bool
    hidden: Activation
    sampling: Sampling | None = None
    compute_ms: tuple[float, ...] = ()
    queue_ms: float = 0.0
    start: Continuation | None = None
    """On the session's first piece: the parked session it continues."""


@dataclass(frozen=True, slots=True)
class PieceDone:
    """The last stage's answer to every piece (lane `tok`); `token` only for the prompt's last piece."""

    session: SessionId
    gen: int
    pos: int
    n: int
    token: int | None = None
    compute_ms: tuple[float, ...] = ()
    queue_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """A session's part of a decode group: one position (n = 1 until drafts exist) from `pos`."""

    session: SessionId
    gen: int
    pos: int
    n: int = 1


@dataclass(frozen=True, slots=True)
class Group:
    """A decode group on its way round (lane `act`): one frame, one row of `hidden` per entry of `rows`."""

    rows: tuple[Row, ...]
    hidden: Activation
    compute_ms: tuple[float, ...] = ()
    queue_ms: float = 0.0
    round_ms: float | None = None
    """How long these rows take to come back to a stage where no prompt piece holds them up; None: nobody knows."""
    slot: bool = True
    """A prompt piece may begin right behind it (`turns`); a head that says nothing of it means all groups."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """The last stage's answer to a group (lane `tok`); may hold fewer rows than the group had."""

    rows: tuple[Row, ...]
    tokens: tuple[int, ...]
    compute_ms: tuple[float, ...] = ()
    queue_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class End:
    """The session is over (also a cancel): free it at once, or park its first `park` positions, and keep a floor.

    Sent on `act` and on `pre`.
    """

    session: SessionId
    park: int = 0


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget the session's cache, up to generation `gen`: it was paused, or was parked and has to make room.

    Sent on `act` and on `pre`, and leaves a floor for those generations. A paused one comes back with a higher `gen`.
    """

    session: SessionId
    gen: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The last stage has seen `End` or `Drop` on both lanes (lane `tok`): what it freed is free on every stage.

    `gen` is the `Drop`'s; None: it answers an `End`.
    """

    session: SessionId
    gen: int | None = None


@dataclass(frozen=True, slots=True)
class Reset:
    """The ring was linked anew: every session below `below` is over, except the parked ones in `keep`.

    Sent on `act` alone, after both lanes passed a probe. Each stage strikes from `keep` what it does not hold parked,
    frees all others, and skips whatever still comes for a session below `below`; the last stage returns it on `tok`.
    """

    below: SessionId
    keep: tuple[SessionId, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """A stage had to end a session by itself; travels on to the head, which answers the client and sends `End`."""

    session: SessionId
    gen: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Probe:
    """A throwaway message that goes all the way round before a ring counts as ready; `lane` is "act" or "pre"."""

    nonce: int
    lane: str
    hops: int = 0


@dataclass(frozen=True, slots=True)
class Broken:
    """A neighbour or a link of this ring is gone; every session of the epoch ends. `stage` noticed it."""

    stage: int


RingMessage = Piece | PieceDone | Group | Tokens | End | Drop | Ended | Reset | Failed | Probe | Broken


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message on a lane of the ring: "act" (decode, control), "pre" (prompt pieces) or "tok" (answers)."""

    lane: str
    message: RingMessage
