"""From a manifest, options and offers to what each stage is told."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from swarmnode.api.backend import LoadOptions
from swarmnode.catalog.manifest import Architecture, FileEntry, Manifest
from swarmnode.catalog.registry import Registry
from swarmnode.catalog.safetensors_header import encode_header
from swarmnode.cluster.measured import Measured
from swarmnode.cluster.placement import ALL_CAPABILITIES, CPU_CAPABILITIES, RING_CAPABILITIES, PeerResources
from swarmnode.cluster.pricing import price_stage
from swarmnode.cluster.quantization import SERVE_INT4_FAST, SERVE_ON_CARD, SERVE_QUANTIZED
from swarmnode.config import VARIABLES, Settings, read_settings
from swarmnode.errors import LoadRefused
from swarmnode.ids import NodeId, RingId
from swarmnode.roles.plan_report import plan_report
from swarmnode.roles.planning import NOTHING_KNOWN, Known, PlannedRing, examine, files_here, model_shape, plan_ring

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30
PEERS = [PeerResources(NodeId(f"n{i}"), f"peer-{i}", (8 - i) * GIB) for i in range(4)]


def entry(path: str) -> FileEntry:
    return FileEntry(path=path, size=100, sha256="ab" * 32)


MANIFEST = Manifest(
    format=1,
    id="tiny",
    base="somewhere/tiny",
    architecture=Architecture(
        name="LlamaForCausalLM",
        model_type="llama",
        num_layers=6,
        hidden_size=64,
        vocab_size=1000,
        context_tokens=2048,
        kv_values_per_token_layer=128,
        layer_params=(1000,) * 6,
        embed_params=500,
        head_params=500,
    ),
    num_stages=2,
    boundaries=(4,),
    dtype="bfloat16",
    eos_token_ids=(2, 7),
    files=(
        entry("tokenizer/tokenizer.json"),
        entry("tokenizer/config.json"),
        entry("shards/stage-0/model.safetensors"),
        entry("shards/stage-1/model.safetensors"),
    ),
)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return read_settings(tmp_path, {})


def plan(options: LoadOptions, settings: Settings, manifest: Manifest = MANIFEST) -> PlannedRing:
    return plan_ring(manifest, options, PEERS, settings, RingId("r1"), 3)


def test_every_stage_is_told_its_layers_and_just_its_files(settings: Settings) -> None:
    planned = plan(LoadOptions(), settings)
    assert [(s.stage, s.num_stages, s.first_layer, s.end_layer, s.num_layers) for s in planned.specs] == [
        (0, 2, 0, 4, 6),
        (1, 2, 4, 6, 6),
    ]
    common = ["tokenizer/tokenizer.json", "tokenizer/config.json"]
    assert [[f.path for f in s.files] for s in planned.specs] == [
        [*common, "shards/stage-0/model.safetensors"],
        [*common, "shards/stage-1/model.safetensors"],
    ]
    assert {(s.ring, s.epoch, s.model, s.eos_token_ids) for s in planned.specs} == {("r1", (3, 0), "tiny", (2, 7))}


def test_another_stage_count_reads_the_shards_it_overlaps(settings: Settings) -> None:
    planned = plan(LoadOptions(num_stages=3), settings)
    shards = [[f.path[7:14] for f in s.files if f.path.startswith("shards/")] for s in planned.specs]
    assert shards == [["stage-0"], ["stage-0"], ["stage-1"]]


def test_one_stage_takes_everything(settings: Settings) -> None:
    (spec,) = plan(LoadOptions(num_stages=1), settings).specs
    assert (spec.first_layer, spec.end_layer) == (0, 6)
    assert len(spec.files) == 4


def test_all_stages_share_one_budget(settings: Settings) -> None:
    planned = plan(LoadOptions(), settings)
    assert {(s.kv_tokens, s.context_tokens, s.max_in_flight) for s in planned.specs} == {
        (planned.plan.kv_tokens, 2048, planned.plan.max_in_flight)
    }


@pytest.mark.parametrize(
    ("held_at_once", "running", "waiting"),
    [(None, 8, 8), (20, 8, 12), (8, 8, 0), (3, 3, 0)],
)
def test_r6_a_peer_holds_what_the_setting_says_served_or_waiting(
    settings: Settings, held_at_once: int | None, running: int, waiting: int
) -> None:
    planned = plan(LoadOptions(), replace(settings, max_in_flight=held_at_once))
    head = planned.specs[0]
    assert (head.max_in_flight, head.max_waiting) == (running, waiting)
    assert plan_report(planned)["max_in_flight"] == running


def test_r6_who_plans_a_ring_says_how_many_requests_it_holds() -> None:
    roles = {variable.name: variable.role for variable in VARIABLES}
    assert roles["SWARM_SERVE_MAX_IN_FLIGHT"] == roles["SWARM_SERVE_IN_FLIGHT"] == "coordinator"


def test_settings_reach_the_head(settings: Settings) -> None:
    changed = replace(settings, in_flight=3, typical_tokens=99, max_batch=2, schedule="source", prefill_chunk=64)
    head = plan(LoadOptions(), changed).specs[0]
    assert {spec.prefill_chunk for spec in plan(LoadOptions(), changed).specs} == {64}
    assert (head.max_in_flight, head.typical_tokens, head.max_group) == (3, 99, 2)
    assert head.schedule == "source"


@pytest.mark.parametrize("dtype", ["float16", "int8", ""])
def test_a_dtype_nobody_serves_is_refused_by_name(settings: Settings, dtype: str) -> None:
    with pytest.raises(LoadRefused, match="auto, float32, bfloat16") as refused:
        plan(LoadOptions(dtype=dtype), settings)
    assert refused.value.param == "dtype"
    assert repr(dtype) in str(refused.value)


def test_a_load_that_cannot_work_is_refused_before_anything_is_made(settings: Settings) -> None:
    with pytest.raises(LoadRefused, match="7 stages asked for, but the model has 6 layers"):
        plan(LoadOptions(num_stages=7), settings)


def without(capability: str, offers: list[PeerResources] = PEERS) -> list[PeerResources]:
    return [replace(offer, capabilities=ALL_CAPABILITIES - {capability}) for offer in offers]


def test_q1_the_models_own_quantization_serves_unless_the_load_asks_for_another(settings: Settings) -> None:
    trained = MANIFEST.model_copy(update={"quantization": {"method": "nf4"}})
    assert {s.quantization for s in plan(LoadOptions(), settings, trained).specs} == {"nf4"}
    assert {s.quantization for s in plan(LoadOptions(quantization="none"), settings, trained).specs} == {"none"}


def test_q1_with_too_few_capable_peers_the_next_best_serves_and_says_why(settings: Settings) -> None:
    asked = LoadOptions(quantization="int4-fast")
    fewer = plan_ring(MANIFEST, asked, without(SERVE_INT4_FAST), settings, RingId("r1"), 3)
    assert (fewer.quantization, fewer.asked_quantization, fewer.dtype) == ("nf4", "int4-fast", "bfloat16")
    assert "cannot hold int4-fast weights" in fewer.notice
    assert fewer.notice.endswith("served with nf4")
    neither = [replace(o, capabilities=RING_CAPABILITIES) for o in PEERS]
    full = plan_ring(MANIFEST, asked, neither, settings, RingId("r1"), 3)
    assert {s.quantization for s in full.specs} == {"none"}
    assert plan(asked, settings).notice == ""


def failing(why: str, *nodes: NodeId) -> Known:
    """As after a load over int4-fast that failed on these nodes for its kernels."""
    return Known(measured=lambda w: Measured(failed=dict.fromkeys(nodes, why) if w.quantization == "int4-fast" else {}))


def test_q2_a_peer_whose_kernels_failed_as_it_loaded_counts_as_one_without_them(settings: Settings) -> None:
    asked, failed = LoadOptions(quantization="int4-fast"), failing("torchao cannot be imported", PEERS[0].node)
    others = plan_ring(MANIFEST, asked, PEERS, settings, RingId("r1"), 3, failed)
    assert (others.quantization, others.notice) == ("int4-fast", "")
    assert [stage.peer.name for stage in others.plan.stages] == ["peer-1", "peer-2"]
    whys = {left.name: left.why for left in others.plan.left_out}
    assert whys["peer-0"] == "it lacks serve-int4-fast for int4-fast weights (torchao cannot be imported)"
    fewer = plan_ring(MANIFEST, asked, PEERS[:2], settings, RingId("r1"), 3, failed)
    assert fewer.quantization == "nf4"
    why = "peer peer-0 cannot hold int4-fast weights: torchao cannot be imported; served with nf4"
    assert fewer.notice == why


CARD = RING_CAPABILITIES | {SERVE_ON_CARD, SERVE_QUANTIZED}


def test_q2_a_card_and_a_cpu_serve_one_ring_each_priced_as_it_stores(settings: Settings) -> None:
    mixed = [replace(PEERS[0], capabilities=CARD | {SERVE_INT4_FAST}), PEERS[1]]
    planned = plan_ring(MANIFEST, LoadOptions(quantization="int4-fast"), mixed, settings, RingId("r1"), 3)
    assert ({spec.quantization for spec in planned.specs}, planned.notice) == ({"int4-fast"}, "")
    on_card, on_cpu = planned.plan.stages
    assert on_card.price.layers == int(4000 * 0.65 * 1024 / 64)
    assert on_cpu.price.layers == int(2000 * 0.65)
    assert on_cpu.price.head == int(500 * 1.05)


def test_q2_an_older_card_is_served_nf4_before_anything_is_fetched(settings: Settings) -> None:
    """The CPU beside it too: one method for a ring that was asked for one."""
    older = [replace(PEERS[0], capabilities=CARD), PEERS[1]]
    planned = plan_ring(MANIFEST, LoadOptions(quantization="int4-fast"), older, settings, RingId("r1"), 3)
    assert {spec.quantization for spec in planned.specs} == {"nf4"}
    assert planned.notice.startswith("peer peer-0 cannot hold int4-fast weights: serve-int4-fast is not declared there")
    assert "older than compute capability 8.0, torchao is not installed" in planned.notice
    assert planned.notice.endswith("served with nf4")
    bare = [replace(peer, capabilities=peer.capabilities - {SERVE_QUANTIZED}) for peer in older]
    full = plan_ring(MANIFEST, LoadOptions(quantization="int4-fast"), bare, settings, RingId("r1"), 3)
    assert full.quantization == "none"


def test_q2_int8_is_the_cpus_alone(settings: Settings) -> None:
    cards = [replace(peer, capabilities=CARD | {SERVE_INT4_FAST}) for peer in PEERS]
    planned = plan_ring(MANIFEST, LoadOptions(quantization="int8"), cards, settings, RingId("r1"), 3)
    assert planned.quantization == "bnb-int8"
    assert "its device is a card" in planned.notice
    assert not cards[0].capabilities >= CPU_CAPABILITIES


@pytest.mark.parametrize("asked", [None, "nf4"])
def test_q1_a_record_that_is_not_served_is_told_unless_the_load_says_what_it_wants(
    asked: str | None, settings: Settings
) -> None:
    trained = MANIFEST.model_copy(update={"quantization": {"method": "gptq", "bits": 4}})
    planned = plan(LoadOptions(quantization=asked), settings, trained)
    told = "its record says quantization {'method': 'gptq', 'bits': 4}, which stages do not serve; "
    assert planned.notice == ("" if asked else f"{told}served in full precision")
    assert planned.quantization == (asked or "none")


def test_q1_a_record_with_details_serves_with_its_method(settings: Settings) -> None:
    trained = MANIFEST.model_copy(update={"quantization": {"bits": 4, "compute_dtype": "bfloat16"}})
    planned = plan(LoadOptions(), settings, trained)
    assert (planned.quantization, planned.notice) == ("nf4", "")


@pytest.mark.parametrize(("asked", "served"), [("int4-fast", "nf4"), ("int8", "bnb-int8")])
def test_q2_blocks_that_the_packed_kernels_do_not_take_are_served_by_bitsandbytes(
    asked: str, served: str, settings: Settings
) -> None:
    known = Known(obstacles={asked: f"architecture 'X' cannot be served with {asked}: it has no self_attn.q_proj"})
    planned = plan_ring(MANIFEST, LoadOptions(quantization=asked), PEERS, settings, RingId("r1"), 3, known)
    assert ({spec.quantization for spec in planned.specs}, planned.asked_quantization) == ({served}, asked)
    assert planned.notice == f"{known.obstacles[asked]}; served with {served}"


EXPERTS = Known(obstacles={method: f"no {method} of experts" for method in ("int8", "int4-fast", "nf4", "bnb-int8")})


def test_q2_a_model_that_takes_no_quantization_is_refused_where_one_is_asked(settings: Settings) -> None:
    with pytest.raises(LoadRefused, match="no int4-fast of experts; load it without quantization") as refused:
        plan_ring(MANIFEST, LoadOptions(quantization="int4-fast"), PEERS, settings, RingId("r1"), 3, EXPERTS)
    assert refused.value.param == "quantization"
    trained = MANIFEST.model_copy(update={"quantization": {"method": "nf4"}})
    planned = plan_ring(trained, LoadOptions(), PEERS, settings, RingId("r1"), 3, EXPERTS)
    assert (planned.quantization, planned.notice) == ("none", "no nf4 of experts; served in full precision")


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
MODULES = [f"self_attn.{part}_proj" for part in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
MODULES += ["input_layernorm", "post_attention_layernorm"]
FUSED = ["self_attn.qkv_proj", *MODULES[3:]]


def on_disk(root: Path, manifest: Manifest, config: dict[str, object], shards: list[list[str]]) -> Manifest:
    """`manifest` with files under `root`: a config, shards with tensors of these names, in each the whole adapter."""
    contents = dict.fromkeys((file.path for file in manifest.files), b"{}")
    contents["tokenizer/config.json"] = json.dumps(config).encode()
    for stage, names in enumerate(shards):
        header = encode_header([(f"model.{name}.weight", "F32", (1,)) for name in names])
        contents[f"shards/stage-{stage}/model.safetensors"] = header + bytes(4 * len(names))
        adapter = encode_header(
            [(f"model.layers.{layer}.mlp.up_proj.lora_A.weight", "F32", (1,)) for layer in range(6)]
        )
        contents[f"shards/stage-{stage}/adapter.safetensors"] = adapter + bytes(4 * 6)
    for path, content in contents.items():
        (root / manifest.id / path).parent.mkdir(parents=True, exist_ok=True)
        (root / manifest.id / path).write_bytes(content)
    files = tuple(FileEntry(path=path, size=len(content), sha256="ab" * 32) for path, content in contents.items())
    written = manifest.model_copy(update={"files": files})
    (root / manifest.id / "servable.json").write_text(written.model_dump_json())
    return written


@pytest.mark.parametrize(
    ("config", "modules", "refused"),
    [
        ({}, MODULES, set()),
        ({}, FUSED, {"int8", "int4-fast"}),
        ({"num_local_experts": 4}, MODULES, {"int8", "int4-fast", "nf4", "bnb-int8"}),
    ],
    ids=["llama", "fused", "experts"],
)
def test_q2_what_cannot_be_had_is_seen_in_the_files(
    config: dict[str, object], modules: list[str], refused: set[str], tmp_path: Path
) -> None:
    manifest = on_disk(tmp_path, MANIFEST, LLAMA | config, [[f"layers.0.{module}" for module in modules]])
    found = examine(manifest, files_here(Registry(tmp_path), manifest)).obstacles
    assert set(found) == refused
    assert all(f"'LlamaForCausalLM' cannot be served with {method}: " in why for method, why in found.items())


def test_m4_a_model_that_records_no_split_is_cut_where_its_shards_are(tmp_path: Path, settings: Settings) -> None:
    """Five of six layers of one size are in the first shard: by parameters it would be three."""
    shards = [[f"layers.{layer}.mlp.up_proj" for layer in layers] for layers in (range(5), range(5, 6))]
    unrecorded = MANIFEST.model_copy(update={"boundaries": None})
    manifest = on_disk(tmp_path, unrecorded, LLAMA, [["embed_tokens", *shards[0]], [*shards[1], "norm"]])
    planned = plan_ring(
        manifest,
        LoadOptions(),
        PEERS,
        settings,
        RingId("r1"),
        3,
        examine(manifest, files_here(Registry(tmp_path), manifest)),
    )
    assert [(spec.first_layer, spec.end_layer) for spec in planned.specs] == [(0, 5), (5, 6)]
    own = [[file.path for file in spec.files if file.path.startswith("shards")] for spec in planned.specs]
    names = ("model", "adapter")
    assert own == [[f"shards/stage-{stage}/{name}.safetensors" for name in names] for stage in (0, 1)]
    (tmp_path / manifest.id / own[1][0]).write_bytes(b"")
    damaged = examine(manifest, files_here(Registry(tmp_path), manifest))
    assert damaged == NOTHING_KNOWN, "peers may have it whole"
    with pytest.raises(LoadRefused, match="not whole on this machine"):
        plan_ring(manifest, LoadOptions(), PEERS, settings, RingId("r1"), 3, damaged)


def test_q1_where_full_precision_does_not_fit_either_both_reasons_are_given(settings: Settings) -> None:
    small = [replace(offer, memory_bytes=1 << 20) for offer in without(SERVE_QUANTIZED)]
    with pytest.raises(LoadRefused, match=r"cannot hold nf4 weights: .* and with none: too little memory: stage 0"):
        plan_ring(MANIFEST, LoadOptions(quantization="nf4"), small, settings, RingId("r1"), 3)


@pytest.mark.parametrize(("chunk", "positions"), [(64, 64), (256, 256), (1000, 1000), (0, 1024), (4000, 1024)])
def test_l5_a_piece_of_the_size_that_is_sent_is_paid_for(settings: Settings, chunk: int, positions: int) -> None:
    """Every stage reads what stage 0 sends: its own environment says nothing of that."""
    first = plan(LoadOptions(), replace(settings, prefill_chunk=chunk)).plan.stages[0]
    shape = model_shape(MANIFEST)
    assert first.price == price_stage(shape, 0, first.end_layer, "bfloat16", "none", 8, positions)
    assert first.price.workspace == positions * 16 * shape.hidden_size * 2


def test_l5_a_plan_adds_up_to_what_a_stage_needs(settings: Settings) -> None:
    report = plan_report(plan(LoadOptions(), settings))
    assert (report["id"], report["state"], len(report["stages"])) == ("tiny", "planned", 2)
    for stage, peer in zip(report["stages"], PEERS, strict=False):
        parts = [stage[f"{part}_bytes"] for part in ("weight", "kv", "state", "worker", "workspace", "headroom")]
        assert stage["need_bytes"] == sum(parts)
        assert stage["weight_bytes"] == sum(stage[f"{part}_bytes"] for part in ("embedding", "layer", "head"))
        assert (stage["offered_bytes"], stage["peer"]) == (peer.memory_bytes, peer.name)
