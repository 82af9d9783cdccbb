"""What travels at a load: the coordinator's `load` and the node's `init`, there and back, and what does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from swarmnode.catalog.manifest import FileEntry
from swarmnode.compute.worker_spec import WorkerSpec
from swarmnode.errors import ProtocolError
from swarmnode.ids import ModelId, NodeId, RingId
from swarmnode.roles.load_spec import LoadSpec
from swarmnode.wire.bodies import pack_body, unpack_body
from swarmnode.wire.frames import Frame, FrameDecoder, encode

LOAD = LoadSpec(
    ring=RingId("r1"),
    epoch=(4, 0),
    stage=1,
    nodes=(NodeId("a"), NodeId("b"), NodeId("c")),
    model=ModelId("tiny"),
    files=(FileEntry(path="shards/stage-1/model.safetensors", size=5, sha256="0f" * 32),),
    scripted=False,
    dtype="bfloat16",
    quantization="int8",
    eos_token_ids=(2, 7),
    num_stages=3,
    first_layer=4,
    end_layer=6,
    num_layers=9,
    context_tokens=2048,
    min_context_tokens=1024,
    kv_tokens=8192,
    max_in_flight=8,
    max_waiting=8,
    max_group=0,
    prefill_chunk=256,
    schedule="cost",
    typical_tokens=1024,
    step_costs=True,
)
WORKER = WorkerSpec(
    ring="r1",
    epoch=4,
    stage=1,
    num_stages=3,
    folder="/data/models/tiny",
    shards=("shards/stage-1/model.safetensors",),
    first_layer=4,
    end_layer=6,
    num_layers=9,
    scripted=False,
    dtype="bfloat16",
    quantization="int8",
    device="cpu",
    threads=2,
    eos_token_ids=(2, 7),
    context_tokens=2048,
    min_context_tokens=1024,
    kv_tokens=8192,
    max_in_flight=8,
    max_waiting=8,
    prefill_chunk=256,
    max_group=0,
    schedule="cost",
    typical_tokens=1024,
)


def travelled() -> tuple[dict[str, Any], dict[str, Any]]:
    """The load as a frame, through bytes."""
    head, body = encode(Frame("load", LOAD.header(), pack_body(LOAD.body())))
    (frame,) = FrameDecoder().feed(bytes(head) + bytes(body))
    return frame.header, unpack_body(frame.body)


def test_a_load_comes_back_as_it_was() -> None:
    assert LoadSpec.read(*travelled()) == LOAD


@pytest.mark.parametrize("name", sorted(LOAD.body()))
def test_a_load_that_lacks_something_names_it(name: str) -> None:
    header, body = travelled()
    del body[name]
    with pytest.raises(ProtocolError, match=name):
        LoadSpec.read(header, body)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "../etc"),
        ("model", 5),
        ("kv_tokens", -1),
        ("kv_tokens", 1 << 40),
        ("num_layers", True),
        ("num_layers", "9"),
        ("first_layer", 1.0),
        ("files", [{"path": "../../x.json", "size": 1, "sha256": "0f" * 32}]),
        ("files", [{"path": "tokenizer/a.json", "size": -1, "sha256": "0f" * 32}]),
        ("files", 5),
        ("eos_token_ids", ["two"]),
        ("eos_token_ids", None),
        ("schedule", "fastest"),
        ("schedule", 1),
        ("quantization", "int3"),
        ("quantization", None),
        ("sources", None),
        ("sources", [["node"]]),
        ("sources", [[1, "127.0.0.1:1"]]),
        ("sources", [["node", "127.0.0.1:1"]] * 17),
    ],
)
def test_a_load_with_something_odd_is_refused(name: str, value: object) -> None:
    header, body = travelled()
    with pytest.raises(ProtocolError, match="the load does not fit"):
        LoadSpec.read(header, {**body, name: value})


def test_a_workers_settings_come_back_as_they_were() -> None:
    assert WorkerSpec.from_map(unpack_body(pack_body(WORKER.as_map()))) == WORKER


def test_settings_of_a_later_version_are_ignored() -> None:
    assert WorkerSpec.from_map({**WORKER.as_map(), "from_the_future": 1}) == WORKER


@pytest.mark.parametrize("name", sorted(set(WORKER.as_map()) - {"memory_bytes", "step_costs"}))
def test_a_setting_that_is_missing_is_named(name: str) -> None:
    values = WORKER.as_map()
    del values[name]
    with pytest.raises(ProtocolError, match=name):
        WorkerSpec.from_map(values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ring", 5),
        ("folder", None),
        ("stage", "1"),
        ("threads", True),
        ("kv_tokens", 4096.0),
        ("scripted", 1),
        ("step_costs", "on"),
        ("shards", "shards"),
        ("shards", [1]),
        ("eos_token_ids", {"2": 1}),
        ("eos_token_ids", [2, True]),
    ],
)
def test_a_setting_of_another_type_is_named(name: str, value: object) -> None:
    with pytest.raises(ProtocolError, match=rf"setting {name}=.* is not of type"):
        WorkerSpec.from_map({**WORKER.as_map(), name: value})


def test_the_stage_spec_names_whole_paths_and_the_ends_of_the_ring() -> None:
    spec = WORKER.stage_spec()
    assert [str(file) for file in spec.files] == ["/data/models/tiny/shards/stage-1/model.safetensors"]
    assert (spec.first_layer, spec.end_layer, spec.is_first, spec.is_last) == (4, 6, False, False)
