"""GGUF: the parent's side of the converter's protocol, and the converter's check of a tokenizer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from tiny_gguf import write_gguf
from tiny_models import IM_END, make_tiny, make_tokenizer

from swarmnode.catalog import disk, source_gguf
from swarmnode.catalog.importing import import_model
from swarmnode.catalog.kept_blocks import BLOCKS_FILE
from swarmnode.catalog.source_gguf import checkpoint_from_gguf
from swarmnode.compute.gguf_import import ROUND_TRIP_TEXTS, check_tokenizer
from swarmnode.errors import InvalidModel, InvalidRequest, NoSpace

if TYPE_CHECKING:
    from pathlib import Path

    from swarmnode.catalog.progress import ImportProgress


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "Tiny-Model.Q4_1.gguf"
    path.write_bytes(b"GGUF" + bytes(96))
    return path


@pytest.fixture
def converter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let a script play the converter; it sees GGUF and TARGET in sys.argv."""

    def play(script: str) -> None:
        (tmp_path / "played_converter.py").write_text(script)
        monkeypatch.setattr(source_gguf, "MODULE", "played_converter")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return play


def test_what_the_converter_writes_is_imported(gguf: Path, converter: Any, tiny_llama: Path, root: Path) -> None:
    converter(
        "import json, os, shutil, sys\n"
        "assert os.environ['HF_HUB_OFFLINE'] == '1'\n"
        "print('a library says hello', flush=True)\n"
        "print(json.dumps({'done': 50, 'total': 100}), flush=True)\n"
        f"shutil.copytree({str(tiny_llama)!r}, sys.argv[2])\n"
    )
    seen: list[ImportProgress] = []
    manifest = import_model(str(gguf), root, report=seen.append)
    assert (manifest.id, manifest.base) == ("tiny-model.q4_1", "file Tiny-Model.Q4_1.gguf")
    assert [(p.done_bytes, p.total_bytes) for p in seen if p.phase == "dequantize"] == [(0, None), (50, 100)]
    assert [p.name for p in root.iterdir()] == [manifest.id]


def test_the_converter_s_reason_reaches_the_user(gguf: Path, converter: Any, root: Path) -> None:
    converter("import json\nprint(json.dumps({'error': 'no chat template', 'code': 'invalid_model'}), flush=True)\n")
    with pytest.raises(InvalidModel, match=r"Tiny-Model\.Q4_1\.gguf: no chat template"):
        import_model(str(gguf), root)
    assert list(root.iterdir()) == []


def test_a_converter_that_dies_is_an_error_with_its_last_words(gguf: Path, converter: Any, root: Path) -> None:
    converter("import os, sys\nprint('Killed for memory', file=sys.stderr, flush=True)\nos.kill(os.getpid(), 9)\n")
    with pytest.raises(InvalidModel, match=r"status -9 \(.*lack of memory.*\): Killed for memory"):
        import_model(str(gguf), root)


def test_a_converter_without_a_word_is_an_error(gguf: Path, converter: Any, root: Path) -> None:
    converter("raise SystemExit(3)\n")
    with pytest.raises(InvalidModel, match="status 3"):
        import_model(str(gguf), root)


