"""What the coordinator knows of a ring's links: where stages may be dialed, how their lanes travel, what is relayed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
import trio.testing

from swarmnode.api.backend import LoadOptions
from swarmnode.catalog.registry import Registry
from swarmnode.cluster.placement import PeerResources
from swarmnode.cluster.ring_life_messages import ProbeReturned, StageLinked
from swarmnode.compute.scripted_servable import write_scripted_servable
from swarmnode.config import read_settings
from swarmnode.errors import ProtocolError
from swarmnode.ids import NodeId, RingId
from swarmnode.roles.gateway import Gateway, _ring_status
from swarmnode.roles.loaded_ring import LoadedRing
from swarmnode.roles.planning import plan_ring
from swarmnode.roles.reports import LaneLink, LinkedStage, ReadyStage, read_report
from swarmnode.wire.bodies import pack_body, unpack_body
from swarmnode.wire.frames import Frame
from swarmnode.wire.traffic import Route, Traffic

if TYPE_CHECKING:
    from pathlib import Path

ONE, TWO = NodeId("1" * 32), NodeId("2" * 32)
CAPABILITIES = frozenset(("serve-n-stage", "serve-one-stage", "serve-concurrent", "serve-kv-budget"))


@pytest.fixture
def posted() -> list[tuple[NodeId, Frame]]:
    return []


@pytest.fixture
async def ring(tmp_path: Path, posted: list[tuple[NodeId, Frame]]) -> LoadedRing:
    """Over two stages, not loaded yet; five requests at most."""
    root = write_scripted_servable(tmp_path, "m", {"default": [7]}, layers=4, stages=2).parent
    peers = [PeerResources(node, node[:1], 1 << 32, None, CAPABILITIES) for node in (ONE, TWO)]
    settings = read_settings(tmp_path / "data", environ={"SWARM_SERVE_MAX_IN_FLIGHT": "5"})
    planned = plan_ring(Registry(root).get("m"), LoadOptions(num_stages=2), peers, settings, RingId("r"), 1)
    return LoadedRing(planned, lambda node, frame: posted.append((node, frame)), lambda _: None)


async def test_each_stage_is_told_all_addresses_of_the_next(
    ring: LoadedRing, posted: list[tuple[NodeId, Frame]]
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ring.run)
        await trio.testing.wait_all_tasks_blocked()
        ring.take_ready(0, ReadyStage(address="lan:1", addresses=["lan:1", "vpn:1"], kv_tokens=4096, pid=1))
        ring.take_ready(1, ReadyStage(address="old:2", kv_tokens=4096, pid=2))
        await trio.testing.wait_all_tasks_blocked()
        links = [unpack_body(frame.body) for _, frame in posted if frame.kind == "link"]
        assert links == [{"next": ["old:2"]}, {"next": ["lan:1", "vpn:1"]}]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("said", "told"), [((0, 0), 0), ((0, 2), 2), ((4, 2), 2)])
async def test_b4_the_head_is_told_the_least_that_a_card_takes(
    ring: LoadedRing, posted: list[tuple[NodeId, Frame]], said: tuple[int, int], told: int
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ring.run)
        for stage, rows in enumerate(said):
            ring.take_ready(stage, ReadyStage(address="lan:1", kv_tokens=4096, pid=1, max_group=rows))
        for stage in (0, 1):
            ring.feed(StageLinked(stage))
        (probe,) = [unpack_body(frame.body) for _, frame in posted if frame.kind == "probe_ring"]
        assert probe["max_group"] == told
        nursery.cancel_scope.cancel()


async def test_a_stage_is_shown_as_ready_only_while_its_peer_is_there(ring: LoadedRing) -> None:
    def phases() -> list[str]:
        return [stage["phase"] for stage in _ring_status(ring)["stages"]]

    assert phases() == ["starting"] * 2
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ring.run)
        for stage in (0, 1):
            ring.take_ready(stage, ReadyStage(address="lan:1", kv_tokens=4096, pid=1))
        for stage in (0, 1):
            ring.feed(StageLinked(stage))
        ring.feed(ProbeReturned())
        assert (ring.state, phases()) == ("ready", ["ready"] * 2)
        ring.part_from(1)
        assert (ring.state, phases()) == ("ready", ["ready", "away"]), "a connection is not the stage"
        ring.lose(0, "is gone")
        assert phases() == ["lost", "away"]
        nursery.cancel_scope.cancel()


async def test_a_rings_route_is_its_worst_lanes(ring: LoadedRing) -> None:
    ring.take_links(0, [LaneLink(lane="act", route="direct"), LaneLink(lane="pre", route="relayed")])
    assert ring.route == "relayed"
    ring.take_links(1, [LaneLink(lane="tok", route="polled")])
    assert ring.route == "polled"
    ring.take_links(1, [LaneLink(lane="tok", route="")])
    assert ring.route == "polled", "being linked anew, it is on no route yet"
    ring.take_links(1, [LaneLink(lane="tok", route="direct")])
    ring.take_links(0, [LaneLink(lane="act", route="direct"), LaneLink(lane="pre", route="direct")])
    assert ring.route == "direct"


@pytest.mark.parametrize("lie", [{"route": "teleported"}, {"frames": -1}, {"bytes": "many"}, {"lane": "x" * 200}])
def test_links_that_are_none_are_refused(lie: dict[str, object]) -> None:
    link = {"lane": "act", "route": "direct", **lie}
    with pytest.raises(ProtocolError, match=next(iter(lie))):
        read_report(LinkedStage, Frame("linked", {"ring": "r", "stage": 0}, pack_body({"links": [link]})))


async def test_status_says_how_many_requests_stage_0_was_told_to_serve(ring: LoadedRing) -> None:
    assert ring.plan.max_in_flight > ring.specs[0].max_in_flight == 5
    assert _ring_status(ring)["max_in_flight"] == 5


async def test_status_says_what_of_a_lane_was_relayed(ring: LoadedRing) -> None:
    traffic = Traffic()
    traffic.counts(Route("relayed", TWO, "r", "act")).gave(1000, 3)
    traffic.counts(Route("relayed", TWO, "r", "act")).took(50, 1)
    traffic.counts(Route("relayed", TWO, "another", "pre")).gave(7, 7)
    ring.take_links(
        0, [LaneLink(lane="act", route="relayed", frames=2, bytes=900), LaneLink(lane="pre", route="direct")]
    )
    coordinator: Any = SimpleNamespace(context=SimpleNamespace(traffic=traffic), rings=None)
    status = Gateway(cast("Any", coordinator))._ring_status(ring)
    act, pre = status["stages"][0]["links"]
    assert (act["frames"], act["bytes"], act["relayed_frames"], act["relayed_bytes"]) == (2, 900, 4, 1050)
    assert "relayed_frames" not in pre
    assert status["stages"][1]["links"] == []
    assert status["route"] == "relayed"


async def test_a_quantized_stage_is_shown_with_whose_kernels_serve_it(ring: LoadedRing) -> None:
    ring.take_ready(0, ReadyStage(address="lan:1", kv_tokens=4096, pid=1, kernels="fastcpu"))
    assert [stage["kernels"] for stage in _ring_status(ring)["stages"]] == ["fastcpu", None]
