"""Whose token a coordinator let in lately: what a node goes by while there is no coordinator to ask."""

from __future__ import annotations

MAX_LET_IN = 64
LET_IN_S = 24 * 3600.0
"""A token may have been revoked since without this node hearing of it: a day is long enough to mend a coordinator."""


class LetIn:
    """Tokens by their hashes. One counts under the term in which it was let in: whoever coordinates in a later one may
    have revoked it. Times are Unix seconds."""

    def __init__(self) -> None:
        self._entries: dict[bytes, tuple[int, float]] = {}
        """Term and time of each, the latest last."""

    def admit(self, token: bytes, term: int, now: float) -> None:
        """A coordinator of `term` looked at it, and let it in."""
        self._entries.pop(token, None)
        self._entries[token] = (term, now)
        if len(self._entries) > MAX_LET_IN:
            del self._entries[next(iter(self._entries))]

    def refuse(self, token: bytes) -> None:
        self._entries.pop(token, None)

    def forget_all(self) -> None:
        self._entries.clear()

    def holds(self, token: bytes, term: int, now: float) -> bool:
        """Whether it may be let in here; a clock that was set back lets nobody in."""
        entry = self._entries.get(token)
        return entry is not None and entry[0] == term and 0 <= now - entry[1] < LET_IN_S
