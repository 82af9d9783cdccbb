"""The seam between nodes: channels that carry frames, and the two calls that make them. Direct, relayed, polled and
in-memory links all look like this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import trio

from swarmnode.errors import from_wire
from swarmnode.wire import limits
from swarmnode.wire.routes import DIRECT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from swarmnode.ids import BootId, NodeId, RingId
    from swarmnode.ring.messages import Epoch
    from swarmnode.wire.address import Address
    from swarmnode.wire.certificates import NodeCertificate
    from swarmnode.wire.frames import Frame
    from swarmnode.wire.traffic import Counts, Traffic

CHANNEL_KINDS = ("control", "requests", "files", "shares", "votes", "api", "relay", "steps", "prompts")
"""Each has a connection of its own, so that nothing small waits behind something big."""
JOIN_KIND = "join"
"""The one channel for a node that has no certificate yet."""
SERVED_BY = {
    "control": "coordinator",
    "requests": "coordinator",
    "files": "coordinator",
    "shares": "peer",
    "votes": "coordinator",
    "api": "coordinator",
    "relay": "coordinator",
    JOIN_KIND: "coordinator",
    "steps": "peer",
    "prompts": "peer",
}
"""The role a listener's certificate must hold: a peer cannot pass for the coordinator."""
COORDINATOR_KINDS = frozenset(kind for kind, role in SERVED_BY.items() if role == "coordinator") - {"votes"}
"""Only whoever coordinates now serves these."""
DIALED_BY = "peer"
"""The role a dialer's certificate must hold."""
PROTOCOL = (3, 3)
"""Oldest and newest protocol this program speaks. Whoever makes a frame or a key a must raises the newest, and the
oldest where it cannot do without. 2: beats name an incarnation and a table's mark, polled requests a digest.
3: voters' entries come in parts."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a node says of itself in HELLO and WELCOME."""

    node: NodeId
    boot: BootId
    name: str
    roles: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()
    term: int = 0
    listen: tuple[str, ...] = ()
    incarnation: int = 0
    """Of the node as it started; 0 for what has no part in membership."""
    protocol: tuple[int, int] = PROTOCOL


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a channel is for, beyond its kind: set for the lanes of a ring."""

    ring: RingId | None = None
    epoch: Epoch | None = None
    lane: str | None = None
    stage: int | None = None


NO_PARAMETERS = Parameters()


@dataclass(frozen=True, slots=True)
class Hello:
    """The dialer's first frame, as the listener got it."""

    identity: Identity
    parameters: Parameters = NO_PARAMETERS


@dataclass(frozen=True, slots=True)
class Welcome:
    """The listener's answer: the protocol both will speak, and who it is."""

    protocol: int
    identity: Identity


class Channel(ABC):
    """Frames in order, both ways. One task receives at a time; any task may send.

    As a context manager: a clean exit lets queued frames out and ends the channel; an exception or a cancel resets it
    at once. When the link breaks, every waiting task gets LinkBroken, after the frames that came before.
    """

    kind: str
    counts: Counts
    welcome: Welcome | None = None
    """On the dialer's side: who answered."""
    certified: NodeCertificate | None = None
    """Who the other end proved to be; None on links within this process and on `join` channels."""
    route: str = DIRECT
    """How its connection travels, as far as this end can tell: whoever is behind a relay knows its own leg only."""
    source: str = ""
    """On the listener's side: the address that the connection came from."""

    @property
    def direct_source(self) -> str:
        """`source` where it is the other end's own: what was relayed or polled comes from a tunnel's end, which may be
        on this machine."""
        return self.source if self.route == DIRECT else ""

    @property
    def heard_bytes(self) -> int:
        """Bytes that came from the other end. They grow for as long as it lives and something goes either way: on a
        link with credit, who only reads is heard by the credit that it gives."""
        return self.counts.bytes_in

    @abstractmethod
    async def send(self, frame: Frame) -> None:
        """Queue a frame, waiting while the queue is full. Raises LinkBroken, ProtocolError."""

    @abstractmethod
    def send_nowait(self, *frames: Frame) -> None:
        """Queue frames, all or none: small ones leave in one write. Raises Overloaded when the queue is full,
        LinkBroken, ProtocolError."""

    @abstractmethod
    async def receive(self) -> Frame:
        """The next frame. Raises trio.EndOfChannel after a clean end, LinkBroken, ProtocolError, or the error the
        other side ended the channel with (a handler that raises SwarmError, a refused hello)."""

    def take_at_once(self, take: Callable[[Frame], bool]) -> None:  # noqa: B027 - only links that are read by a task can
        """Offer frames to `take` as they arrive while `receive` waits, in the task that reads the link: a pass of the
        scheduler less. It must not wait; what it returns False for, and all that comes until `receive` is called
        again after it has given that out, is left to `receive`, as is everything on links that cannot do this.
        `receive` raises what `take` raises."""

    @abstractmethod
    async def flush(self) -> None:
        """Wait until the link took all that was queued, so that no more than one caller's piece waits in memory.
        Raises LinkBroken."""

    @abstractmethod
    def end_sending(self) -> None:
        """No more frames from here, behind those that are queued; the other end's may still come."""

    @abstractmethod
    async def aclose(self) -> None:
        """Let queued frames out (for CHANNEL_CLOSE_S at most), then end the channel in both directions."""

    @abstractmethod
    def abort(self) -> None:
        """End the channel at once; what is queued is lost and the other side gets LinkBroken."""

    @staticmethod
    def _unless_refused(frame: Frame) -> Frame:
        if frame.kind == "refuse":
            raise from_wire(frame.header["code"], frame.header["message"])
        return frame

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.aclose()
        else:
            self.abort()

    def __aiter__(self) -> AsyncIterator[Frame]:
        return self

    async def __anext__(self) -> Frame:
        try:
            return await self.receive()
        except trio.EndOfChannel:
            raise StopAsyncIteration from None


