"""A node: one trio program with a swarm port, an API port where it coordinates, and the roles it was given."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import signal
import sys
import threading
import time
import uuid
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import trio

from swarmnode.catalog.store import ShardStore
from swarmnode.config import Settings, read_settings
from swarmnode.errors import Conflict, InvalidRequest, LinkBroken, NotCoordinator, ProtocolError
from swarmnode.ids import BootId, NodeId
from swarmnode.roles.ballot import STATE_FILE, Ballot
from swarmnode.roles.capabilities import find_abilities
from swarmnode.roles.context import NodeContext, PeerResources
from swarmnode.roles.enrolment import VOTER_ROLES, certify_self, keep_certified
from swarmnode.roles.identity import NodeIdentity, SwarmAuthority
from swarmnode.roles.joining import PeerMembership, address_towards, join_swarm
from swarmnode.roles.peer import Peer
from swarmnode.roles.polling import PolledLinks
from swarmnode.roles.roads import Roads
from swarmnode.roles.running_node import LOCK_NAME, RunningNode, read_running_node
from swarmnode.roles.swarm_document import places_in
from swarmnode.roles.voting import Voting
from swarmnode.wire.address import WILDCARDS, Address, parse_address, parse_place, reachable_here
from swarmnode.wire.deadlines import NODE_SHUTDOWN_S
from swarmnode.wire.direct import DirectTransport
from swarmnode.wire.link import COORDINATOR_KINDS, Identity
from swarmnode.wire.nursery import open_flat_nursery
from swarmnode.wire.tls import SwarmTls
from swarmnode.wire.traffic import Traffic

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

    from swarmnode.cluster.join_token import JoinToken
    from swarmnode.roles.api_port import ApiOptions, ApiPort
    from swarmnode.roles.office import Office
    from swarmnode.wire.address import ApiUrl
    from swarmnode.wire.link import Channel, Hello

COORDINATOR = "coordinator"
PEER = "peer"
EXIT_FORCED = 1
STDIN_READ_BYTES = 4096

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """What `swarmnode up` was asked for, parsed. `join` is for a peer that is no member of a swarm yet."""

    roles: tuple[str, ...]
    swarm_listen: Address | None
    """None: the address of this machine that reaches the coordinator, and any port."""
    api: ApiOptions | None
    join: JoinToken | None
    data_dir: Path | None
    name: str | None
    resources: PeerResources
    advertise: tuple[Address, ...] = ()
    """What other nodes are told to dial, all of it; empty: the address the swarm port is bound to."""
    advertise_api: ApiUrl | None = None
    """Where nodes that reach no swarm port find a coordinator's API port."""
    voter: bool = False
    """Ask to be able to coordinate; a coordinator can anyway."""
    end_with_stdin: bool = False
    """End when stdin does: a program that starts nodes holds it open, and none of them outlives that program."""

    def __post_init__(self) -> None:
        if self.voter and PEER not in self.roles and COORDINATOR not in self.roles:
            raise InvalidRequest("--voter is for a peer: one that may coordinate where the coordinator is gone")
        if COORDINATOR in self.roles and self.join is not None:
            raise InvalidRequest("--join is for peers; a coordinator is what others join")
        may_coordinate = COORDINATOR in self.roles or self.voter
        if self.advertise_api is not None and (not may_coordinate or self.api is None):
            raise InvalidRequest("--advertise-api is for a coordinator, or a --voter, with an API port")
        if self.swarm_listen is not None and self.swarm_listen.host in WILDCARDS and not self.advertise:
            raise InvalidRequest(
                f"--swarm-listen {self.swarm_listen} is every address of this machine; say with --advertise HOST:PORT "
                "which one the other nodes should dial"
            )
        for address in self.advertise:
            if address.host in WILDCARDS or address.port == 0:
                raise InvalidRequest(
                    f"--advertise {address} is nothing that others can dial; give HOST:PORT as they see this machine"
                )


