"""What a model's stage 0 does for people: requests, tokens a second, the last first token, and since when nothing."""

from __future__ import annotations

from collections import deque

RATE_S = 10.0
"""Throughput is of this long: some replies begin and end in it."""
SLOTS_PER_S = 10
"""Tokens are counted in slots of this length, so that any number of texts needs room for RATE_S of them; of the rate it
leaves out a hundredth at most."""


class HeadActivity:
    """Fed with a head's requests as they are opened and answered. Times are seconds of one monotonic clock."""

    def __init__(self, now: float) -> None:
        self.requests = 0
        """Opened since the stage was loaded."""
        self.last_ttft_s: float | None = None
        self._opened_s: dict[str, float] = {}
        self._awaiting_first: set[str] = set()
        self._slots: deque[tuple[int, int]] = deque()
        """Number of a slot and tokens in it, the latest last; those without any are left out."""
        self._busy_s = now

    @property
    def running(self) -> int:
        return len(self._opened_s)

    def opened(self, request: str, now: float) -> None:
        self.requests += 1
        self._opened_s[request] = self._busy_s = now
        self._awaiting_first.add(request)

    def gave(self, request: str, tokens: int, now: float) -> None:
        """Text of a reply, for which `tokens` were generated."""
        if request not in self._opened_s or tokens < 1:
            return
        if request in self._awaiting_first:
            self._awaiting_first.discard(request)
            self.last_ttft_s = now - self._opened_s[request]
        self._forget(now)
        slot = _slot(now)
        before = self._slots.pop()[1] if self._slots and self._slots[-1][0] == slot else 0
        self._slots.append((slot, before + tokens))

    def ended(self, request: str, now: float) -> None:
        if self._opened_s.pop(request, None) is not None:
            self._awaiting_first.discard(request)
            self._busy_s = now

    def tokens_per_s(self, now: float) -> float:
        self._forget(now)
        return sum(tokens for _, tokens in self._slots) / RATE_S

    def idle_s(self, now: float) -> float:
        """0 while a request runs."""
        return 0.0 if self._opened_s else now - self._busy_s

    def _forget(self, now: float) -> None:
        while self._slots and self._slots[0][0] <= _slot(now - RATE_S):
            self._slots.popleft()


def _slot(moment_s: float) -> int:
    return int(moment_s * SLOTS_PER_S)
