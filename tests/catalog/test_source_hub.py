"""Imports from a hub: real huggingface_hub in a process of its own against a hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from fake_hub import COMMIT, FakeHub, run_fake_hub

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WEIGHTS = "model.safetensors"
SCRIPT = """
import json, sys
from pathlib import Path
from huggingface_hub import constants
from swarmnode.catalog import disk
from swarmnode.catalog.importing import import_model
from swarmnode.errors import SwarmError

def report(progress):
    print(json.dumps([progress.phase, progress.done_bytes, progress.total_bytes, progress.file]), flush=True)

constants.DOWNLOAD_CHUNK_SIZE = 4096
if len(sys.argv) > 3:
    disk.free_bytes = lambda folder: int(sys.argv[3])
try:
    manifest = import_model(sys.argv[1], Path(sys.argv[2]), report=report)
    print(json.dumps({"id": manifest.id, "base": manifest.base, "torch": "torch" in sys.modules}))
except SwarmError as error:
    print(json.dumps({"code": error.code, "message": error.message}))
"""


@pytest.fixture
def hub(tiny_llama: Path) -> Iterator[FakeHub]:
    with run_fake_hub(tiny_llama, **{"README.md": b"x", "pytorch_model.bin": b"x", "evil.py": b"x"}) as hub:
        yield hub


class Importer:
    """Runs imports with a hub cache and a models root of its own."""

    def __init__(self, hub: FakeHub, folder: Path) -> None:
        self.root = folder / "models"
        self.environment = os.environ | {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(folder / "hf"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", SCRIPT, arguments[0], str(self.root), *arguments[1:]]
        return subprocess.Popen(
            command, env=self.environment | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run(self, *arguments: str, **environment: str) -> tuple[dict[str, Any], list[list[Any]]]:
        """The result and the progress; the process must end by itself."""
        process = self.start(*arguments, **environment)
        out, err = process.communicate(timeout=60)
        lines = [json.loads(line) for line in out.splitlines()]
        assert lines, err
        return lines[-1], lines[:-1]


@pytest.fixture
def importer(hub: FakeHub, tmp_path: Path) -> Importer:
    return Importer(hub, tmp_path)


def test_a_hub_model_is_imported_and_only_what_it_needs_is_fetched(hub: FakeHub, importer: Importer) -> None:
    result, progress = importer.run("owner/tiny")
    assert result == {"id": "tiny", "base": f"hub owner/tiny@{COMMIT}", "torch": False}
    needed = {WEIGHTS, "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert sorted(hub.fetched()) == sorted(needed)
    assert hub.fetched()[0] == "config.json"
    downloads = [line for line in progress if line[0] == "download"]
    assert downloads[-1][1] == downloads[-1][2] == sum(len(hub.files[name]) for name in needed)
    assert [line[1] for line in downloads] == sorted(line[1] for line in downloads)


def test_what_the_hub_cache_holds_is_not_fetched_again(hub: FakeHub, importer: Importer) -> None:
    result, _ = importer.run("owner/tiny", HF_HUB_OFFLINE="1")
    assert result["code"] == "fetch_failed"
    assert "HF_HUB_OFFLINE" in result["message"]
    assert hub.requests == []
    script = "import sys, huggingface_hub as h; [h.hf_hub_download('owner/tiny', name) for name in sys.argv[1:]]"
    names = [name for name in hub.files if name.endswith((".json", ".safetensors"))]
    command = [sys.executable, "-c", script, *names]
    subprocess.run(command, env=importer.environment, check=True, capture_output=True)
    asked = len(hub.requests)
    result, _ = importer.run("owner/tiny", HF_HUB_OFFLINE="1")
    assert result["base"] == f"hub owner/tiny@{COMMIT}"
    assert len(hub.requests) == asked
    (importer.root / "tiny").rename(importer.root / "first")
    result, _ = importer.run("owner/tiny")
    assert result["id"] == "tiny"
    assert [path for method, path, _ in hub.requests[asked:] if method == "GET"] == ["/api/models/owner/tiny"]
    for path in (importer.root / "tiny").rglob("*"):
        assert not path.is_symlink()
        assert (
            path.is_dir()
            or path.name == "servable.json"
            or path.read_bytes() == (importer.root / "first" / path.relative_to(importer.root / "tiny")).read_bytes()
        )


def test_an_interrupted_download_resumes(hub: FakeHub, importer: Importer) -> None:
    hub.stall = WEIGHTS
    half = len(hub.files[WEIGHTS]) // 2
    process = importer.start("owner/tiny")
    assert process.stdout is not None
    assert hub.stalled.wait(60)
    begun = sum(len(hub.files[name]) for name in hub.fetched() if name != WEIGHTS)
    for line in process.stdout:
        if json.loads(line)[1] >= begun + half - 4096:
            break
    process.kill()
    process.communicate()
    assert not (importer.root / "tiny").exists()
    hub.stall = None
    asked = len(hub.requests)
    result, progress = importer.run("owner/tiny")
    assert result["id"] == "tiny"
    fetches = [(path.rsplit("/", 1)[1], r) for method, path, r in hub.requests[asked:] if "/resolve/" in path]
    assert [name for name, _ in fetches] == [WEIGHTS]
    assert fetches[0][1] is not None
    assert half - 3 * 4096 <= int(fetches[0][1].removeprefix("bytes=").split("-")[0]) <= half
    downloads = [line for line in progress if line[0] == "download"]
    assert downloads[-1][1] == downloads[-1][2]
    assert [p.name for p in importer.root.iterdir()] == ["tiny"]


@pytest.mark.parametrize("name", [WEIGHTS, "tokenizer.json"])
def test_a_file_with_another_checksum_is_refused(hub: FakeHub, importer: Importer, name: str) -> None:
    hub.garble = name
    result, _ = importer.run("owner/tiny")
    assert result["code"] == "fetch_failed"
    assert f"owner/tiny/{name}: what came does not have the hub's checksum" in result["message"]
    hub.garble = None
    assert importer.run("owner/tiny")[0]["id"] == "tiny"


def test_the_disk_is_checked_before_the_weights_are_fetched(hub: FakeHub, importer: Importer) -> None:
    result, _ = importer.run("owner/tiny", "1000")
    assert result["code"] == "no_space"
    assert "downloading owner/tiny needs" in result["message"]
    assert hub.fetched() == ["config.json"]


def test_pickles_and_own_code_are_refused_before_the_weights_are_fetched(hub: FakeHub, importer: Importer) -> None:
    config = json.loads(hub.files["config.json"])
    hub.files["config.json"] = json.dumps(config | {"auto_map": {"AutoModel": "evil.Model"}}).encode()
    result, _ = importer.run("owner/tiny")
    assert (result["code"], "never runs a model's code" in result["message"]) == ("invalid_model", True)
    assert hub.fetched() == ["config.json"]
    assert list(importer.root.iterdir()) == []
    del hub.files[WEIGHTS]
    result, _ = importer.run("owner/tiny")
    assert result["code"] == "invalid_model"
    assert "pytorch_model.bin is a pickle" in result["message"]
    assert hub.fetched() == ["config.json"]


def test_a_model_the_hub_does_not_have_is_named(importer: Importer) -> None:
    result, _ = importer.run("owner/none")
    assert result["code"] == "fetch_failed"
    assert "owner/none: the hub has no such model" in result["message"]


def test_a_hub_that_does_not_answer_is_an_error(importer: Importer) -> None:
    result, _ = importer.run("owner/tiny", HF_ENDPOINT="http://127.0.0.1:9")
    assert result["code"] == "fetch_failed"
    assert "owner/tiny" in result["message"]
