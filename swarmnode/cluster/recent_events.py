"""The last events of a swarm, for whoever looks at it later, and how often each has happened."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

KEPT = 64
MAX_VALUE_CHARS = 300


class RecentEvents:
    """Names and values in the order they came; the oldest go first, and long texts are cut."""

    def __init__(self) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.counts: Counter[str] = Counter()
        """By name: how often, those that are no longer kept included."""

    def note(self, event: str, values: Mapping[str, object], unix_s: float) -> None:
        short = {key: value[:MAX_VALUE_CHARS] if isinstance(value, str) else value for key, value in values.items()}
        self.counts[event] += 1
        self._events.append({"time": round(unix_s, 1), "event": event, **short})

    def newest(self, count: int = KEPT) -> list[dict[str, Any]]:
        """The last `count`, the oldest of them first."""
        return list(self._events)[-count:] if count > 0 else []