async def run_node(options: NodeOptions, emit: Callable[[str, Mapping[str, object]], None]) -> None:
    """Run until SIGTERM, SIGINT or cancellation. `emit` gets the node's events, first of them `ready`."""
    settings = read_settings(options.data_dir)
    lock = _lock(settings)
    try:
        async with open_flat_nursery() as nursery:
            node = _Node(options, settings, emit)
            end = partial(_end_in_time, nursery.cancel_scope, node.say_goodbye)
            await nursery.start(_end_on_signal, nursery.cancel_scope, end)
            if options.end_with_stdin:
                nursery.start_soon(_end_with_stdin, end)
            await node.run()
    finally:
        os.close(lock)


class _Node:
    """Composition: a role is a service in the nursery, and the swarm port hands each channel to the role it is for."""

    def __init__(
        self, options: NodeOptions, settings: Settings, emit: Callable[[str, Mapping[str, object]], None]
    ) -> None:
        self._options = options
        self._settings = settings
        self._emit = emit
        self._voting: Voting | None = None
        self._office: Office | None = None
        self._peer: Peer | None = None

    async def run(self) -> None:
        kept = NodeIdentity.open(self._settings.data_dir)
        identity = _identity(self._options, kept.node)
        await self._become_member(kept, identity)
        identity = replace(identity, incarnation=kept.next_incarnation())
        ballot = Ballot(self._settings.data_dir / STATE_FILE)
        may_coordinate = COORDINATOR in self._options.roles or self._options.voter or ballot.exists
        authority = SwarmAuthority.kept(kept)
        tls = SwarmTls(kept.files, enrolment=authority is not None)
        transport = DirectTransport(tls)
        traffic = Traffic()
        wanted = self._options.swarm_listen
        if wanted is None:
            wanted = await trio.to_thread.run_sync(address_towards, kept.coordinators()[0])
        async with open_flat_nursery() as nursery:
            listen = partial(_listen, transport, self._serve_channel, identity, traffic, self._standing)
            address = await self._bind(wanted, listen, nursery, steady=may_coordinate)
            about = replace(identity, listen=tuple(map(str, self._options.advertise or (address,))))
            context = NodeContext(
                identity=about,
                settings=self._settings,
                transport=transport,
                traffic=traffic,
                emit=self._emit,
                roads=Roads(transport, about, kept.key, self._settings.link_routes),
            )
            ready: dict[str, object] = {"node": identity.node, "name": identity.name, "swarm": str(address)}
            port = await self._open_port(context, nursery)
            if port is not None:
                ready["api"] = port.url
            if COORDINATOR in self._options.roles and authority is not None:
                nursery.start_soon(keep_certified, authority, kept, VOTER_ROLES, tls)
            if may_coordinate:
                office = await self._take_part(context, kept, transport, tls, ballot, port, nursery)
                ready["coordinates"] = office.coordinator is not None
            if PEER in self._options.roles:
                self._start_peer(context, kept, tls, address, port, nursery)
            self._write_down(wanted, ready, context.identity)
            self._emit("ready", {**ready, "roles": list(self._options.roles), "pid": os.getpid()})
            await trio.sleep_forever()

    def say_goodbye(self) -> None:
        """To the coordinator, while the connection to it is there."""
        if self._peer is not None:
            self._peer.say_goodbye()

    async def _bind(
        self, wanted: Address, listen: Callable[..., Awaitable[None]], nursery: trio.Nursery, *, steady: bool
    ) -> Address:
        """The swarm port. `steady`: where any port will do it is that of the last start, since the other voters look
        for this one there."""
        before = read_running_node(self._settings.data_dir) if steady and wanted.port == 0 else None
        if before is not None:
            last = replace(wanted, port=parse_address(before.swarm).port)
            try:
                bound: Address = await nursery.start(listen, last)
            except Conflict as error:
                text = f"other voters may look for this node at {last}, where it was last: {error.message}"
                self._emit("warning", {"text": text})
            else:
                return bound
        bound = await nursery.start(listen, wanted)
        return bound

    def _write_down(self, wanted: Address, ready: Mapping[str, object], identity: Identity) -> None:
        """For `swarmnode doctor` on this machine."""
        api = ready.get("api")
        here = RunningNode(
            pid=os.getpid(),
            roles=self._options.roles,
            wanted=str(wanted),
            swarm=str(ready["swarm"]),
            advertised=identity.listen[0],
            api=None if api is None else str(api),
        )
        here.write(self._settings.data_dir)

    async def _become_member(self, kept: NodeIdentity, identity: Identity) -> None:
        """See to it that there is a certificate: from the node's own CA, from a token, or from an earlier start."""
        if COORDINATOR in self._options.roles:
            certify_self(SwarmAuthority.open(kept, time.time()), kept, VOTER_ROLES, time.time())
            return
        token = self._options.join
        if token is not None:
            kept.check_swarm(token.ca_hash)
        if kept.certified(time.time()):
            if token is not None:  # a member already; but the coordinator may have moved to where the token says
                named = tuple(parse_place(text) for text in token.addresses)
                known = tuple(place for place in kept.coordinators() if place not in named)
                kept.remember((*named, *known))
            return
        if token is None:
            raise InvalidRequest(
                f"{self._settings.data_dir} holds no certificate of a swarm that is still valid; run `swarmnode "
                "join-token` on the coordinator, and start this peer with --join TOKEN"
            )
        await join_swarm(token, kept, identity)
        self._emit("enrolled", {"node": kept.node, "coordinators": [str(place) for place in kept.coordinators()]})

    async def _open_port(self, context: NodeContext, nursery: trio.Nursery) -> ApiPort | None:
        if self._options.api is None:
            return None
        from swarmnode.roles.api_port import ApiPort, check_closed

        coordinator = COORDINATOR in self._options.roles
        if coordinator:
            check_closed(self._options.api, self._settings)
        port = ApiPort(self._options.api, context, self._emit)
        await port.open(nursery)
        if not coordinator:  # which warns of what it serves
            port.warn(enforced=self._options.api.closed)
        return port

    async def _take_part(
        self,
        context: NodeContext,
        kept: NodeIdentity,
        transport: DirectTransport,
        tls: SwarmTls,
        ballot: Ballot,
        port: ApiPort | None,
        nursery: trio.Nursery,
    ) -> Office:
        """In the elections of who coordinates, and in coordinating."""
        from swarmnode.roles.office import Office, OfficeParts

        begins = COORDINATOR in self._options.roles
        ways = context.roads.to_voter
        voting = self._voting = Voting(kept.node, ballot, ways, places_in, context.say_removed, begins=begins)
        polled = PolledLinks(transport.accept)
        await nursery.start(polled.run)
        await nursery.start(voting.run)
        follow = port.follow if port is not None and PEER not in self._options.roles else None
        places = (*context.identity.listen, *self._api_place())
        office = self._office = Office(OfficeParts(context, kept, tls, voting, polled, port, places, follow))
        nursery.start_soon(office.run)
        await office.settled()
        return office

    def _api_place(self) -> tuple[str, ...]:
        return () if self._options.advertise_api is None else (str(self._options.advertise_api),)

    def _start_peer(
        self,
        context: NodeContext,
        kept: NodeIdentity,
        tls: SwarmTls,
        address: Address,
        port: ApiPort | None,
        nursery: trio.Nursery,
    ) -> None:
        coordinator = COORDINATOR in self._options.roles
        places = ((reachable_here(address),) if coordinator else ()) + kept.coordinators()
        stands_at = (*context.identity.listen, *self._api_place()) if self._options.voter else ()
        self._peer = Peer(
            context,
            places,
            self._options.resources,
            ShardStore(self._settings.model_cache),
            PeerMembership(kept, tls, renews=not coordinator, voted=self._voted),
            None if port is None else port.follow,
            stands_at,
        )
        nursery.start_soon(self._join_as_peer, self._peer, context.roads)

    async def _join_as_peer(self, peer: Peer, roads: Roads) -> None:
        """What its stages can do is what its HELLO says; where there may be a card, finding out takes a while, which
        nothing else of this node waits for."""
        found = await find_abilities(self._options.resources.device)
        roads.declare(found.capabilities)
        if found.card is not None:
            peer.use_card(found.card)
        await peer.run()

    def _standing(self, kind: str) -> int:
        """The term to answer with; raises NotCoordinator for a coordinator's channel that this node does not serve."""
        coordinator = self._office_for(kind).coordinator if kind in COORDINATOR_KINDS else None
        return self._voted() if coordinator is None else coordinator.term

    def _voted(self) -> int:
        """The term that this node knows of as a voter."""
        return 0 if self._voting is None else self._voting.term

    async def _serve_channel(self, kind: str, hello: Hello, channel: Channel) -> None:
        if kind in ("steps", "prompts"):
            if self._peer is None:
                raise ProtocolError("this node holds no stages")
            coordinator = None if self._office is None else self._office.coordinator
            async with nullcontext() if coordinator is None else coordinator.hearing(hello, channel):
                await self._peer.serve_lane(hello, channel)
        elif kind == "shares":
            if self._peer is None:
                raise ProtocolError("this node keeps no files of models for stages")
            await self._peer.serve_shares(channel)
        elif kind == "votes":
            if self._voting is None:
                raise ProtocolError("this node has no part in elections")
            await self._voting.serve(hello, channel)
        else:
            await self._office_for(kind).serve_channel(kind, hello, channel)

    def _office_for(self, kind: str) -> Office:
        """While it serves these channels; raises NotCoordinator."""
        if self._office is None or not self._office.serves(kind):
            raise NotCoordinator(f"this node does not coordinate the swarm now{self._who_else()}")
        return self._office

    def _who_else(self) -> str:
        """As far as this node knows: only a voter is told."""
        if self._voting is None:
            return ""
        there = self._voting.coordinator
        if there is None:
            return ", and knows of no other that does: a majority of the voters has to be connected to elect one"
        return "; it is about to" if there == self._voting.node else f"; node {there[:8]} does"