def test_a_report_that_raises_ends_the_converter(gguf: Path, converter: Any, tmp_path: Path) -> None:
    converter(
        "import json, os, time\nprint(json.dumps({'done': os.getpid(), 'total': 0}), flush=True)\ntime.sleep(600)\n"
    )
    pids: list[int] = []

    def leave(progress: ImportProgress) -> None:
        if progress.done_bytes:
            pids.append(progress.done_bytes)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint_from_gguf(gguf, tmp_path / "out", leave)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_the_real_converter_ends_with_its_importer(gguf: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", source_gguf.MODULE, str(gguf), str(tmp_path / "out")],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdin is not None
    process.stdin.close()
    try:
        assert process.wait(60) == 1
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("content", [b"", b"GGU", b"GGML" + bytes(100), b"PK\x03\x04"])
def test_another_file_under_this_name_is_refused(gguf: Path, root: Path, content: bytes) -> None:
    gguf.write_bytes(content)
    with pytest.raises(InvalidModel, match="does not begin with GGUF"):
        import_model(str(gguf), root)


def test_space_for_the_dequantized_weights_is_checked_first(
    gguf: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda folder: disk.RESERVE_BYTES + 499)
    with pytest.raises(NoSpace, match="dequantizing"):
        import_model(str(gguf), root)


def test_a_file_of_no_known_kind_says_what_a_source_is(tmp_path: Path, root: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"x")
    with pytest.raises(InvalidRequest, match=r"model\.onnx is a file but not a \.gguf"):
        import_model(str(tmp_path / "model.onnx"), root)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    from transformers import AutoTokenizer

    make_tokenizer(tmp_path / "tokenizer")
    return AutoTokenizer.from_pretrained(tmp_path / "tokenizer")


def test_a_good_tokenizer_passes(tokenizer: Any) -> None:
    check_tokenizer(tokenizer, [tokenizer.convert_tokens_to_ids(IM_END)])


@pytest.mark.parametrize(
    ("template", "eos", "reason"),
    [
        (None, [2], "no chat template"),
        ("{{ messages[0]['content'] }}<|no_token|>", [2], r"<\|no_token\|>, which its tokenizer splits"),
        ("{{ messages[0]['content'] }}<|im_end|>", [0], r"ends turns with <\|im_end\|>, but \[0\] end a reply"),
        ("nothing", [2], "drops the user's message"),
    ],
)
def test_a_tokenizer_that_cannot_chat_is_refused(tokenizer: Any, template: str, eos: list[int], reason: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(InvalidModel, match=reason):
        check_tokenizer(tokenizer, eos)


def test_a_tokenizer_that_loses_text_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = tmp_path / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["normalizer"] = {"type": "Lowercase"}
    path.write_text(json.dumps(content))
    spoiled = AutoTokenizer.from_pretrained(path.parent)
    with pytest.raises(InvalidModel, match="cannot be converted"):
        check_tokenizer(spoiled, [2])
    assert any(text != text.lower() for text in ROUND_TRIP_TEXTS)


def test_a_broken_file_ends_in_one_error_line(gguf: Path, root: Path) -> None:
    with pytest.raises(InvalidModel, match=r"Tiny-Model\.Q4_1\.gguf: transformers cannot read it"):
        import_model(str(gguf), root)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_real_gguf_becomes_a_servable_with_the_same_weights_and_ids(tmp_path: Path, root: Path) -> None:
    """The whole path without the demo model: dequantizing, tokenizer, template and the end of a turn."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoTokenizer

    source = make_tiny(tmp_path / "source", "qwen2", num_layers=2)
    write_gguf(source, tmp_path / "tiny.gguf")
    manifest = import_model(str(tmp_path / "tiny.gguf"), root, stages=2)
    assert (manifest.architecture.name, manifest.dtype) == ("Qwen2ForCausalLM", "bfloat16")
    assert manifest.architecture.context_tokens == 2048
    written = load_file(root / "tiny/shards/stage-0/model.safetensors")
    written |= load_file(root / "tiny/shards/stage-1/model.safetensors")
    original = load_file(source / "model.safetensors")
    assert set(written) == set(original)
    assert not list(root.glob(f"tiny/shards/*/{BLOCKS_FILE}")), "there are none in a file of full precision"
    for name, tensor in original.items():
        assert torch.equal(written[name], tensor.to(torch.bfloat16)), name
    before, after = (AutoTokenizer.from_pretrained(f) for f in (source, root / "tiny" / "tokenizer"))
    for text in (*ROUND_TRIP_TEXTS, "<|im_start|>user\nhi<|im_end|>"):
        assert after(text).input_ids == before(text).input_ids
    chat = [{"role": "user", "content": "Hello"}]
    assert after.apply_chat_template(chat, tokenize=False) == before.apply_chat_template(chat, tokenize=False)
    assert manifest.eos_token_ids == (0, before.convert_tokens_to_ids(IM_END))
