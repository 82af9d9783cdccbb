"""What a member may say to a coordinator: only of its own ring, stage and requests, and only files of a manifest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
from contexts import node_context

from swarmnode.api.backend import TextDelta
from swarmnode.catalog.registry import Registry
from swarmnode.cluster.ring_life_messages import StageDown
from swarmnode.compute.scripted_servable import write_scripted_servable
from swarmnode.config import read_settings
from swarmnode.errors import ProtocolError, SwarmError
from swarmnode.ids import BootId, NodeId, RequestId, RingId
from swarmnode.roles.coordinator import Coordinator
from swarmnode.roles.file_server import _locate
from swarmnode.roles.requests import RequestStream
from swarmnode.wire.bodies import pack_body
from swarmnode.wire.frames import Frame
from swarmnode.wire.link import Identity
from swarmnode.wire.memory import MemoryNetwork

if TYPE_CHECKING:
    from pathlib import Path

    from swarmnode.roles.reports import ReadyStage

HEAD, TAIL, OTHER = NodeId("head"), NodeId("tail"), NodeId("other")


@dataclass
class Ring:
    """Of two stages, with what was fed to it."""

    ring: RingId
    nodes: tuple[NodeId, ...]
    requests: dict[str, RequestStream] = field(default_factory=dict)
    gauges: dict[int, dict[str, int]] = field(default_factory=dict)
    ready: dict[int, ReadyStage] = field(default_factory=dict)
    fed: list[object] = field(default_factory=list)
    ending: bool = False

    @property
    def head(self) -> NodeId:
        return self.nodes[0]

    def stage_of(self, node: NodeId) -> int | None:
        return self.nodes.index(node) if node in self.nodes else None

    def take_ready(self, stage: int, report: ReadyStage) -> None:
        self.ready[stage] = report

    def take_failure(self, stage: int, code: str, why: str) -> None:
        self.fed.append(StageDown(stage, code, why))

    def feed(self, event: object) -> None:
        self.fed.append(event)

    def take_reply(self, stream: RequestStream, frame: Frame) -> None:
        stream.put(frame)


@dataclass
class House:
    """A coordinator with two rings, and a request that runs on the first."""

    coordinator: Coordinator
    ring: Ring
    foreign: Ring
    stream: RequestStream
    cancelled: list[bool]

    def hear(self, node: NodeId, frame: Frame) -> None:
        self.coordinator._take(node, frame)


@pytest.fixture
def house(tmp_path: Path) -> House:
    house = Identity(NodeId("house"), BootId("b"), "house")
    context = node_context(house, MemoryNetwork(), read_settings(tmp_path, environ={}))
    coordinator = Coordinator(context, Registry(tmp_path), cast("Any", None))
    ring, foreign = Ring(RingId("ours"), (HEAD, TAIL)), Ring(RingId("theirs"), (OTHER, TAIL))
    coordinator.rings.running = cast("Any", {ring.ring: ring, foreign.ring: foreign})
    cancelled: list[bool] = []
    stream = RequestStream(RequestId("wanted"), lambda: cancelled.append(True))
    ring.requests["wanted"] = stream
    return House(coordinator, ring, foreign, stream, cancelled)


REPLIES = [
    Frame("accepted", {"request": "wanted", "prompt_tokens": 1}),
    Frame("text", {"request": "wanted", "text": "not theirs to say", "n": 1}),
    Frame("error", {"request": "wanted", "code": "stalled", "message": "ended by another"}),
    Frame(
        "done",
        {"request": "wanted", "finish_reason": "stop", "completion_tokens": 1, "prompt_tokens": 1},
        pack_body({}),
    ),
]


@pytest.mark.parametrize("frame", REPLIES, ids=lambda frame: frame.kind)
@pytest.mark.parametrize("liar", [TAIL, OTHER, NodeId("no ring's")])
async def test_only_the_head_of_a_requests_own_ring_may_answer_it(house: House, liar: NodeId, frame: Frame) -> None:
    """Another stage of the same ring, and another ring's head, may know the id; their word counts for nothing."""
    house.hear(liar, frame)
    assert not house.stream.ended
    assert not house.stream.accepted
    house.hear(HEAD, Frame("text", {"request": "wanted", "text": "true", "n": 1}))
    assert await house.stream.next() == TextDelta("true", 1)


