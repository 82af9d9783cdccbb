"""The servables under the models root: found, checked and listed without torch; broken ones are named, never fatal."""

from __future__ import annotations

import os
import stat
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, TYPE_CHECKING

from pydantic import ValidationError

from swarmnode.catalog.archive import Archive, Member
from swarmnode.catalog.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, FileEntry, Manifest
from swarmnode.catalog.refusals import read_json_object, refuse_own_code, refuse_pickles
from swarmnode.catalog.workspace import HIDDEN_PREFIX, Workspace
from swarmnode.errors import InvalidModel, ModelNotFound
from swarmnode.ids import parse_model_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from swarmnode.ids import ModelId

MAX_NAMED_MODELS = 20
"""A message names this many of the served models."""

_Fingerprint = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class _Scanned:
    """What one folder was when it was last read."""

    fingerprint: _Fingerprint
    manifest: Manifest | None
    problem: str
    digest: str = ""
    """The manifest's."""


class Registry:
    """Discovers servables under `root`. Every question looks again, but reads only folders that changed.

    Synchronous and cheap: one directory listing and two stats for each model.
    """

    def __init__(
        self,
        root: Path,
        elsewhere: Callable[[], Mapping[str, Manifest]] = dict,
        removed: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """`elsewhere`: servables, by id, whose files may lie on other machines only. `removed`: imports that were taken
        out of the swarm, by digest, with the time in Unix seconds: what lies here of them is not served."""
        self.root = root
        self._elsewhere = elsewhere
        self._removed = removed
        self._hidden: set[str] = set()
        self._scanned: dict[str, _Scanned] = {}

    def models(self) -> tuple[Manifest, ...]:
        """All servables, by id."""
        found = {**self._elsewhere(), **{manifest.id: manifest for manifest in self.here()}}
        return tuple(found[name] for name in sorted(found) if name not in self._hidden)

    def here(self) -> tuple[Manifest, ...]:
        """Those with their files under `root`, by id."""
        found = (scanned.manifest for _, scanned in sorted(self._look().items()))
        return tuple(manifest for manifest in found if manifest is not None)

    def problems(self) -> dict[str, str]:
        """Folders that look like servables and are not served, each with the reason."""
        return {name: scanned.problem for name, scanned in sorted(self._look().items()) if scanned.manifest is None}

    def left_over(self, model: str) -> Manifest | None:
        """What lies here of a servable that was removed from the swarm, and that only its folder's removal ends."""
        scanned = self._scan().get(model)
        if scanned is None or scanned.digest not in self._removed() or self.hides(model):
            return None
        return scanned.manifest

    def get(self, model: str) -> Manifest:
        """One servable; raises ModelNotFound that names the served ids, or why this one is not served."""
        if model in self._hidden:
            raise ModelNotFound(f"model {model!r} is being removed", param="model")
        scanned = self._look()
        found, elsewhere = scanned.get(model), self._elsewhere()
        if (found is None or found.manifest is None) and model in elsewhere:
            return elsewhere[model]
        if found is None:
            served = sorted({*elsewhere, *(name for name, other in scanned.items() if other.manifest is not None)})
            raise ModelNotFound(f"model {model[:120]!r} is not served here; {_served(served)}", param="model")
        if found.manifest is None:
            raise ModelNotFound(f"model {model!r} cannot be served: {found.problem}", param="model")
        return found.manifest

    @contextmanager
    def hidden(self, model: ModelId) -> Iterator[None]:
        """Within the block the model is in no list, and whoever asks for it hears that it is being removed."""
        self._hidden.add(model)
        try:
            yield
        finally:
            self._hidden.discard(model)

    def hides(self, model: str) -> bool:
        """Whether it is being removed."""
        return model in self._hidden

    def remove_files(self, manifest: Manifest) -> None:
        """Delete the folder of this import, if it lies here; another one that came in its place stays. Raises Conflict
        while an import of that id runs, and InvalidModel where the file system refuses."""
        folder = self.root / manifest.id
        if not os.path.lexists(folder):
            return
        workspace = Workspace(self.root, manifest.model_id)
        try:
            with workspace.held():
                if read_manifest(folder / MANIFEST_NAME).digest == manifest.digest:
                    workspace.remove()
        except OSError as error:
            raise InvalidModel(f"{manifest.id} cannot be deleted: {error.strerror}: {error.filename}") from error

    def file_path(self, model: str, entry: FileEntry) -> Path:
        """Where a file of a servable lies; raises InvalidModel unless it is a plain file of the recorded size.

        `entry.path` holds no `..`, and no part of it may be a link, so the path never leaves the model's folder.
        """
        return _checked_path(self._folder(self.get(model)), entry)

    def open_file(self, model: str, entry: FileEntry) -> IO[bytes]:
        """The file opened for reading, links refused once more as it is opened."""
        return _open(self.file_path(model, entry))

    def archive(self, model: str) -> Archive:
        """The whole servable as one uncompressed tar, streamed."""
        manifest = self.get(model)
        folder = self._folder(manifest)
        record = folder / MANIFEST_NAME
        members = [Member(f"{manifest.id}/{MANIFEST_NAME}", record.stat().st_size, partial(_open, record))]
        for entry in manifest.files:
            path = _checked_path(folder, entry)
            members.append(Member(f"{manifest.id}/{entry.path}", entry.size, partial(_open, path)))
        return Archive(tuple(members), modified_s=manifest.created)

    def _folder(self, manifest: Manifest) -> Path:
        found = self._look().get(manifest.id)
        if found is None or found.manifest != manifest:
            why, again = "are not on this machine", ""
            if found is not None and found.problem:
                why, again = f"are not whole on this machine (what lies there: {found.problem})", " again"
            raise InvalidModel(
                f"the files of {manifest.id} {why}; start a machine that has them, or import the model here{again}"
            )
        return self.root / manifest.id

    def _look(self) -> dict[str, _Scanned]:
        """What is there, as `_scan`, with the servables that were removed from the swarm among the problems."""
        removed = self._removed()
        return {
            name: self._not_served(name, scanned, removed[scanned.digest]) if scanned.digest in removed else scanned
            for name, scanned in self._scan().items()
        }

    def _not_served(self, name: str, scanned: _Scanned, removed_s: float) -> _Scanned:
        day = time.strftime("%Y-%m-%d", time.gmtime(removed_s))
        why = (
            f"it was removed from the swarm on {day}; delete {self.root / name} (`swarmnode model-remove {name}` does, "
            "while this machine coordinates), or import it again with --replace to serve it"
        )
        return replace(scanned, manifest=None, problem=why)

    def _scan(self) -> dict[str, _Scanned]:
        """What is there now, by folder name; a new dictionary each time, so that threads may ask at once."""
        before = self._scanned
        try:
            with os.scandir(self.root) as entries:
                names = [e.name for e in entries if not e.name.startswith(HIDDEN_PREFIX)]
        except FileNotFoundError:
            names = []  # nothing was imported yet
        except OSError as error:
            raise InvalidModel(f"the models root {self.root} cannot be read: {error.strerror}") from error
        scanned: dict[str, _Scanned] = {}
        for name in names:
            fingerprint = _fingerprint(self.root / name)
            if fingerprint is None:
                continue  # a file, or a folder that is no servable and does not claim to be one
            known = before.get(name)
            scanned[name] = known if known and known.fingerprint == fingerprint else self._read(name, fingerprint)
        self._scanned = scanned
        return scanned

    def _read(self, name: str, fingerprint: _Fingerprint) -> _Scanned:
        try:
            manifest = _read_servable(self.root / name)
            return _Scanned(fingerprint, manifest, "", manifest.digest)
        except InvalidModel as error:
            return _Scanned(fingerprint, None, error.message)


def _fingerprint(folder: Path) -> _Fingerprint | None:
    """What changes when the servable does; None where there is no manifest."""
    try:
        folder_stat, record = folder.lstat(), (folder / MANIFEST_NAME).lstat()
    except OSError:
        return None
    return (folder_stat.st_ino, folder_stat.st_mtime_ns, record.st_ino, record.st_mtime_ns)


def _read_servable(folder: Path) -> Manifest:
    """Read and check a servable's folder; raises InvalidModel with the reason it is not served."""
    try:
        parse_model_id(folder.name)
    except ValueError as error:
        raise InvalidModel(str(error)) from error
    if folder.is_symlink() or (folder / MANIFEST_NAME).is_symlink():
        raise InvalidModel("a link is not followed: put the servable itself under the models root")
    _refuse_files(folder)
    manifest = read_manifest(folder / MANIFEST_NAME)
    if manifest.id != folder.name:
        raise InvalidModel(f"{MANIFEST_NAME}: id is {manifest.id!r}, but the folder is {folder.name!r}")
    for entry in manifest.files:
        path = _checked_path(folder, entry)
        if path.name in ("config.json", "tokenizer_config.json"):
            refuse_own_code(read_json_object(path), entry.path)
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Parse a manifest of bounded size; raises InvalidModel that names the field."""
    try:
        with _open(path) as file:
            raw = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise InvalidModel(f"{path.name}: cannot be read ({error.strerror or error})") from error
    if len(raw) > MAX_MANIFEST_BYTES:
        raise InvalidModel(f"{path.name}: is larger than the {MAX_MANIFEST_BYTES} bytes a manifest may have")
    try:
        return Manifest.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise InvalidModel(f"{path.name}: {field}: {first['msg']}") from error


def _refuse_files(folder: Path) -> None:
    for below, folders, files in os.walk(folder):
        refuse_pickles(files, os.path.relpath(below, folder.parent))
        links = [name for name in (*folders, *files) if os.path.islink(os.path.join(below, name))]
        if links:
            raise InvalidModel(
                f"{links[0]}: is a link; a servable holds plain files only, so that none leads elsewhere"
            )


def _checked_path(folder: Path, entry: FileEntry) -> Path:
    path = folder
    for part in entry.path.split("/"):
        path = path / part
        try:
            found = path.lstat()
        except OSError as error:
            raise InvalidModel(
                f"{entry.path}: is listed in the manifest but not there; import the model again"
            ) from error
        if stat.S_ISLNK(found.st_mode):
            raise InvalidModel(f"{entry.path}: {part} is a link; a servable holds plain files only")
    if not stat.S_ISREG(found.st_mode) or found.st_size != entry.size:
        raise InvalidModel(f"{entry.path}: has {found.st_size} bytes, the manifest says {entry.size}; import it again")
    return path


def _open(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")


def _served(ids: list[str]) -> str:
    if not ids:
        return "no model is; import one with `swarmnode model-import SOURCE`"
    more = f" and {len(ids) - MAX_NAMED_MODELS} more" if len(ids) > MAX_NAMED_MODELS else ""
    return f"served are: {', '.join(ids[:MAX_NAMED_MODELS])}{more}"
