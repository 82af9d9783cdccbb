"""A node that may coordinate: it does while it is elected, and otherwise follows whoever does."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import trio

from swarmnode.catalog.registry import Registry
from swarmnode.catalog.workspace import sweep_removed
from swarmnode.cluster.node_book import NodeRecord
from swarmnode.cluster.voter_book import Seated
from swarmnode.errors import Conflict, InternalError, InvalidModel, NoSpace, NotCoordinator
from swarmnode.roles.coordinator import Coordinator
from swarmnode.roles.enrolment import Enrolment
from swarmnode.roles.file_server import serve_files
from swarmnode.roles.identity import SwarmAuthority
from swarmnode.roles.seats import Seats
from swarmnode.roles.swarm_document import SwarmDocument, decode_document
from swarmnode.roles.swarm_state import NOT_KEPT, SwarmState
from swarmnode.wire.address import parse_place
from swarmnode.wire.nursery import open_flat_nursery

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from swarmnode.ids import NodeId
    from swarmnode.roles.api_port import ApiPort
    from swarmnode.roles.context import NodeContext
    from swarmnode.roles.identity import NodeIdentity
    from swarmnode.roles.polling import PolledLinks
    from swarmnode.roles.voting import Voting
    from swarmnode.wire.link import Channel, Hello
    from swarmnode.wire.tls import SwarmTls

CATALOGUE_S = 5.0
"""How soon a model that was imported here is known to the other voters."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OfficeParts:
    """What of a node its office needs. `places` are where it answers as a coordinator; `follow` (None: another part of
    the node does it) forwards the API's calls while another node coordinates."""

    context: NodeContext
    kept: NodeIdentity
    tls: SwarmTls
    voting: Voting
    polled: PolledLinks
    port: ApiPort | None
    places: tuple[str, ...]
    follow: Callable[[], Awaitable[None]] | None = None


