"""What a voter must find again after a crash: its term, its vote, and the latest version of the swarm's document."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from swarmnode.cluster.election_messages import Entry, Stored
from swarmnode.errors import InvalidRequest
from swarmnode.ids import NodeId
from swarmnode.private_files import read_bounded, write_private
from swarmnode.wire.limits import MAX_DOCUMENT_BYTES

if TYPE_CHECKING:
    from pathlib import Path

STATE_FILE = "swarm.json"
FORMAT = 2
MAX_FILE_BYTES = 2 * MAX_DOCUMENT_BYTES
"""The document, written for people to read."""


class Ballot:
    """One file, 0600, replaced as a whole (temp file, fsync, rename)."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def exists(self) -> bool:
        """Whether this node was ever given the document: from then on it takes part."""
        return self._path.exists()

    def read(self, voters: tuple[NodeId, ...]) -> Stored:
        """What is kept; `voters` those of a swarm that begins here. Raises InvalidRequest for a damaged file: an
        unreadable list of removed nodes must not let them in, and a vote that was forgotten must not be given twice."""
        try:
            return _read(json.loads(read_bounded(self._path, MAX_FILE_BYTES)), voters)
        except FileNotFoundError:
            return Stored(0, None, Entry(0, 0, voters, b""))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(
                f"the swarm's document {self._path} cannot be read ({error!r:.200}); restore it"
            ) from error

    def write(self, stored: Stored) -> None:
        """Raises OSError."""
        entry = stored.entry
        content = {
            "format": FORMAT,
            "term": stored.term,
            "vote": stored.vote,
            "entry": {"term": entry.term, "version": entry.version, "voters": list(entry.voters)},
            "document": json.loads(entry.document) if entry.document else None,
        }
        write_private(self._path, json.dumps(content, indent=1).encode())


def _read(content: dict[str, Any], voters: tuple[NodeId, ...]) -> Stored:
    if content["format"] == 1:  # before there were voters
        document = {part: content.get(part, []) for part in ("joins", "nodes", "rings")}
        return Stored(0, None, Entry(0, int(content["version"]), voters, _packed(document)))
    if content["format"] != FORMAT:
        raise ValueError(f"its format is {content['format']!r:.20}, this program reads {FORMAT}")
    vote, entry, document = content["vote"], content["entry"], content["document"]
    kept = Entry(
        term=int(entry["term"]),
        version=int(entry["version"]),
        voters=tuple(NodeId(str(voter)) for voter in entry["voters"]),
        document=b"" if document is None else _packed(document),
    )
    return Stored(int(content["term"]), None if vote is None else NodeId(str(vote)), kept)


def _packed(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
