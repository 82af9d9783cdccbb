"""A servable under construction: a hidden folder that becomes the model in one rename, or leaves nothing."""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from swarmnode.errors import Conflict

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from swarmnode.ids import ModelId

HIDDEN_PREFIX = "."
"""Folders beginning with it are never servables: model ids begin with a letter or digit."""


class Workspace:
    """The folder of one import. `model` is what will be published, `scratch` is thrown away."""

    def __init__(self, root: Path, model_id: ModelId) -> None:
        self._root = root
        self._target = root / model_id
        self._folder = root / f".importing-{model_id}"
        self.model = self._folder / "model"
        self.scratch = self._folder / "scratch"

    def refuse_existing(self) -> None:
        if os.path.lexists(self._target):
            raise Conflict(f"model {self._target.name} exists in {self._root}; choose another id or replace it")

    def publish(self, *, replace: bool) -> None:
        """Make the finished folder the model. With `replace` the old one goes in the moment the new one comes."""
        old = self._root / f".replaced-{self._target.name}"
        shutil.rmtree(old, ignore_errors=True)
        if replace and os.path.lexists(self._target):
            self._target.rename(old)
        else:
            self.refuse_existing()
        self.model.rename(self._target)
        _sync_folder(self._root)
        shutil.rmtree(old, ignore_errors=True)

    @contextmanager
    def opened(self) -> Iterator[Workspace]:
        """Own the folder, cleared of what a crashed import left; Conflict while another import holds it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            self._lock(descriptor)
            self._clear()
            self.model.mkdir()
            self.scratch.mkdir()
            try:
                yield self
            finally:
                shutil.rmtree(self._folder, ignore_errors=True)
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        busy = f"another import of {self._target.name} is running; wait for it or end it"
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one that held the lock may have removed the folder that we opened.
            still_there = os.path.samestat(os.fstat(descriptor), self._folder.stat())
        except OSError as error:
            raise Conflict(busy) from error
        if not still_there:
            raise Conflict(busy)

    def _clear(self) -> None:
        replaced = self._root / f".replaced-{self._target.name}"
        if replaced.exists() and not os.path.lexists(self._target):
            replaced.rename(self._target)  # a crash between the two renames of `publish`
        for left in (self.model, self.scratch):
            shutil.rmtree(left, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
