"""The KV budget of a ring: how many tokens its sessions may hold together, and who holds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarmnode.ids import SessionId

TYPICAL_TOKENS = 1024
"""What a chat that names no max_tokens reserves beyond its prompt (SWARM_SERVE_TYPICAL_TOKENS)."""
GROWTH_TOKENS = 256
"""How much such a chat asks for when it has used its reservation up."""


class KvBudget:
    """Reservations in tokens against one total; the caller keeps the order in which sessions ask."""

    def __init__(self, total_tokens: int) -> None:
        self.total_tokens = total_tokens
        self._held: dict[SessionId, int] = {}
        self._used = 0

    @property
    def used_tokens(self) -> int:
        return self._used

    @property
    def free_tokens(self) -> int:
        return self.total_tokens - self._used

    def held_by(self, session: SessionId) -> int:
        return self._held.get(session, 0)

    def reserve(self, session: SessionId, tokens: int) -> bool:
        """Raise the session's reservation to `tokens`; False (and no change) where that does not fit."""
        extra = tokens - self.held_by(session)
        if extra > self.free_tokens:
            return False
        if extra > 0:
            self._held[session] = tokens
            self._used += extra
        return True

    def shrink(self, session: SessionId, tokens: int) -> None:
        """Lower the session's reservation to `tokens`, where it is more."""
        surplus = max(0, self.held_by(session) - tokens)
        if surplus:
            self._held[session] -= surplus
            self._used -= surplus

    def transfer(self, giver: SessionId, taker: SessionId, tokens: int) -> None:
        """Hand `tokens` of one session's reservation to another's."""
        left = self.held_by(giver) - tokens
        if left:
            self._held[giver] = left
        else:
            del self._held[giver]
        self._held[taker] = self.held_by(taker) + tokens

    def release(self, session: SessionId) -> None:
        self._used -= self._held.pop(session, 0)
