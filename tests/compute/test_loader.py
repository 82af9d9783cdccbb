from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
from stage_chains import Chain, as_servable, even_cuts, prompt_of, stage_specs
from tiny_models import make_tiny

from swarmnode.compute.device import pick_device
from swarmnode.compute.loader import load_stage
from swarmnode.compute.spec import StageSpec
from swarmnode.errors import InvalidModel, LoadFailed, LoadRefused

if TYPE_CHECKING:
    from pathlib import Path

LAYERS = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("loader") / "model", "llama", num_layers=LAYERS)


def write_slices(checkpoint: Path, target: Path, cuts: list[int]) -> list[tuple[Path, ...]]:
    """Shards that hold their slice and nothing else, as an import cuts them."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    files = []
    for stage, (begin, end) in enumerate(pairwise(cuts)):
        layers = tuple(f"model.layers.{i}." for i in range(begin, end))
        ends = (("model.embed_tokens.",) if begin == 0 else ()) + (("model.norm.", "lm_head.") if end == LAYERS else ())
        path = target / f"stage-{stage}.safetensors"
        save_file({name: t for name, t in tensors.items() if name.startswith(layers + ends)}, path)
        files.append((path,))
    return files


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_stage_needs_only_its_own_files(stages: int, checkpoint: Path, tmp_path: Path) -> None:
    folder, whole = as_servable(checkpoint, tmp_path / "s")
    cuts = even_cuts(LAYERS, stages)
    files = write_slices(checkpoint, tmp_path, cuts)
    engines = [
        load_stage(StageSpec(folder, files[i], cuts[i], cuts[i + 1], LAYERS, i == 0, i == stages - 1))
        for i in range(stages)
    ]
    alone = load_stage(StageSpec(folder, whole, 0, LAYERS, LAYERS, True, True))
    assert Chain(engines).reply(1, prompt_of(20), 8, 16) == Chain([alone]).reply(1, prompt_of(20), 8, 16)
    held = [sum(p.numel() for p in engine.model.parameters().values()) for engine in engines]
    assert sum(held) == sum(p.numel() for p in alone.model.parameters().values())


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("serving", ["auto", "float32", "bfloat16"])
def test_weights_are_those_of_the_file_in_the_serving_dtype(stored: str, serving: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    checkpoint = make_tiny(tmp_path / "model", "qwen3", num_layers=LAYERS, dtype=stored)
    (spec,) = stage_specs(checkpoint, tmp_path / "s", LAYERS, [0, LAYERS], dtype=serving)
    model = load_stage(spec).model
    expected = torch.float32 if "float32" in (serving, stored) and serving != "bfloat16" else torch.bfloat16
    assert model.dtype == expected
    tensors = load_file(checkpoint / "model.safetensors")
    found = model.parameters()
    assert found.keys() == tensors.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter, tensors[name].to(expected)), name


def test_tied_embeddings_are_held_once_by_a_lone_stage_and_by_both_ends_of_two(tmp_path: Path) -> None:
    checkpoint = make_tiny(tmp_path / "model", "llama", num_layers=LAYERS, tied=True)
    (one,) = stage_specs(checkpoint, tmp_path / "one", LAYERS, [0, LAYERS])
    model = load_stage(one).model
    assert model.base.embed_tokens.weight is model.outer.lm_head.weight
    for spec in stage_specs(checkpoint, tmp_path / "two", LAYERS, [0, 2, LAYERS]):
        assert "model.embed_tokens.weight" in load_stage(spec).model.parameters()


def test_a_tied_last_stage_takes_either_name(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    checkpoint = make_tiny(tmp_path / "model", "llama", num_layers=LAYERS, tied=True)
    _, last = stage_specs(checkpoint, tmp_path / "s", LAYERS, [0, 2, LAYERS])
    expected = load_stage(last).model.parameters()["model.embed_tokens.weight"]
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, checkpoint / "model.safetensors")
    assert torch.equal(load_stage(last).model.parameters()["model.embed_tokens.weight"], expected)


def test_progress_counts_the_bytes_of_the_slice(checkpoint: Path, tmp_path: Path) -> None:
    _, last = stage_specs(checkpoint, tmp_path / "s", LAYERS, [0, 2, LAYERS])
    seen: list[tuple[str, int, int]] = []
    engine = load_stage(last, lambda phase, done, total: seen.append((phase, done, total)))
    size = sum(p.numel() * 4 for p in engine.model.parameters().values())
    assert seen[-1] == ("weights", size, size)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_missing_wrong_or_broken_tensors_are_named(checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    (spec,) = stage_specs(checkpoint, tmp_path / "s", LAYERS, [0, LAYERS])
    tensors = load_file(checkpoint / "model.safetensors")
    path = tmp_path / "wrong.safetensors"
    wrong = StageSpec(spec.folder, (path,), 0, LAYERS, LAYERS, True, True)
    name = "model.layers.2.mlp.up_proj.weight"
    save_file({n: t for n, t in tensors.items() if n != name}, path)
    with pytest.raises(LoadFailed, match=f"lack tensor '{name}'"):
        load_stage(wrong)
    save_file({**tensors, name: torch.zeros(3, 4)}, path)
    with pytest.raises(LoadFailed, match=r"is F32 \[3, 4\], the model needs a float \[96, 64\]"):
        load_stage(wrong)
    save_file({**tensors, name: torch.zeros(96, 64, dtype=torch.int32)}, path)
    with pytest.raises(LoadFailed, match="is I32"):
        load_stage(wrong)
    path.write_bytes((checkpoint / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(InvalidModel, match="cut short"):
        load_stage(wrong)
    with pytest.raises(LoadFailed, match="no tensors"):
        load_stage(StageSpec(spec.folder, (), 0, LAYERS, LAYERS, True, True))


def with_config(spec: StageSpec, **changes: Any) -> StageSpec:
    path = spec.folder / "tokenizer" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return spec


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "no_such_model"}, "unknown to the installed transformers"),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"model_type": "gpt2", "architectures": ["GPT2ForCausalLM"]}, "not embeddings, layers, norm and head"),
        ({"num_hidden_layers": 6}, "6 layers, the load says 4"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"hidden_size": "many"}, "cannot be built"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_served_is_refused(
    changes: dict[str, Any], reason: str, checkpoint: Path, tmp_path: Path
) -> None:
    (spec,) = stage_specs(checkpoint, tmp_path / "s", LAYERS, [0, LAYERS])
    with pytest.raises(LoadRefused, match=reason):
        load_stage(with_config(spec, **changes))


def test_layers_that_keep_their_state_elsewhere_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    (spec,) = stage_specs(checkpoint, tmp_path / "s", LAYERS, [0, LAYERS], lean=False)
    engine = load_stage(spec)
    engine.model.base.layers[1] = _NoAttention()
    with pytest.raises(LoadRefused, match=r"of 4 layers \[0, 2, 3\] used the cache"):
        engine.probe()


class _NoAttention(torch.nn.Module):
    def forward(self, rows: torch.Tensor, **_: Any) -> torch.Tensor:
        return rows


def test_devices() -> None:
    assert pick_device("cpu").type == "cpu"
    for name in ("tpu", "cpu:1", "cuda:x"):
        with pytest.raises(LoadRefused, match="is not auto, cpu, cuda"):
            pick_device(name)
    if not torch.cuda.is_available():
        assert pick_device("auto").type == "cpu"
        with pytest.raises(LoadRefused, match="no CUDA card"):
            pick_device("cuda:0")


def test_a_config_that_is_not_there_is_said(checkpoint: Path, tmp_path: Path) -> None:
    (spec,) = stage_specs(checkpoint, tmp_path / "s", LAYERS, [0, LAYERS])
    (spec.folder / "tokenizer" / "config.json").write_text("[]")
    with pytest.raises(LoadFailed, match="not a JSON object"):
        load_stage(spec)
    (spec.folder / "tokenizer" / "config.json").unlink()
    with pytest.raises(LoadFailed, match="cannot be read"):
        load_stage(spec)
