"""Which chunk is fetched from whom: peers give what they have, the coordinator what no peer has. No I/O.

Every source asks for a batch when it has nothing to do. A batch that fails goes back, and its source is out; the
coordinator takes anything once it has waited, so that a slow peer delays a load and never holds it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence, Set

    from swarmnode.catalog.chunks import ChunkList

BATCH_BYTES = 16 << 20
"""Asked for at once: a second of a fast uplink, so that a source that joins late still finds work."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Chunks first … end-1 of a file, asked for as one range."""

    file: int
    first: int
    end: int

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        return tuple((self.file, index) for index in range(self.first, self.end))


class ChunkPool:
    """`wanted` lists the missing chunks by file. In which order this peer takes the batches follows from `seed`, one
    after the other where it is empty: two that fetch the same bytes at once seldom ask for the same, and give each
    other the rest. Orders that only began in different places would run into each other and go on side by side."""

    def __init__(self, wanted: Mapping[int, Sequence[int]], lists: Sequence[ChunkList], seed: str = "") -> None:
        order = [(file, index) for file in sorted(wanted) for index in sorted(wanted[file])]
        self._lists = lists
        self._free = dict.fromkeys(order)
        if seed:
            batches = list(iter(lambda: self._batch(lambda _: True), None))
            batches.sort(key=lambda batch: hashlib.sha256(f"{seed} {batch.pieces[0]}".encode()).digest())
            self._free = dict.fromkeys(piece for batch in batches for piece in batch.pieces)
        self._left = set(order)
        self._has: dict[str, Mapping[int, bytes]] = {}

    @property
    def over(self) -> bool:
        """Every chunk has arrived."""
        return not self._left

    @property
    def left_files(self) -> list[int]:
        """Files of which something has not arrived."""
        return sorted({file for file, _ in self._left})

    @property
    def promising(self) -> bool:
        """Of what has not arrived a peer has something, or it is under way."""
        return any(p not in self._free or any(self._holds(source, p) for source in self._has) for p in self._left)

    def offer(self, source: str, marks: Mapping[int, bytes]) -> None:
        """What a peer has: by file a byte for each chunk, 1 where it is there."""
        self._has[source] = marks

    def drop(self, source: str) -> None:
        """A peer gives nothing any more."""
        self._has.pop(source, None)

    def take(self, source: str) -> Batch | None:
        """The next batch for a peer, of what it has."""
        return self._batch(lambda piece: self._holds(source, piece))

    def take_rest(self, *, anything: bool, but: Collection[tuple[int, int]] = ()) -> Batch | None:
        """The next batch for the coordinator: what no peer has, or with `anything` whatever nobody fetches now; none of
        `but`."""

        def fits(piece: tuple[int, int]) -> bool:
            return piece not in but and (anything or not any(self._holds(source, piece) for source in self._has))

        return self._batch(fits)

    def waits_only_for(self, pieces: Set[tuple[int, int]]) -> bool:
        """All else has arrived."""
        return self._left <= pieces

    def done(self, file: int, index: int) -> None:
        self._left.discard((file, index))

    def give_back(self, batch: Batch) -> None:
        """What of it has not arrived is free again."""
        self._free.update(dict.fromkeys(piece for piece in batch.pieces if piece in self._left))

    def _holds(self, source: str, piece: tuple[int, int]) -> bool:
        marks = self._has.get(source, {}).get(piece[0], b"")
        return piece[1] < len(marks) and marks[piece[1]] == 1

    def _batch(self, fits: Callable[[tuple[int, int]], bool]) -> Batch | None:
        first = next((piece for piece in self._free if fits(piece)), None)
        if first is None:
            return None
        file, index = first
        chunks, end, size = self._lists[file], index, 0
        while (file, end) in self._free and fits((file, end)) and (not size or size + chunks.size(end) <= BATCH_BYTES):
            size += chunks.size(end)
            del self._free[(file, end)]
            end += 1
        return Batch(file, index, end)
