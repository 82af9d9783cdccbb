"""What voters say to each other, and what an `Election` is told, wants done, and reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarmnode.ids import NodeId

Mark = tuple[int, int]
"""(term, version): which of two entries is later."""
NOTHING: Mark = (0, 0)
"""The mark of a node that was given no entry yet, or lost its disk."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A version of the document; `term` is that of the coordinator that wrote it, `voters` count from it on."""

    term: int
    version: int
    voters: tuple[NodeId, ...]
    document: bytes

    @property
    def mark(self) -> Mark:
        return self.term, self.version


@dataclass(frozen=True, slots=True)
class Stored:
    """What must be on disk before anybody is answered: without it a restarted voter could vote twice in a term."""

    term: int
    vote: NodeId | None
    entry: Entry


@dataclass(frozen=True, slots=True)
class AskVote:
    """`pre`: would you vote for me in this term? Nothing changes by asking, so a voter that was cut off disturbs nobody
    when it comes back."""

    term: int
    last: Mark
    pre: bool


@dataclass(frozen=True, slots=True)
class VoteAnswer:
    """`term` is the asked one where granted, else the answerer's own."""

    term: int
    granted: bool
    pre: bool


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of an entry's document, which has `size` of them, from `start` on; `voters` are the entry's."""

    voters: tuple[NodeId, ...]
    start: int
    size: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Append:
    """The coordinator's heartbeat, with a part of the entry of this mark where the receiver is not known to have it.
    Each of a coordinator's has a larger `number`."""

    term: int
    mark: Mark
    committed: Mark
    part: Part | None = None
    number: int = 0


@dataclass(frozen=True, slots=True)
class Appended:
    """What the sender has on disk; to a stale coordinator, the term that made it stale. Besides, how many bytes it has
    of the entry that beat `number` was about, while that is not whole."""

    term: int
    mark: Mark
    number: int = 0
    have_bytes: int = 0


VoterMessage = AskVote | VoteAnswer | Append | Appended


@dataclass(frozen=True, slots=True)
class Arrived:
    sender: NodeId
    message: VoterMessage


@dataclass(frozen=True, slots=True)
class Propose:
    """Make `document` the next version, if the present one is `expected` (compare-and-swap). `voters` None: as now."""

    document: bytes
    expected: int
    voters: tuple[NodeId, ...] | None = None


@dataclass(frozen=True, slots=True)
class ForceAlone:
    """A person says that the other voters are gone for good: go on as the only one. What they alone had is lost."""


@dataclass(frozen=True, slots=True)
class Learners:
    """Who else is given what this coordinator writes: nodes that may become voters, and that a person may promote."""

    nodes: frozenset[NodeId]


ElectionInput = Arrived | Propose | ForceAlone | Learners


@dataclass(frozen=True, slots=True)
class Persist:
    """To be on disk (fsync) before anything that follows is sent or announced."""

    stored: Stored


@dataclass(frozen=True, slots=True)
class SendTo:
    node: NodeId
    message: VoterMessage


Effect = Persist | SendTo


@dataclass(frozen=True, slots=True)
class Elected:
    """This voter coordinates: a majority holds an entry of its own term."""

    term: int


@dataclass(frozen=True, slots=True)
class SteppedDown:
    term: int
    why: str


@dataclass(frozen=True, slots=True)
class Following:
    """Another voter coordinates."""

    node: NodeId
    term: int


@dataclass(frozen=True, slots=True)
class Committed:
    """A majority has this entry: it is never lost while one of them can be started."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class ProposalRefused:
    """Nothing was changed: this voter does not coordinate, or the document is at `version` by now."""

    expected: int
    version: int
    why: str


ElectionEvent = Elected | SteppedDown | Following | Committed | ProposalRefused
