"""A servable under construction: a hidden folder that becomes the model in one rename, or leaves nothing served."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from swarmnode.errors import Conflict, InvalidModel, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from swarmnode.ids import ModelId

_log = logging.getLogger(__name__)

HIDDEN_PREFIX = "."
"""Folders beginning with it are never servables: model ids begin with a letter or digit."""
_REMOVED_PREFIX = ".removed-"
_REFUSED = (InvalidModel, InvalidRequest)
"""Errors after which the same download would be refused again."""


class Workspace:
    """The folder of one import.

    `model` is what will be published; `scratch` is thrown away; `download` outlives an import that broke, so that the
    next one under the same id goes on where it was.
    """

    def __init__(self, root: Path, model_id: ModelId) -> None:
        self._root = root
        self._target = root / model_id
        self._replaced = root / f".replaced-{model_id}"
        self._removed = root / f"{_REMOVED_PREFIX}{model_id}"
        self._folder = root / f".importing-{model_id}"
        self.model = self._folder / "model"
        self.scratch = self._folder / "scratch"
        self.download = self._folder / "download"

    def refuse_existing(self) -> None:
        """Raise Conflict if the id is taken."""
        if os.path.lexists(self._target):
            raise Conflict(f"model {self._target.name} exists in {self._root}; choose another id or replace it")

    def publish(self, *, replace: bool) -> None:
        """Make the finished folder the model. With `replace` the old one goes in the moment the new one comes."""
        if replace and os.path.lexists(self._target):
            self._target.rename(self._replaced)
        else:
            self.refuse_existing()
        self.model.rename(self._target)
        _sync_folder(self._root)
        shutil.rmtree(self._replaced, ignore_errors=True)

    def remove(self) -> None:
        """Take the model away: it is not served from one rename on, and then its files go (see `sweep_removed`)."""
        self._clear(self._removed)
        self._target.rename(self._removed)
        _sync_folder(self._root)
        with suppress(FileNotFoundError):  # another process sweeps it
            shutil.rmtree(self._removed)

    @contextmanager
    def opened(self) -> Iterator[Workspace]:
        """Own the folder, cleared of what a crashed import left; Conflict while another import holds it."""
        with self.held():
            self._clear(self.model, self.scratch, self._removed)
            self.model.mkdir()
            self.scratch.mkdir()
            try:
                yield self
            except BaseException as error:
                self._clear(self.model, self.scratch, *((self.download,) if isinstance(error, _REFUSED) else ()))
                raise
            else:
                self._clear(self.download, self.scratch, self.model)

    @contextmanager
    def held(self) -> Iterator[None]:
        """No import of this id runs or begins within the block, and what one that broke brought stays; Conflict while
        one runs."""
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            self._lock(descriptor)
            self._restore()
            try:
                yield
            finally:
                with suppress(OSError):
                    self._folder.rmdir()  # stays while it holds a download
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

    def _restore(self) -> None:
        """Finish or undo what a crash between the renames of `publish` left."""
        if os.path.lexists(self._target):
            shutil.rmtree(self._replaced, ignore_errors=True)
        elif self._replaced.exists():
            self._replaced.rename(self._target)

    @staticmethod
    def _clear(*folders: Path) -> None:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def sweep_removed(root: Path) -> None:
    """Finish the removals that were cut off after their rename; one that cannot be finished is named in the log."""
    try:
        folders = list(root.glob(f"{_REMOVED_PREFIX}*"))
    except OSError as error:
        _log.warning("%s cannot be read: %s", root, error.strerror)
        return
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        if os.path.lexists(folder):
            _log.warning("%s is left of a model that was removed and cannot be deleted; delete it by hand", folder)


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