if TYPE_CHECKING:
    Standing = Callable[[str], int]
    """Asked for each channel's kind before WELCOME: the coordinator's term as this node knows it, or the error that
    turns the channel down."""
    ChannelHandler = Callable[[str, Hello, Channel], Awaitable[None]]
    """Serves one channel: (channel kind, hello, channel). Returning ends the channel in good order;
    a SwarmError ends it and is raised at the other side, too."""


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """What `dial` takes besides the obvious."""

    parameters: Parameters = NO_PARAMETERS
    traffic: Traffic | None = None
    node: NodeId | None = None
    """Who must answer; None: any node of the right role."""
    window_bytes: int = limits.STREAM_WINDOW_BYTES
    """What the other end may send on one channel ahead of who reads it here."""


NO_OPTIONS = LinkOptions()


class Link(Protocol):
    """One connection to another node, for as many channels as it takes."""

    @property
    def channels(self) -> int:
        """How many are open now."""

    @property
    def over(self) -> bool:
        """The connection has ended: nothing can be opened any more."""

    async def wait_over(self) -> None: ...

    def open(self, kind: str) -> AbstractAsyncContextManager[Channel]:
        """A channel on it; inside the block it is up (WELCOME came).

        Raises Overloaded where the other end allows no more, LinkBroken, or the error the listener refused with.
        """


class Transport(Protocol):
    """Makes channels: a `direct.DirectTransport` or, with virtual time, a `memory.MemoryNetwork`."""

    def dial(
        self,
        address: Address,
        kind: str,
        identity: Identity,
        options: LinkOptions = ...,
    ) -> AbstractAsyncContextManager[Channel]:
        """Open a channel on a connection of its own; inside the block the link is up (WELCOME came).

        Raises LinkBroken where nobody answers in time, or the error the listener refused with.
        """

    def connect(
        self,
        address: Address,
        identity: Identity,
        options: LinkOptions = ...,
    ) -> AbstractAsyncContextManager[Link]:
        """A connection that lives as long as the block, for channels of the same kind. Raises LinkBroken."""

    async def listen(
        self,
        address: Address,
        handler: ChannelHandler,
        identity: Identity,
        *,
        traffic: Traffic | None = None,
        standing: Standing | None = None,
        task_status: trio.TaskStatus[Address] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve channels until cancelled; started with the address that was bound (port 0: any free one)."""


class CarriedTransport(Transport, Protocol):
    """One whose links can travel over any stream: through a relay, or in plain requests."""

    def connect_over(
        self, stream: trio.abc.Stream, identity: Identity, options: LinkOptions = ...
    ) -> AbstractAsyncContextManager[Link]:
        """`connect`, over a stream that reaches the other node already."""

    async def accept(self, stream: trio.abc.Stream, source: str) -> None:
        """Serve a stream that came by another way as if it had come to the listener, to its end."""
