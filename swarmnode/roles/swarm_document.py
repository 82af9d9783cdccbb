"""The swarm's document: who may join, who is in and who was removed, who may coordinate, the API tokens, the catalogue,
the rings that run and the models that are to stay loaded. Everything a new coordinator must know; small, and replaced
as a whole."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from swarmnode.catalog.manifest import Manifest
from swarmnode.cluster.join_book import JoinBook
from swarmnode.cluster.node_book import NodeBook
from swarmnode.cluster.token_book import TokenBook
from swarmnode.cluster.voter_book import VoterBook
from swarmnode.errors import Conflict
from swarmnode.wire.limits import MAX_DOCUMENT_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from swarmnode.ids import NodeId


@dataclass(frozen=True)
class SwarmDocument:
    """A value: whoever changes one works on a copy (`draft`)."""

    joins: JoinBook = field(default_factory=JoinBook)
    nodes: NodeBook = field(default_factory=NodeBook)
    voters: VoterBook = field(default_factory=VoterBook)
    tokens: TokenBook = field(default_factory=TokenBook)
    models: Mapping[str, Manifest] = field(default_factory=dict)
    """The catalogue, by id; the files may lie on other nodes."""
    removed: Mapping[str, float] = field(default_factory=dict)
    """When models were taken out of the swarm, Unix seconds, by their manifests' digests, the last one last: what lies
    of them on any disk is not served."""
    rings: tuple[Mapping[str, Any], ...] = ()
    """Those that run; see `ring_record`."""
    desired: tuple[Mapping[str, Any], ...] = ()
    """Models that are loaded again when their rings are lost; see `restoring`."""
    epoch: int = 0
    """Of the latest ring: each load that begins has the next one."""

    def draft(self) -> SwarmDocument:
        """A copy whose books may be changed."""
        return replace(
            self,
            joins=JoinBook(self.joins.records()),
            nodes=NodeBook(self.nodes.records()),
            voters=VoterBook(self.voters.records()),
        )

    def with_parts(self, parts: Mapping[str, Any]) -> SwarmDocument:
        """With other tokens, models or rings, by those names."""
        return replace(self, **parts)

    def encode(self) -> bytes:
        """Raises Conflict for one that is too large."""
        content = {
            "joins": self.joins.as_json(),
            "nodes": self.nodes.as_json(),
            "voters": self.voters.as_json(),
            "tokens": self.tokens.as_json(),
            "models": [self.models[name].model_dump(mode="json") for name in sorted(self.models)],
            "removed": dict(self.removed),
            "rings": list(self.rings),
            "desired": list(self.desired),
            "epoch": self.epoch,
        }
        data = json.dumps(content, separators=(",", ":")).encode()
        if len(data) > MAX_DOCUMENT_BYTES:
            raise Conflict(
                f"the swarm's document would have {len(data)} bytes, and {MAX_DOCUMENT_BYTES} are the most; remove "
                "models, API tokens or join tokens that nobody needs"
            )
        return data


def places_in(data: bytes) -> dict[NodeId, tuple[str, ...]]:
    """Where the nodes that may coordinate are reached; the rest is not looked at."""
    seated = json.loads(data).get("voters", ()) if data else ()
    return {record.node: record.places for record in VoterBook.from_json(seated).records()}


def decode_document(data: bytes) -> SwarmDocument:
    """Raises ValueError for what `encode` did not write; nothing at all is an empty document."""
    if not data:
        return SwarmDocument()
    try:
        content = json.loads(data)
        manifests = [Manifest.model_validate_json(json.dumps(model)) for model in content.get("models", ())]
        return SwarmDocument(
            joins=JoinBook.from_json(content["joins"]),
            nodes=NodeBook.from_json(content["nodes"]),
            voters=VoterBook.from_json(content.get("voters", ())),
            tokens=TokenBook.read(content.get("tokens", [])),
            models={manifest.id: manifest for manifest in manifests},
            removed=_read_removed(content.get("removed", {})),
            rings=tuple(content.get("rings", ())),
            desired=tuple(content.get("desired", ())),
            epoch=int(content.get("epoch", 0)),
        )
    except (KeyError, TypeError, ValidationError) as error:
        raise ValueError(f"it lacks a part or has a wrong one ({error!r:.200})") from error


def _read_removed(content: object) -> dict[str, float]:
    """An earlier version wrote a list, of digests that no manifest has any more."""
    return {str(digest): float(at_s) for digest, at_s in content.items()} if isinstance(content, dict) else {}
