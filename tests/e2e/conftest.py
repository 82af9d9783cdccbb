"""Swarms that end-to-end tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from local_swarms import SCRIPT, Swarm, start_swarm

from swarmnode.compute.scripted_servable import write_scripted_servable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def models_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_scripted_servable(root, "scripted", SCRIPT, layers=8, stages=2)
    write_scripted_servable(root, "scripted-three", SCRIPT, layers=8, stages=3)
    write_scripted_servable(root, "scripted-two", SCRIPT, layers=4, stages=2)
    return root


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory, models_root: Path) -> Iterator[Swarm]:
    """A coordinator and three peers, shared by a module whose tests leave them alive."""
    swarm = start_swarm(tmp_path_factory.mktemp("swarm"), models_root, peers=3)
    yield swarm
    swarm.close()


@pytest.fixture
def fresh_swarm(tmp_path: Path, models_root: Path) -> Iterator[Swarm]:
    """A swarm of a test that kills parts of it: four peers, so that two rings of two can live side by side."""
    swarm = start_swarm(tmp_path, models_root, peers=4)
    yield swarm
    swarm.close()
