"""The coordinator's document on disk: who may still join, who is in, who was removed, and the rings that run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from swarmnode.cluster.join_book import JoinBook
from swarmnode.cluster.node_book import NodeBook
from swarmnode.errors import InvalidRequest
from swarmnode.private_files import read_bounded, write_private

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

T = TypeVar("T")
FORMAT = 1
MAX_FILE_BYTES = 4 << 20
"""Ten thousand nodes with four serials each take about 3 MiB."""


class SwarmState:
    """A change is on disk (temp file, fsync, rename) before it is answered, and takes effect only then."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidRequest for a damaged file: an unreadable list of removed nodes must not let them in."""
        self._path = path
        self._changing = trio.Lock()
        self.version, self.joins, self.nodes, self.rings = _read(path)

    async def change(self, edit: Callable[[JoinBook, NodeBook], T]) -> T:
        """Apply `edit` to copies and keep them; whatever it raises leaves everything as it was."""
        async with self._changing:
            joins, nodes = JoinBook(self.joins.records()), NodeBook(self.nodes.records())
            result = edit(joins, nodes)
            await self._keep(joins, nodes, self.rings)
            return result

    async def keep_rings(self, rings: Sequence[Mapping[str, Any]]) -> None:
        """The records of all rings that a coordinator should find again after a restart; what is kept already is not
        written again."""
        async with self._changing:
            if list(rings) != list(self.rings):
                await self._keep(self.joins, self.nodes, tuple(rings))

    async def _keep(self, joins: JoinBook, nodes: NodeBook, rings: tuple[Mapping[str, Any], ...]) -> None:
        document = {
            "format": FORMAT,
            "version": self.version + 1,
            "joins": joins.as_json(),
            "nodes": nodes.as_json(),
            "rings": list(rings),
        }
        data = json.dumps(document, indent=1).encode()
        await trio.to_thread.run_sync(write_private, self._path, data)
        self.version, self.joins, self.nodes, self.rings = self.version + 1, joins, nodes, rings


def _read(path: Path) -> tuple[int, JoinBook, NodeBook, tuple[Mapping[str, Any], ...]]:
    try:
        document = json.loads(read_bounded(path, MAX_FILE_BYTES))
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {document['format']!r:.20}, this program reads {FORMAT}")
        joins, nodes = JoinBook.from_json(document["joins"]), NodeBook.from_json(document["nodes"])
        return int(document["version"]), joins, nodes, tuple(document.get("rings", ()))
    except FileNotFoundError:
        return 0, JoinBook(), NodeBook(), ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"the swarm's document {path} cannot be read ({error!r:.200}); restore it") from error