async def _listen(
    transport: DirectTransport,
    handler: Callable[..., object],
    identity: Identity,
    traffic: Traffic,
    standing: Callable[[str], int],
    address: Address,
    *,
    task_status: trio.TaskStatus[Address],
) -> None:
    try:
        serve = partial(transport.listen, address, handler, identity, traffic=traffic, standing=standing)  # type: ignore[arg-type]
        await serve(task_status=task_status)
    except LinkBroken as error:
        raise Conflict(f"{error.message}; choose another --swarm-listen") from error


async def _end_on_signal(
    scope: trio.CancelScope, end: Callable[[], None], *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """The first signal ends the node; a second one, once its `scope` is cancelled, the process at once."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for _ in signals:
            if scope.cancel_called:
                os._exit(EXIT_FORCED)
            end()


async def _end_with_stdin(end: Callable[[], None]) -> None:
    """Wait for the end of stdin, which must be a pipe; what comes through it is ignored."""
    stdin = sys.stdin.fileno()
    while True:
        await trio.lowlevel.wait_readable(stdin)
        if not os.read(stdin, STDIN_READ_BYTES):
            break
    end()


def _end_in_time(scope: trio.CancelScope, say_goodbye: Callable[[], None]) -> None:
    """Cancel the node and start the clock of its end."""
    timer = threading.Timer(NODE_SHUTDOWN_S, os._exit, (EXIT_FORCED,))
    timer.daemon = True
    timer.start()
    say_goodbye()
    scope.cancel()


def _identity(options: NodeOptions, node: NodeId) -> Identity:
    return Identity(
        node=node,
        boot=BootId(uuid.uuid4().hex),
        name=options.name or _host_name(os.uname().nodename, node),
        roles=options.roles,
    )


def _host_name(host: str, node: NodeId) -> str:
    """A name that every host's gives, whatever it holds."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "", host.split(".")[0])[:48].strip("_-")
    return f"{plain or 'node'}-{node[:4]}"


def _lock(settings: Settings) -> int:
    """Make the data directory and hold it for this process; raises Conflict where another node uses it."""
    path = settings.data_dir / LOCK_NAME
    try:
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidRequest(f"data directory {settings.data_dir} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise Conflict(f"another node uses {settings.data_dir}; give this one its own --data-dir") from None
    return lock
