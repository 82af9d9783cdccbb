"""Tiny checkpoints and servables, made once for the folder's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tiny_models import make_tiny, tiny_copy

from swarmnode.catalog.importing import import_model

if TYPE_CHECKING:
    from pathlib import Path

    from swarmnode.catalog.manifest import Manifest


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 4 layers with its own head, in one file. Not to be changed."""
    return make_tiny(tmp_path_factory.mktemp("tiny") / "tiny-llama", "llama", seed=1)


@pytest.fixture
def source(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny llama that a test may spoil."""
    return tiny_copy(tiny_llama, tmp_path / "tiny-llama")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty models root."""
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


@pytest.fixture
def servable(tiny_llama: Path, root: Path) -> Manifest:
    """The tiny llama imported into `root` as two stages."""
    return import_model(str(tiny_llama), root, stages=2)