class Office:
    """`run` it; `coordinator` is there while this node coordinates."""

    def __init__(self, parts: OfficeParts) -> None:
        self.coordinator: Coordinator | None = None
        self._parts = parts
        self._followed: SwarmDocument | None = None
        """What another coordinator wrote; None while there is none to go by, as who was removed is known from it."""
        root = parts.context.settings.models_root
        self._files = Registry(root, lambda: self._known.models, lambda: self._known.removed)
        self._told: NodeId | None = None
        """Whom people heard that this node follows."""

    async def run(self) -> None:
        voting, root = self._parts.voting, self._parts.context.settings.models_root
        async with open_flat_nursery() as nursery:
            nursery.start_soon(partial(trio.to_thread.run_sync, sweep_removed, root, abandon_on_cancel=True))
            while True:
                if voting.coordinates:
                    await self._coordinate(voting.term)
                else:
                    await self._follow(voting.coordinator)

    def serves(self, kind: str) -> bool:
        """Whether a coordinator's channel is served here now: of a node that follows, the files of its catalogue."""
        return self.coordinator is not None or (kind == "files" and self._followed is not None)

    async def serve_channel(self, kind: str, hello: Hello, channel: Channel) -> None:
        """One that `serves`, to its end."""
        if self.coordinator is not None:
            await self.coordinator.serve_channel(kind, hello, channel)
        else:
            await serve_files(self._files, channel)

    @property
    def _known(self) -> SwarmDocument:
        return self._followed or SwarmDocument()

    async def settled(self) -> None:
        """Wait until this node coordinates, or others vote as well: then it may take their time, or be another."""
        voting = self._parts.voting
        while self.coordinator is None and voting.entry.voters == (voting.node,):
            await voting.changed()

    async def _coordinate(self, term: int) -> None:
        self._followed = None
        try:
            async with open_flat_nursery() as nursery:
                nursery.start_soon(self._end_with_term, term, nursery.cancel_scope)
                state = SwarmState(self._parts.voting)
                coordinator = self._make_coordinator(state, term)
                try:
                    await self._open(coordinator, state, nursery)
                    await trio.sleep_forever()
                finally:
                    self._close(coordinator)
        except (NotCoordinator, Conflict) as error:  # it was over before it had begun
            _log.warning("this node does not coordinate: %s", error)
        except NoSpace as error:
            _log.error("this node cannot coordinate: %s", error)
            await trio.sleep(CATALOGUE_S)

    async def _end_with_term(self, term: int, scope: trio.CancelScope) -> None:
        voting = self._parts.voting
        while voting.coordinates and voting.term == term:
            await voting.changed()
        scope.cancel()

    def _make_coordinator(self, state: SwarmState, term: int) -> Coordinator:
        parts = self._parts
        context, me = parts.context, parts.context.identity
        authority = SwarmAuthority.kept(parts.kept)
        if authority is None:
            raise InternalError(f"{parts.kept.folder} lost the swarm's key; restore it")
        keeper = NodeRecord(me.node, me.name, math.inf)
        enrolment = Enrolment(authority, state, parts.tls, parts.places, keeper=keeper)
        registry = Registry(context.settings.models_root, lambda: state.models, lambda: state.removed)
        return Coordinator(context, registry, enrolment, state, term=term)

    def _make_seats(self, coordinator: Coordinator, state: SwarmState) -> Seats:
        parts = self._parts
        me = parts.context.identity
        return Seats(
            Seated(me.node, me.name, parts.places),
            state,
            parts.voting,
            coordinator.enrolment,
            coordinator.dial_backs,
            admits=parts.context.settings.admit_voters,
            emit=parts.context.emit,
            told=coordinator.tell_places,
        )

    async def _open(self, coordinator: Coordinator, state: SwarmState, nursery: trio.Nursery) -> None:
        """Everything that a coordinator is, in `nursery`."""
        parts = self._parts
        coordinator.seats = seats = self._make_seats(coordinator, state)
        await nursery.start(coordinator.run)
        nursery.start_soon(seats.run)
        nursery.start_soon(_keep_catalogue, coordinator.registry, state)
        if parts.port is not None:
            await parts.port.serve(coordinator, state, parts.polled)
        self.coordinator, self._told = coordinator, None
        self._tell("coordinating", coordinator)

    def _close(self, coordinator: Coordinator) -> None:
        parts = self._parts
        self.coordinator = None
        if parts.port is not None:
            parts.port.forward()
        coordinator.dismiss()
        self._tell("resigned", coordinator)

    def _tell(self, event: str, coordinator: Coordinator) -> None:
        """People hear of it where it could have been another node."""
        if len(self._parts.voting.entry.voters) > 1:
            self._parts.context.emit(event, {"term": coordinator.term})

    async def _follow(self, coordinator: NodeId | None) -> None:
        """Until something changes: links with removed nodes end here, and calls go on to whoever coordinates."""
        parts, voting = self._parts, self._parts.voting
        async with trio.open_nursery() as nursery:
            document = decode_document(voting.entry.document)
            if revoked := document.nodes.revoked():
                parts.tls.revoke(revoked)
            self._followed = document
            seat = None if coordinator is None else document.voters.get(coordinator)
            if seat is not None and seat.node != self._told:
                self._told = seat.node
                parts.context.emit("following", {"node": seat.node, "name": seat.name})
            if parts.follow is not None and seat is not None:
                parts.context.roads.places = tuple(map(parse_place, seat.places))
                nursery.start_soon(parts.follow)
            entry = voting.entry
            while not voting.coordinates and voting.coordinator == coordinator and voting.entry is entry:
                await voting.changed()
            nursery.cancel_scope.cancel()


async def _keep_catalogue(registry: Registry, state: SwarmState) -> None:
    """What was imported here is known to whoever coordinates next; the log names each folder that is not served."""
    told: dict[str, str] = {}
    while True:
        told = await write_catalogue(registry, state, told)
        await trio.sleep(CATALOGUE_S)


async def write_catalogue(registry: Registry, state: SwarmState, told: Mapping[str, str]) -> dict[str, str]:
    """Once. Where nobody else may coordinate, a folder that is gone is gone; where others may, they can have its files.
    Returns why folders are not served, of which `told` is known."""
    problems = dict(told)
    try:
        problems = registry.problems()
        for name in sorted(name for name, why in problems.items() if told.get(name) != why):
            _log.warning("%s is not served: %s", name, problems[name])
        found = {manifest.id: manifest for manifest in registry.here()}
        alone = len(state.seats.records()) <= 1
        await state.keep_models(found, beside=not alone)
    except (InvalidModel, *NOT_KEPT) as error:
        _log.warning("the catalogue is not written down: %s", error)
    return problems
