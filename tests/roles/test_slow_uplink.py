"""W5: one slow uplink for all connections of a node, full of a long prompt: heartbeats and others' tokens are on time.

What a small frame may wait for is one bounded burst: what the router's queue holds already, and what each bulk
connection had handed to the kernel. Everything else of the prompt waits in the node, on its own connection.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import trio
from test_roads import LANE, Neighbourhood
from toxics import FIFO_BYTES, READ_BYTES, ToxicProxy, Uplink, toxic_proxy

from swarmnode.wire.address import Address, ApiUrl
from swarmnode.wire.direct import NOTSENT_LOWAT_BYTES
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import LinkOptions
from swarmnode.wire.routes import DIRECT, POLLED, RELAYED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from swarmnode.roles.roads import Roads
    from swarmnode.wire.link import Channel, Hello

UPLINK_BYTES_PER_S = 1_250_000
BURST_S = (FIFO_BYTES + READ_BYTES + NOTSENT_LOWAT_BYTES) / UPLINK_BYTES_PER_S
"""0.37 s at 10 Mbit/s."""
MACHINE_S = 0.25
"""For a test machine that has other things to do."""
BEAT_LATE_S = 1.0
FOR_S = 2.0
PIECE_BYTES = 1 << 20


class Slow(Neighbourhood):
    """The attic reaches coordinator and cellar through one uplink; both note when frames come."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.late_s: dict[str, list[float]] = {"control": [], "steps": [], "prompts": []}
        self.uplink = Uplink(UPLINK_BYTES_PER_S)

    async def _hear(self, kind: str, _hello: Hello, channel: Channel) -> None:
        async for frame in channel:
            self.late_s[kind].append(trio.current_time() - frame.header["offset"] / 1e6)

    async def _serve(self, kind: str, hello: Hello, channel: Channel) -> None:
        await (super()._serve if kind == "relay" else self._hear)(kind, hello, channel)

    @contextmanager
    def narrowed(self, target: tuple[str, int]) -> Iterator[ToxicProxy]:
        with toxic_proxy(target) as proxy:
            proxy.there.uplink = self.uplink
            yield proxy


async def send_every(channel: Channel, interval_s: float, n_bytes: int) -> None:
    while True:
        now_us = int(trio.current_time() * 1e6)
        await channel.send(Frame("data", {"offset": now_us}, b"x" * n_bytes))
        await trio.sleep(interval_s)


@pytest.mark.parametrize(("route", "bursts"), [(DIRECT, 1), (RELAYED, 1), (POLLED, 2)])
async def test_small_frames_wait_for_no_more_than_one_burst_of_a_prompt(
    tmp_path: Path, route: str, bursts: int
) -> None:
    """In requests two: a push goes when the last one was answered."""
    home = Slow(tmp_path)
    async with home.running():
        api = ApiUrl(home.url.text).address
        with (
            home.narrowed((home.address.host, home.address.port)) as swarm_port,
            home.narrowed((api.host, api.port)) as api_port,
            home.narrowed((home.cellar_address.host, home.cellar_address.port)) as cellar,
        ):
            roads = home.roads(home.attic, (route, POLLED) if route == POLLED else (DIRECT, route))
            if route == POLLED:
                roads = home.roads(home.attic, (RELAYED, POLLED))
            roads.places = (Address(*swarm_port.address), ApiUrl(f"http://{api_port.address[0]}:{api_port.address[1]}"))
            to = [Address(*cellar.address)] if route == DIRECT else []
            await _load(home, roads, to, route)
    assert len(home.late_s["control"]) >= 5
    assert max(home.late_s["control"]) <= BEAT_LATE_S
    assert len(home.late_s["steps"]) >= 10
    assert max(home.late_s["steps"]) <= bursts * BURST_S + MACHINE_S
    assert sum(home.late_s["prompts"]) > 2 * BURST_S, "the uplink was full"


async def _load(home: Slow, roads: Roads, to: list[Address], route: str) -> None:
    """Beats, steps, and as much prompt as goes, for a while."""
    options = LinkOptions(LANE, node=home.cellar.node)
    async with (
        roads.to_coordinator("control") as control,
        roads.to_peer(home.cellar.node, to, "steps", options) as steps,
        roads.to_peer(home.cellar.node, to, "prompts", options) as prompts,
    ):
        assert steps.way.route == (DIRECT if route == DIRECT else RELAYED)
        assert control.way.route == (POLLED if route == POLLED else DIRECT)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_every, prompts.up, 0.0, PIECE_BYTES)
            nursery.start_soon(send_every, control.up, 0.3, 500)
            nursery.start_soon(send_every, steps.up, 0.1, 1500)
            await trio.sleep(FOR_S)
            nursery.cancel_scope.cancel()
        for channel in (control.up, steps.up, prompts.up):
            channel.abort()  # what is queued of the prompt would take minutes
