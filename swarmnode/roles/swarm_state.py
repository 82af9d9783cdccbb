"""The swarm's document in a coordinator's hands: a change counts when a majority of the voters has it on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import trio

from swarmnode.errors import Conflict, InvalidRequest, NoSpace, NotCoordinator
from swarmnode.roles.ring_record import model_of
from swarmnode.roles.swarm_document import SwarmDocument, decode_document

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from swarmnode.catalog.manifest import Manifest
    from swarmnode.cluster.election_messages import Entry
    from swarmnode.cluster.join_book import JoinBook
    from swarmnode.cluster.node_book import NodeBook
    from swarmnode.cluster.token_book import TokenBook
    from swarmnode.cluster.voter_book import VoterBook
    from swarmnode.ids import NodeId

T = TypeVar("T")
MAX_REMOVED = 256
"""Removals that are remembered, some 90 bytes each; copies of a model that was removed before them are served again."""
NOT_KEPT = (Conflict, NoSpace, NotCoordinator)
"""What a change raises that was none in itself: another one came first, the disk is full, or it is over here."""


class Replica(Protocol):
    """Where the document is kept, on however many machines: a `voting.Voting`."""

    @property
    def entry(self) -> Entry:
        """The latest version."""

    async def write(self, document: bytes, expected: int, voters: tuple[NodeId, ...] | None = None) -> None:
        """See `voting.Voting.write`."""


class SwarmState:
    """One change at a time. One that raises Conflict or NoSpace leaves everything as it was; of one that raises
    NotCoordinator, or whose caller leaves, it shows at the next coordinator whether it was kept."""

    def __init__(self, replica: Replica) -> None:
        """Raises InvalidRequest for a damaged document."""
        self._replica = replica
        self._changing = trio.Lock()
        try:
            self._document = decode_document(replica.entry.document)
        except ValueError as error:
            raise InvalidRequest(f"the swarm's document cannot be read ({error}); restore it") from error

    @property
    def joins(self) -> JoinBook:
        return self._document.joins

    @property
    def nodes(self) -> NodeBook:
        return self._document.nodes

    @property
    def seats(self) -> VoterBook:
        """The nodes that may coordinate."""
        return self._document.voters

    @property
    def voters(self) -> tuple[NodeId, ...]:
        """Those of them that vote."""
        return self._replica.entry.voters

    def voter_names(self, voters: Sequence[NodeId] | None = None) -> list[str]:
        """What people call these nodes; None: those that vote."""
        names = {seat.node: seat.name for seat in self.seats.records()}
        return [names.get(node, node[:8]) for node in (self.voters if voters is None else voters)]

    @property
    def tokens(self) -> TokenBook:
        return self._document.tokens

    @property
    def models(self) -> Mapping[str, Manifest]:
        return self._document.models

    @property
    def removed(self) -> Mapping[str, float]:
        """See `SwarmDocument.removed`."""
        return self._document.removed

    @property
    def rings(self) -> Sequence[Mapping[str, Any]]:
        return self._document.rings

    @property
    def desired(self) -> Sequence[Mapping[str, Any]]:
        return self._document.desired

    @property
    def epoch(self) -> int:
        """See `SwarmDocument.epoch`."""
        return self._document.epoch

    @property
    def version(self) -> int:
        return self._replica.entry.version

    async def change(self, edit: Callable[[JoinBook, NodeBook], T]) -> T:
        """Apply `edit` to copies of the books and keep them."""
        return await self._edit(lambda draft: edit(draft.joins, draft.nodes))

    async def change_seats(self, edit: Callable[[VoterBook, NodeBook], T]) -> T:
        """The same, for who may coordinate."""
        return await self._edit(lambda draft: edit(draft.voters, draft.nodes))

    async def change_voters(self, voters: tuple[NodeId, ...]) -> None:
        """Who votes from now on."""
        async with self._changing:
            await self._replica.write(self._replica.entry.document, self.version, voters)

    async def keep_tokens(self, tokens: TokenBook) -> None:
        await self._put(tokens=tokens)

    async def keep_models(self, models: Mapping[str, Manifest], *, beside: bool = False) -> None:
        """The catalogue, without what was removed; with `beside` what was in it stays as well."""
        async with self._changing:
            removed = self._document.removed
            new = {name: manifest for name, manifest in models.items() if not removed or manifest.digest not in removed}
            await self._keep_parts(models={**(self._document.models if beside else {}), **new})

    async def drop_model(self, manifest: Manifest, now_s: float) -> None:
        """Out of the catalogue and into `removed`, with its rings and what was to be loaded again; one change."""
        async with self._changing:
            model, before = manifest.id, self._document
            dropped = [manifest, *(other for name, other in before.models.items() if name == model)]
            removed = {**before.removed, **{other.digest: now_s for other in dropped}}
            await self._keep_parts(
                models={name: other for name, other in before.models.items() if name != model},
                removed=dict(list(removed.items())[-MAX_REMOVED:]),
                rings=tuple(record for record in before.rings if model_of(record) != model),
                desired=tuple(record for record in before.desired if record.get("model") != model),
            )

    async def keep_rings(
        self, rings: Sequence[Mapping[str, Any]], desired: Sequence[Mapping[str, Any]] = (), epoch: int = 0
    ) -> None:
        """The records of all rings that whoever coordinates next should find again, of all models that it should load
        again where it does not, and the latest ring's epoch."""
        await self._put(rings=tuple(rings), desired=tuple(desired), epoch=max(self.epoch, epoch))

    async def _put(self, **parts: object) -> None:
        async with self._changing:
            await self._keep_parts(**parts)

    async def _keep_parts(self, **parts: object) -> None:
        """What is kept already is not written again."""
        if any(getattr(self._document, name) != value for name, value in parts.items()):
            await self._keep(self._document.with_parts(parts))

    async def _edit(self, edit: Callable[[SwarmDocument], T]) -> T:
        async with self._changing:
            draft = self._document.draft()
            result = edit(draft)
            await self._keep(draft)
            return result

    async def _keep(self, document: SwarmDocument) -> None:
        """Who waits for it may leave before the voters agree, and the next change begins with what is here then."""
        encoded = document.encode()
        try:
            await self._replica.write(encoded, self.version)
        finally:
            if self._replica.entry.document == encoded:
                self._document = document
