"""What `model-import --base` makes of a PEFT adapter's directory, and everything it refuses."""

from __future__ import annotations

import json
import math
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from swarmnode.catalog.adapter import read_adapter_config, read_scales
from swarmnode.catalog.adapter_import import import_adapter
from swarmnode.catalog.importing import import_model
from swarmnode.catalog.registry import Registry
from swarmnode.cluster.pricing import price_stage
from swarmnode.errors import Conflict, InvalidModel, InvalidRequest, ModelNotFound
from swarmnode.roles.planning import model_shape

if TYPE_CHECKING:
    from pathlib import Path

    from swarmnode.catalog.manifest import Manifest

Q = "base_model.model.model.layers.{}.self_attn.q_proj.{}"
UP = "base_model.model.model.layers.{}.mlp.up_proj.{}"
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "someone/tiny-llama",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "up_proj"],
    "bias": "none",
}


def tensors() -> dict[str, Any]:
    rng = np.random.default_rng(5)
    shapes = {}
    for layer in range(4):
        shapes |= {Q.format(layer, "lora_A.weight"): (4, 64), Q.format(layer, "lora_B.weight"): (64, 4)}
        shapes |= {UP.format(layer, "lora_A.weight"): (4, 64), UP.format(layer, "lora_B.weight"): (96, 4)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write(folder: Path, weights: dict[str, Any] | None = None, **changes: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    save_file(tensors() if weights is None else weights, folder / "adapter_model.safetensors")
    return str(folder)


def test_m4_an_adapter_and_its_base_are_a_servable_of_adapters(servable: Manifest, root: Path, tmp_path: Path) -> None:
    made = import_adapter(write(tmp_path / "tuned"), servable.id, root, model_id="tuned")
    assert Registry(root).get("tuned") == made
    assert (made.export, made.num_stages, made.boundaries) == ("adapters", servable.num_stages, servable.boundaries)
    assert set(servable.files) <= set(made.files)
    assert made.boundaries is not None
    (cut,) = made.boundaries
    original = tensors()
    for stage, layers in enumerate((range(cut), range(cut, 4))):
        shard = load_file(root / "tuned" / f"shards/stage-{stage}/adapter.safetensors")
        names = {name for name in original if int(name.split(".")[4]) in layers}
        assert set(shard) == {name.removeprefix("base_model.model.") for name in names}
        for name in names:
            assert (shard[name.removeprefix("base_model.model.")] == original[name]).all()


def test_the_bases_files_take_no_second_place_on_the_disk(servable: Manifest, root: Path, tmp_path: Path) -> None:
    import_adapter(write(tmp_path / "tuned"), servable.id, root, model_id="tuned")
    for entry in servable.files:
        assert (root / "tuned" / entry.path).samefile(root / servable.id / entry.path)
    shutil.rmtree(root / servable.id)
    assert Registry(root).get("tuned").id == "tuned"


def test_what_peft_resolves_by_patterns_is_written_out(servable: Manifest, root: Path, tmp_path: Path) -> None:
    weights = tensors()
    weights[Q.format(1, "lora_A.weight")] = np.zeros((2, 64), np.float32)
    weights[Q.format(1, "lora_B.weight")] = np.zeros((64, 2), np.float32)
    patterns = {"rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"up_proj": 16}}
    source = write(tmp_path / "tuned", weights, use_rslora=True, **patterns)
    import_adapter(source, servable.id, root, model_id="tuned")
    scales = read_scales(root / "tuned")
    assert scales is not None
    assert len(scales) == 8
    assert scales["model.layers.1.self_attn.q_proj"].scale == pytest.approx(8 / math.sqrt(2))
    assert scales["model.layers.1.self_attn.q_proj"].rank == 2
    assert scales["model.layers.0.mlp.up_proj"].scale == pytest.approx(16 / 2)
    assert read_scales(root / servable.id) is None


def test_l5_an_adapter_is_priced_by_its_base_and_beside_quantized_weights_itself(
    servable: Manifest, root: Path, tmp_path: Path
) -> None:
    made = import_adapter(write(tmp_path / "tuned"), servable.id, root, model_id="tuned")
    for method, beside in (("none", 0), ("nf4", 4), ("int8", 4), ("int4-fast", 0)):
        plain, tuned = (
            price_stage(model_shape(manifest), 1, 3, "bfloat16", method, 1).layers for manifest in (servable, made)
        )
        assert tuned - plain == beside * 2 * (4 * 64 + 64 * 4 + 4 * 64 + 96 * 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "is IA3"),
        ({"task_type": "SEQ_CLS"}, "SEQ_CLS"),
        ({"bias": "all"}, "bias is all"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"lora_bias": True}, "lora_bias"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is pissa"),
        ({"target_parameters": ["experts"]}, "target_parameters"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 2], [1, 4]]}, "layer_replication"),
        ({"use_qalora": True, "qalora_group_size": 16}, "use_qalora is True"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
        ({"kasa_config": {"beta": 1}}, "kasa_config"),
        ({"velora_config": {"rank": 1}}, "velora_config"),
        ({"a_switch_of_tomorrow": True}, "a_switch_of_tomorrow is True, which is not served"),
        ({"r": 0}, "a rank is 0"),
        ({"r": "4"}, "a rank is 4"),
        ({"lora_alpha": None}, "an alpha is None"),
        ({"rank_pattern": {"(": 4}}, "no expression"),
        ({"base_model_name_or_path": "someone/other-7b"}, "trained on 'someone/other-7b', and tiny-llama is"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(
    changes: dict[str, Any], message: str, servable: Manifest, root: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidModel, match=message):
        import_adapter(write(tmp_path / "tuned", **changes), servable.id, root, model_id="tuned")
    assert not (root / "tuned").exists()


def test_all_that_peft_writes_of_a_plain_adapter_is_taken(servable: Manifest, root: Path, tmp_path: Path) -> None:
    """PEFT 0.21's own file, every switch of another method off."""
    off = ["auto_mapping", "revision", "modules_to_save", "layers_to_transform", "layers_pattern", "megatron_config"]
    off += ["trainable_token_indices", "eva_config", "corda_config", "lora_ga_config", "velora_config", "kasa_config"]
    off += ["alora_invocation_tokens", "monteclora_config", "layer_replication", "target_parameters", "arrow_config"]
    plain = dict.fromkeys(off) | {"loftq_config": {}, "rank_pattern": {}, "megatron_core": "megatron.core"}
    plain |= {"lora_dropout": 0.1, "inference_mode": True, "peft_version": "0.21.2", "qalora_group_size": 16}
    plain |= {"fan_in_fan_out": False, "use_qalora": False, "lora_bias": False, "init_lora_weights": True}
    plain |= {"exclude_modules": ["lm_head"], "layers_to_transform": [0, 1, 2, 3], "ensure_weight_tying": False}
    made = import_adapter(write(tmp_path / "tuned", **plain), servable.id, root, model_id="tuned")
    assert made.export == "adapters"


def changed(name: str, shape: tuple[int, ...] | None, dtype: Any = np.float32) -> dict[str, Any]:
    weights = tensors()
    if shape is None:
        del weights[name]
    else:
        weights[name] = np.zeros(shape, dtype)
    return weights


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (changed(Q.format(0, "lora_A.weight"), (4, 128)), "another base than tiny-llama: .*q_proj.lora_A"),
        (changed(Q.format(0, "lora_B.weight"), (32, 4)), r"is \[32, 4\], expected is \[64, 4\]"),
        (changed(Q.format(2, "lora_B.weight"), None), "lora_B.weight is missing"),
        (changed(Q.format(9, "lora_A.weight"), (4, 64)), "no projection 'model.layers.9"),
        (changed(Q.format(0, "lora_A.weight"), (4, 64), np.int32), "I32"),
        (changed("base_model.model.lm_head.lora_A.weight", (4, 64)), "lm_head.lora_A"),
        (changed("base_model.model.model.layers.0.mlp.gate_proj.lora_C.weight", (4, 64)), "lora_C"),
        ({"x": np.zeros(1, np.float32)}, "'x'"),
    ],
)
def test_an_adapter_for_another_base_is_refused_by_name(
    weights: dict[str, Any], message: str, servable: Manifest, root: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidModel, match=message):
        import_adapter(write(tmp_path / "tuned", weights), servable.id, root, model_id="tuned")


