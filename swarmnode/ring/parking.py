"""Conversations that ended and whose caches are kept on every stage: which of them a new prompt can continue (K5).

Tokens are kept as bytes: a prompt is held against hundreds of parked conversations with a few memory compares.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from swarmnode.ids import SessionId

PARK_MIN = 32
"""Positions below which nothing is parked or continued: the smallest prompt piece reads as many at once."""
MAX_PARKED = 256
"""Parked at once: a `Reset` names them all, and a prompt is held against each."""
_TOKEN_BYTES = array("i").itemsize


def packed(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


@dataclass(slots=True, eq=False)
class Parked:
    """A session's first positions, kept on every stage."""

    id: SessionId
    gen: int
    tokens: bytes = field(repr=False)
    """As `packed`: exactly those positions that every stage is known to hold."""
    held_tokens: int
    """Positions that some stage may hold: a step that was under way at the end left one more there."""
    pins: int = 0
    """Sessions that copy from it and whose first piece has not come back."""
    spoiled: bool = False
    """A stage lacks it: it goes as soon as nobody needs it."""

    @property
    def length(self) -> int:
        return len(self.tokens) // _TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Prefix:
    """The first `length` positions of a parked conversation."""

    source: Parked
    length: int

    @property
    def is_whole(self) -> bool:
        return self.length == self.source.length

    def better_than(self, other: Prefix) -> bool:
        return (self.length, self.is_whole) > (other.length, other.is_whole)


class Parking:
    """All parked conversations, least recently used first. `exact`: one can only be continued at its whole length."""

    def __init__(self, *, exact: bool = False) -> None:
        self._exact = exact
        self._parked: dict[SessionId, Parked] = {}

    def __len__(self) -> int:
        return len(self._parked)

    def __iter__(self) -> Iterator[Parked]:
        return iter(tuple(self._parked.values()))

    @property
    def ids(self) -> tuple[SessionId, ...]:
        return tuple(self._parked)

    @property
    def tokens(self) -> int:
        """Positions they hold."""
        return sum(parked.held_tokens for parked in self._parked.values())

    def add(self, parked: Parked) -> None:
        """Park it, or mark it as used just now."""
        self._parked.pop(parked.id, None)
        self._parked[parked.id] = parked

    def remove(self, parked: Parked) -> None:
        self._parked.pop(parked.id, None)

    def idle(self, but: Parked | None = None) -> Iterator[Parked]:
        """Those that may go, in the order they should: nobody is copying from them."""
        return (parked for parked in self._parked.values() if not parked.pins and parked is not but)

    def longest(self, prompt: Sequence[int]) -> Prefix | None:
        """What shares most positions with the prompt, at least PARK_MIN; its last token is always left to be read.

        Of equals, one that the prompt continues as a whole (it can be taken over), else the last used.
        """
        wanted = packed(prompt[:-1])
        if not self._parked or len(wanted) < PARK_MIN * _TOKEN_BYTES:
            return None
        best, begin = None, wanted[: PARK_MIN * _TOKEN_BYTES]
        for parked in reversed(self._parked.values()):
            if parked.spoiled or not parked.tokens.startswith(begin):
                continue
            found = Prefix(parked, self._shared(parked.tokens, wanted, len(begin)))
            if found.length and (best is None or found.better_than(best)):
                best, begin = found, wanted[: found.length * _TOKEN_BYTES]
        return best

    def _shared(self, parked: bytes, wanted: bytes, known: int) -> int:
        """Positions that can be continued; `known` bytes are known to be shared."""
        if self._exact:
            return len(parked) // _TOKEN_BYTES if wanted.startswith(parked) else 0
        return _common(parked, wanted, known)


def _common(one: bytes, other: bytes, known: int) -> int:
    """Tokens with which both begin; the first `known` bytes are known to be equal."""
    low, high = known // _TOKEN_BYTES, min(len(one), len(other)) // _TOKEN_BYTES
    if one.startswith(other[: high * _TOKEN_BYTES]):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        part = slice(low * _TOKEN_BYTES, middle * _TOKEN_BYTES)
        if one[part] == other[part]:
            low = middle
        else:
            high = middle
    return low
