"""The listener's side of one channel: HELLO, the handler, and a reason for the other side where either fails."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from swarmnode.errors import MAX_MESSAGE_CHARS, InternalError, SwarmError
from swarmnode.wire.frames import Frame
from swarmnode.wire.handshake import answer
from swarmnode.wire.nursery import alone
from swarmnode.wire.traffic import Route

if TYPE_CHECKING:
    from swarmnode.wire.link import Channel, ChannelHandler, Identity, Parameters, Standing
    from swarmnode.wire.traffic import Traffic

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Service:
    """What a listener offers on each channel."""

    handler: ChannelHandler
    identity: Identity
    traffic: Traffic | None
    standing: Standing | None = None

    async def serve(self, channel: Channel) -> None:
        """Run one channel to its end. Nothing is raised: a handler's failure must not end the listener."""
        async with channel:
            try:
                hello = await answer(channel, self._identity_on(channel.kind))
                count(channel, hello.identity, hello.parameters, self.traffic)
                await self.handler(channel.kind, hello, channel)
            except Exception as raised:
                _refuse(channel, _reason(channel, alone(raised)))

    def _identity_on(self, kind: str) -> Identity:
        return self.identity if self.standing is None else replace(self.identity, term=self.standing(kind))


def _reason(channel: Channel, error: BaseException) -> SwarmError:
    if isinstance(error, SwarmError):
        _log.info("a %s channel ended: %s", channel.kind, error)
        return error
    _log.error("a %s channel ended by a bug; the listener goes on", channel.kind, exc_info=error)
    return InternalError(f"the {channel.kind} channel's handler failed; see the log there")


def _refuse(channel: Channel, error: SwarmError) -> None:
    try:
        channel.send_nowait(Frame("refuse", {"code": error.code, "message": error.message[:MAX_MESSAGE_CHARS]}))
    except SwarmError:  # the link is broken or its queue full: the other side learns by the reset
        channel.abort()


def count(channel: Channel, peer: Identity, parameters: Parameters, traffic: Traffic | None) -> None:
    """From now on (and for what the handshake took) the channel counts on its route in `traffic`."""
    if traffic is None:
        return
    counts = traffic.counts(Route(channel.kind, peer.node, parameters.ring or "", parameters.lane or ""))
    counts.add(channel.counts)
    channel.counts = counts
