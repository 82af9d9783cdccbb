"""What a listener of a test does with a channel, where several folders want the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarmnode.wire.link import Channel, Hello


async def echo(_kind: str, _hello: Hello, channel: Channel) -> None:
    """Send back whatever comes, until the channel ends."""
    async for frame in channel:
        await channel.send(frame)
