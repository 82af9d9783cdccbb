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
_MIN_BYTES = PARK_MIN * _TOKEN_BYTES


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


class Parking:
    """All parked conversations, least recently used first. `exact`: one can only be continued at its whole length."""

    def __init__(self, *, exact: bool = False) -> None:
        self._exact = exact
        self._parked: dict[SessionId, Parked] = {}
        self._answered: tuple[Sequence[int], Prefix | None] | None = None
        """The last prompt and what it can continue: the first in line asks again at every step while it waits."""

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
        self.remove(parked)
        self._parked[parked.id] = parked

    def remove(self, parked: Parked) -> None:
        self._parked.pop(parked.id, None)
        self._answered = None

    def spoil(self, parked: Parked) -> None:
        """It is not to be continued any more."""
        parked.spoiled = True
        self._answered = None

    def idle(self, but: Parked | None = None) -> Iterator[Parked]:
        """Those that may go, in the order they should: nobody is copying from them."""
        return (parked for parked in self._parked.values() if not parked.pins and parked is not but)

    def longest(self, prompt: Sequence[int]) -> Prefix | None:
        """What shares most positions with the prompt, at least PARK_MIN; its last token is always left to be read.

        Of equals, one that the prompt continues as a whole (it can be taken over), else the last used.
        """
        if self._answered is None or self._answered[0] is not prompt:
            self._answered = prompt, self._longest(packed(prompt[:-1]))
        return self._answered[1]

    def _longest(self, wanted: bytes) -> Prefix | None:
        known = [parked for parked in reversed(self._parked.values()) if not parked.spoiled]
        if not known or len(wanted) < _MIN_BYTES:
            return None
        return _longest_whole(known, wanted) if self._exact else _longest_shared(known, wanted)


def _longest_whole(known: Sequence[Parked], wanted: bytes) -> Prefix | None:
    fitting = [parked for parked in known if wanted.startswith(parked.tokens)]
    source = max(fitting, key=lambda parked: parked.length, default=None)
    return Prefix(source, source.length) if source is not None and source.length >= PARK_MIN else None


def _longest_shared(known: Sequence[Parked], wanted: bytes) -> Prefix | None:
    """Most are dismissed by one compare: they do not share one token more than the best so far."""
    best, equal, more = None, b"", wanted[:_MIN_BYTES]
    for parked in known:
        if len(more) > len(equal) and parked.tokens.startswith(more):
            length = _common(parked.tokens, wanted, len(more))
            best, equal = Prefix(parked, length), wanted[: length * _TOKEN_BYTES]
            more = wanted[: len(equal) + _TOKEN_BYTES]
        elif best is not None and not best.is_whole and parked.tokens == equal:
            best = Prefix(parked, best.length)
    return best


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
