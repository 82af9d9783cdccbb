"""Whose token a coordinator let in lately: what a node goes by while there is no coordinator to ask."""

from __future__ import annotations

Under = tuple[int, int]
"""A coordinator's term, and how many tokens it had revoked."""
MAX_LET_IN = 64
LET_IN_S = 24 * 3600.0
"""For a node that is cut off, and hears of no revocation: a day is long enough to mend a coordinator."""


class LetIn:
    """Tokens by their hashes. One counts under what it was let in under: whoever coordinates in a later term may have
    revoked it, and so may the same one since. Times are Unix seconds."""

    def __init__(self) -> None:
        self._entries: dict[bytes, tuple[Under, float]] = {}
        """With the time of each, the latest last."""

    def admit(self, token: bytes, under: Under, now: float) -> None:
        """A coordinator looked at it, and let it in, no earlier than it had told this node of `under`."""
        self._entries.pop(token, None)
        self._entries[token] = (under, now)
        if len(self._entries) > MAX_LET_IN:
            del self._entries[next(iter(self._entries))]

    def refuse(self, token: bytes) -> None:
        self._entries.pop(token, None)

    def forget_all(self) -> None:
        self._entries.clear()

    def holds(self, token: bytes, under: Under, now: float) -> bool:
        """Whether it may be let in here; a clock that was set back lets nobody in."""
        entry = self._entries.get(token)
        return entry is not None and entry[0] == under and 0 <= now - entry[1] < LET_IN_S
