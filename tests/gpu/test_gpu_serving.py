"""What a peer with a card runs: its probe, its worker, adapters, and a GGUF file's blocks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def test_a_node_is_told_of_its_card_by_the_probe(device: str) -> None:
    import torch

    from swarmnode.compute.device import int4_obstacle

    program = [sys.executable, "-m", "swarmnode.compute.device", device]
    said = json.loads(subprocess.run(program, capture_output=True, check=True, timeout=120).stdout)
    expected = {"device": device, "int4_obstacle": "" if device == "cpu" else int4_obstacle(torch.device(device))}
    if device != "cpu":
        expected["vram_bytes"] = torch.cuda.mem_get_info()[1]
        assert 0 < said.pop("vram_free_bytes") <= expected["vram_bytes"]
    assert said == expected


def test_k3_a_worker_on_a_card_says_what_fits_there_and_answers(device: str, tmp_path: Path) -> None:
    for name in ("tokenizers", "jinja2", "msgpack", "trio"):
        pytest.importorskip(name)
    from test_worker import chat, head_spec, next_of, running
    from tiny_models import make_tiny

    from swarmnode.wire.bodies import pack_body, unpack_body
    from swarmnode.wire.frames import Frame

    make_tiny(tmp_path / "tokenizer", num_layers=4)
    (tmp_path / "shards").mkdir()
    (tmp_path / "tokenizer" / "model.safetensors").replace(tmp_path / "shards" / "model.safetensors")
    shape = {"num_stages": 1, "num_layers": 4, "context_tokens": 2048, "min_context_tokens": 1024}
    spec = head_spec(
        tmp_path, **shape, scripted=False, shards=("shards/model.safetensors",), dtype="auto", device=device
    )
    with running(spec, 120.0) as (reader, writer):
        ready = unpack_body(next_of(reader, "ready").body)
        assert ready["device"] == device
        assert ready["kv_tokens"] == spec.kv_tokens, "a tiny model on a card has room for what was planned"
        measured = {"kv_tokens": ready["kv_tokens"], "costs": [ready["costs"]]}
        writer.write(Frame("probe_ring", {"ring": "r"}, pack_body(measured)))
        next_of(reader, "probed")
        writer.write(chat("hello"))
        assert next_of(reader, "text").header["n"] > 0


@pytest.mark.parametrize(
    ("kind", "method", "mode"),
    [
        ("plain", "none", "lean"),
        ("plain", "nf4", "lean"),
        ("plain", "nf4", "peft"),
        ("plain", "bnb-int8", "lean"),
        ("dora", "none", "lean"),
        ("dora", "nf4", "lean"),
    ],
)
def test_q3_an_adapter_says_there_what_it_says_on_the_cpu(
    kind: str, method: str, mode: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("peft", "tokenizers", "torchao", *(() if method == "none" else ("bitsandbytes",))):
        pytest.importorskip(name)
    from stage_chains import prompt_of
    from test_lora import tune

    monkeypatch.setenv("SWARM_SERVE_LORA", mode)
    tuned = tune(tmp_path, kind)
    here, there = (tuned.engines(1, method, device=where) for where in ("cpu", device))
    assert there.engines[0].model.device.type == device  # type: ignore[attr-defined]
    for session in range(2):
        prompt = prompt_of(30, session)
        assert there.reply(session, prompt, 3, 32)[:2] == here.reply(session, prompt, 3, 32)[:2]


def test_q6_the_blocks_of_a_gguf_file_are_quantized_anew(device: str, tmp_path: Path) -> None:
    for name in ("gguf", "tokenizers", "torchao"):
        pytest.importorskip(name)
    from dataclasses import replace

    from stage_chains import Chain, prompt_of
    from test_gguf_blocks import LAYERS, make_servable, shards, spec_of, without_blocks

    from swarmnode.compute.device import int4_obstacle, pick_device
    from swarmnode.compute.loader import load_stage

    picked = pick_device(device)
    if picked.type == "cpu":
        pytest.skip("a CPU takes the blocks as they are")
    if obstacle := int4_obstacle(picked):
        pytest.skip(obstacle)
    folder = make_servable(tmp_path)
    found, expected = (
        Chain([load_stage(replace(spec_of(folder, files, 0, LAYERS), device=device))]).reply(0, prompt_of(20), 6, 32)
        for files in (shards(folder), without_blocks(folder))
    )
    assert found == expected