REPORTS = [
    Frame("progress", {"ring": "ours", "stage": 0, "phase": "loading", "done": 1, "total": 2}),
    Frame("linked", {"ring": "ours", "stage": 0}),
    Frame("probed", {"ring": "ours", "ms": 1.0}),
    Frame("stage_failed", {"ring": "ours", "stage": 0, "code": "stage_lost", "message": "a lie"}),
    Frame("broken", {"ring": "ours", "epoch": [1, 0], "stage": 0}),
    Frame("unloaded", {"ring": "ours", "stage": 0}),
    Frame("gauges", {"ring": "ours", "stage": 0}, pack_body({"sessions": 5})),
    Frame("stage_ready", {"ring": "ours", "stage": 0}, pack_body({"address": "x:1", "kv_tokens": 1, "pid": 1})),
]


@pytest.mark.parametrize("frame", REPORTS, ids=lambda frame: frame.kind)
def test_a_report_about_another_ring_ends_the_liars_link(house: House, frame: Frame) -> None:
    with pytest.raises(ProtocolError, match="not part of"):
        house.hear(OTHER, frame)
    assert (house.ring.fed, house.ring.gauges, house.ring.ready) == ([], {}, {})


@pytest.mark.parametrize("frame", REPORTS, ids=lambda frame: frame.kind)
def test_a_report_counts_for_the_stage_that_its_sender_holds(house: House, frame: Frame) -> None:
    """It says stage 0; the link it came on is stage 1's."""
    house.hear(TAIL, frame)
    assert 0 not in house.ring.gauges
    assert 0 not in house.ring.ready
    for event in house.ring.fed:
        assert getattr(event, "stage", 1) == 1


@pytest.mark.parametrize("kind", ["open", "cancel", "load", "unload", "link", "probe_ring"])
def test_a_peer_cannot_command(house: House, kind: str) -> None:
    """What only coordinators say is no input here: nothing of it reaches a ring."""
    header = {"request": "wanted", "ring": "ours", "epoch": [1, 0], "stage": 1}
    with pytest.raises(ProtocolError):
        house.hear(TAIL, Frame(kind, header, pack_body({})))
    assert house.ring.fed == []
    assert house.cancelled == []


# -- files

TRICKS = [
    "../../identity/key.pem",
    "/etc/passwd",
    "shards/../../secret",
    "shards//../manifest.json",
    "manifest.json",
    "shards\\..\\secret",
    "shards/stage-0/script.json\x00",
    "shards/stage-0/script.json/",
    "./shards/stage-0/script.json",
    "SHARDS/stage-0/script.json",
    "shards/stage-0/\u202escript.json",
    "~/.ssh/id_ed25519",
    "",
    "x" * 256,
]
MODELS = ["../scripted", "/scripted", "scripted/../scripted", "scripted\x00", "SCRIPTED", "..", "", "x" * 96]


def fetch(tmp_path: Path, **changes: object) -> Path:
    model = write_scripted_servable(tmp_path / "models", "scripted", {"default": [7]}, layers=4, stages=1)
    registry = Registry(model.parent)
    entry = next(file for file in registry.get("scripted").files if file.path.startswith("shards/"))
    right = {"model": "scripted", "path": entry.path, "size": entry.size, "sha256": entry.sha256, "offset": 0}
    path, _, _ = _locate(registry, Frame("fetch", {**right, **changes}))
    return path


def test_the_right_question_is_answered(tmp_path: Path) -> None:
    assert fetch(tmp_path).is_file()


@pytest.mark.parametrize("path", TRICKS)
def test_no_path_leads_out_of_the_manifest(tmp_path: Path, path: str) -> None:
    with pytest.raises(SwarmError):
        fetch(tmp_path, path=path)


@pytest.mark.parametrize("model", MODELS)
def test_no_model_id_leads_out_of_the_catalogue(tmp_path: Path, model: str) -> None:
    with pytest.raises(SwarmError):
        fetch(tmp_path, model=model)


@pytest.mark.parametrize("kind", ["data", "fetched", "end", "open"])
def test_a_files_channel_takes_fetch_only(tmp_path: Path, kind: str) -> None:
    with pytest.raises(SwarmError, match="takes fetch frames"):
        _locate(Registry(tmp_path), Frame(kind, {}))


async def test_rings_that_are_over_are_spoken_of_without_harm(house: House) -> None:
    house.hear(OTHER, Frame("unloaded", {"ring": "gone", "stage": 0}))
    await trio.lowlevel.checkpoint()
    assert house.foreign.fed == []
