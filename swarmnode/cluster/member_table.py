"""The table of members: written by whoever coordinates, held by everybody, so that it outlives its writer.

A table is known by its mark, (term, version): one coordinator writes in a term, and every change counts the version up.
So a mark says all that a digest would, and besides which rows are missing at its holder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from swarmnode.cluster.membership import NodeState
    from swarmnode.ids import NodeId

Mark = tuple[int, int]
NOTHING: Mark = (0, 0)
MAX_MEMBERS = 512
"""Rows of a table, and of those that left one remembered."""


@dataclass(frozen=True, slots=True)
class Row:
    """One member: what people call it, and what its coordinator believed of it."""

    node: NodeId
    name: str
    address: str
    """Where it listens; empty where it did not say."""
    state: NodeState


@dataclass(frozen=True, slots=True)
class Heading:
    """What is known of the swarm besides its members; `voters` are names. `open`: its API lets everybody in.
    `revocations`: how often this coordinator took an API token back."""

    coordinator: str = ""
    voters: tuple[str, ...] = ()
    open: bool = False
    revocations: int = 0


@dataclass(frozen=True, slots=True)
class Update:
    """What changed after version `since` until `mark`; since 0 it is the whole table."""

    mark: Mark
    since: int
    heading: Heading
    rows: tuple[Row, ...]
    gone: tuple[NodeId, ...] = ()


class MemberTable:
    """The coordinator's own copy. A row that does not fit drives out one of the dead, or else stays out."""

    def __init__(self, term: int) -> None:
        self._term = term
        self._version = 1
        self._heading = Heading()
        self._rows: dict[NodeId, tuple[int, Row]] = {}
        """Each with the version that it came in; the latest last."""
        self._gone: dict[NodeId, int] = {}
        self._whole_below = 0
        """Who holds less than this version gets everything: what left the table by then is not remembered."""

    @property
    def mark(self) -> Mark:
        return self._term, self._version

    @property
    def rows(self) -> Mapping[NodeId, Row]:
        return {node: row for node, (_, row) in self._rows.items()}

    def row(self, node: NodeId) -> Row | None:
        entry = self._rows.get(node)
        return None if entry is None else entry[1]

    def set_heading(self, heading: Heading) -> None:
        if heading != self._heading:
            self._heading = heading
            self._version += 1

    def put(self, row: Row) -> None:
        known = self._rows.get(row.node)
        if known is not None and known[1] == row:
            return
        if known is None and len(self._rows) >= MAX_MEMBERS and not self._make_room():
            return
        self._version += 1
        self._rows.pop(row.node, None)
        self._gone.pop(row.node, None)
        self._rows[row.node] = (self._version, row)

    def drop(self, node: NodeId) -> None:
        if self._rows.pop(node, None) is None:
            return
        self._version += 1
        self._gone[node] = self._version
        if len(self._gone) > MAX_MEMBERS:
            self._whole_below = self._gone.pop(next(iter(self._gone)))

    def since(self, held: Mark) -> Update | None:
        """What the holder of `held` lacks; None: nothing."""
        if held == self.mark:
            return None
        term, version = held
        if term != self._term or not self._whole_below <= version <= self._version:
            version = 0
        rows = tuple(row for at, row in self._rows.values() if at > version)
        gone = tuple(node for node, at in self._gone.items() if at > version) if version else ()
        return Update(self.mark, version, self._heading, rows, gone)

    def _make_room(self) -> bool:
        dead = next((node for node, (_, row) in self._rows.items() if row.state.gone), None)
        if dead is not None:
            self.drop(dead)
        return dead is not None


class KnownMembers:
    """A node's copy of its coordinator's table, as of the last update."""

    def __init__(self) -> None:
        self.mark = NOTHING
        self.heading = Heading()
        self.as_of_s: float | None = None
        """When the coordinator last confirmed it, by this node's clock; None: there is none."""
        self._rows: dict[NodeId, Row] = {}

    @property
    def rows(self) -> Mapping[NodeId, Row]:
        return self._rows

    def confirm(self, now: float) -> None:
        """The coordinator answered, and had nothing to add before."""
        if self.as_of_s is not None:
            self.as_of_s = now

    def take(self, update: Update, now: float) -> bool:
        """Take what is newer; False for what is not, or follows on rows that are missing here."""
        if update.mark <= self.mark:
            return False
        if update.since and (update.mark[0] != self.mark[0] or update.since > self.mark[1]):
            return False
        if not update.since:
            self._rows = {}
        for node in update.gone:
            self._rows.pop(node, None)
        self._rows |= {row.node: row for row in update.rows[:MAX_MEMBERS]}
        self.mark, self.heading, self.as_of_s = update.mark, update.heading, now
        return True
