"""M4 for whole shard files."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.catalog.manifest import Architecture, FileEntry, Manifest
from swarmnode.catalog.planning import check_codecs, cut_of_shards, stage_files, stage_shards
from swarmnode.errors import LoadRefused


def manifest(layers: int, boundaries: tuple[int, ...] | None, stages: int) -> Manifest:
    paths = ["tokenizer/config.json", *(f"shards/stage-{i}/model.safetensors" for i in range(stages))]
    return Manifest(
        format=1,
        id="m",
        base="test",
        architecture=Architecture(
            name="LlamaForCausalLM",
            model_type="llama",
            num_layers=layers,
            hidden_size=8,
            vocab_size=8,
            context_tokens=8,
            kv_values_per_token_layer=8,
            layer_params=(1,) * layers,
            embed_params=1,
            head_params=1,
        ),
        num_stages=stages,
        boundaries=boundaries,
        dtype="float32",
        files=tuple(FileEntry(path=path, size=1, sha256="0" * 64) for path in paths),
    )


THIRTY = manifest(30, (10, 20), 3)


@pytest.mark.parametrize(
    ("first", "end", "stages", "expected"),
    [
        (0, 10, 3, (0,)),
        (10, 20, 3, (1,)),
        (20, 30, 3, (2,)),
        (0, 15, 2, (0, 1)),
        (15, 30, 2, (1, 2)),
        (0, 30, 1, (0, 1, 2)),
        (9, 11, 15, (0, 1)),
        (12, 14, 15, (1,)),
    ],
)
def test_a_stage_reads_the_shards_its_layers_overlap(
    first: int, end: int, stages: int, expected: tuple[int, ...]
) -> None:
    assert stage_shards(THIRTY, first, end, stages) == expected
    names = [file.path for file in stage_files(THIRTY, first, end, stages)]
    assert names == ["tokenizer/config.json", *(f"shards/stage-{i}/model.safetensors" for i in expected)]


@settings(deadline=None)
@given(data=st.data())
def test_every_layer_is_in_a_shard_that_its_stage_reads(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 20))
    cuts = st.sets(st.integers(1, layers - 1)) if layers > 1 else st.just(set())
    recorded = sorted(data.draw(cuts))
    served = (0, *sorted(data.draw(cuts)), layers)
    model = manifest(layers, tuple(recorded), len(recorded) + 1)
    for first, end in pairwise(served):
        shards = stage_shards(model, first, end, len(served) - 1)
        holders = {sum(cut <= layer for cut in recorded) for layer in range(first, end)}
        assert set(shards) == holders


def test_an_unrecorded_split_serves_only_as_exported() -> None:
    model = manifest(30, None, 3)
    assert stage_shards(model, 10, 20, 3, stage=1) == (1,)
    assert stage_shards(model, 10, 20, 3) == (0, 1, 2)
    with pytest.raises(LoadRefused, match="only over the 3 stages it was exported with; 2 were asked"):
        stage_files(model, 0, 15, 2)


def layers(*numbers: int) -> list[str]:
    return ["model.norm.weight", *(f"model.layers.{number}.mlp.up_proj.weight" for number in numbers)]


def test_m4_an_unrecorded_cut_is_read_off_the_shards() -> None:
    model = manifest(6, None, 3)
    assert cut_of_shards(model, [layers(0), layers(4, 1, 3, 2), layers(5)]) == (1, 5)


@pytest.mark.parametrize(
    ("shards", "why"),
    [
        ([layers(0, 1), layers(3, 4, 5)], "shard 1 has layers 3, 4, 5 where 2 and what follows are next"),
        ([layers(0, 1, 2), layers(2, 3, 4, 5)], "shard 1 has layers 2, 3, 4, 5 where 3"),
        ([layers(0, 1, 2, 3, 4, 5), layers()], "shard 1 has layers none"),
        ([layers(0, 1, 2), layers(3, 4)], "has 6 layers, its shards hold 5"),
    ],
)
def test_m4_shards_that_are_no_cut_are_named(shards: list[list[str]], why: str) -> None:
    with pytest.raises(LoadRefused, match=why):
        cut_of_shards(manifest(6, None, 2), shards)


@pytest.mark.parametrize(("first", "end", "stages"), [(0, 31, 1), (5, 5, 2), (-1, 5, 2), (0, 30, 0), (0, 1, 31)])
def test_what_is_no_stage_is_refused_with_the_numbers(first: int, end: int, stages: int) -> None:
    with pytest.raises(LoadRefused, match=r"30 layers|layers 0 to 29"):
        stage_files(THIRTY, first, end, stages)


def test_m4_a_model_that_learned_with_codecs_is_not_served_without_them() -> None:
    check_codecs(THIRTY.model_copy(update={"codecs": ({"method": "none"}, {})}))
    with pytest.raises(LoadRefused, match=r"m was trained with codecs on its boundaries \(\{'method': 'bottleneck'"):
        check_codecs(THIRTY.model_copy(update={"codecs": ({}, {"method": "bottleneck", "width": 64})}))
