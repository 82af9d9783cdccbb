"""Find stop strings in text that arrives in pieces, holding back exactly what could still become one.

An Aho-Corasick automaton over characters: its state is the longest suffix of the text so far that begins some stop
string, and just that suffix is held back. The match that is complete first wins; of two that end together, the longer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class StopStep(NamedTuple):
    """`text` may be shown. `stop` is the stop string that ended the reply; then nothing more comes."""

    text: str
    stop: str | None = None


class StopMatcher:
    """One reply's matcher. Empty stop strings are ignored."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._depth = [0]
        self._match: list[str | None] = [None]
        for stop in stops:
            self._insert(stop)
        self._link()
        self._state = 0
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> StopStep:
        """Take more text; what is returned never contains any part of a stop string that matched."""
        if self._stopped:
            return StopStep("")
        seen = self._held + text
        for index, character in enumerate(text, start=len(self._held) + 1):
            self._state = self._step(self._state, character)
            stop = self._match[self._state]
            if stop is not None:
                self._stopped, self._held = True, ""
                return StopStep(seen[: index - len(stop)], stop)
        shown = len(seen) - self._depth[self._state]
        self._held = seen[shown:]
        return StopStep(seen[:shown])

    def finish(self) -> str:
        """The text held back, when the reply ended without a match."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _insert(self, stop: str) -> None:
        node = 0
        for character in stop:
            if character not in self._next[node]:
                self._next[node][character] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[node] + 1)
                self._match.append(None)
            node = self._next[node][character]
        if node:
            self._match[node] = stop

    def _link(self) -> None:
        """Breadth first: a node's failure link is its longest proper suffix that is also a node."""
        order = list(self._next[0].values())
        for node in order:
            for character, child in self._next[node].items():
                self._fail[child] = self._step(self._fail[node], character)
                order.append(child)
            if self._match[node] is None:
                self._match[node] = self._match[self._fail[node]]

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(character, 0)