def test_dora_needs_its_magnitudes(servable: Manifest, root: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="lora_magnitude_vector is missing"):
        import_adapter(write(tmp_path / "tuned", use_dora=True), servable.id, root, model_id="tuned")


def test_an_adapter_that_names_no_base_is_held_to_its_shapes(servable: Manifest, root: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "tuned", base_model_name_or_path=None)
    assert import_adapter(source, servable.id, root, model_id="tuned").export == "adapters"
    assert read_adapter_config(tmp_path / "tuned" / "adapter_config.json").base == ""


def test_ids_and_bases_that_do_not_fit(servable: Manifest, root: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "tuned")
    import_adapter(source, servable.id, root, model_id="tuned")
    with pytest.raises(InvalidRequest, match="has an adapter already"):
        import_adapter(source, "tuned", root, model_id="twice")
    with pytest.raises(Conflict, match="exists"):
        import_adapter(source, servable.id, root, model_id="tuned")
    assert import_adapter(source, servable.id, root, model_id="tuned", replace=True).id == "tuned"
    with pytest.raises(ModelNotFound, match="nothing-here"):
        import_adapter(source, "nothing-here", root, model_id="other")
    with pytest.raises(InvalidRequest):
        import_adapter(source, servable.id, root, model_id="../other")
    with pytest.raises(InvalidModel, match=r"has adapter_config\.json and adapter_model\.safetensors"):
        import_adapter(str(tmp_path), servable.id, root, model_id="other")


def test_an_adapter_without_a_base_is_sent_to_the_option(root: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="--base"):
        import_model(write(tmp_path / "tuned"), root)


@pytest.mark.parametrize("spoiled", ["{}", '{"dora": 1, "modules": {}}', '{"dora": false, "modules": {"x": [1, 2.0]}}'])
def test_scales_that_were_spoiled_are_refused(spoiled: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "adapter.json").write_text(spoiled)
    with pytest.raises(InvalidModel, match="import the adapter again"):
        read_scales(tmp_path)


def test_the_command_says_what_it_made(
    servable: Manifest, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from swarmnode.cli import app

    monkeypatch.setenv("SWARM_SERVABLE_MODELS_ROOT", str(root))
    source = write(tmp_path / "Tuned")
    command = ["model-import", source, "--base", servable.id, "--json"]
    made = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)
    assert (made["id"], made["num_stages"]) == ("tuned", 2)
    with pytest.raises(InvalidRequest, match="leave --stages out"):
        CliRunner().invoke(app, [*command, "--stages", "3"], catch_exceptions=False)
